"""The Grafana dashboard and the Prometheus rules that the chart installs, made from the metrics a router has.

    PYTHONPATH=charts python -m dashboards charts/argosy/files

Owns: panels, alerts, and the files they are written to. Must not know: where the figures come from.
Invariant: every expression takes its metric's name out of the registry, with the suffix of its kind, so a dashboard
cannot ask for what no router exports.
"""
