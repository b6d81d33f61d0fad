"""The Grafana dashboard and the Prometheus rules that the chart installs, generated from the router's metrics.

    PYTHONPATH=generators python -m monitoring charts/argosy/files

Owns: panels, alerts, and the files they are written to. Must not know: how the metrics are counted.
Invariant: every expression takes its metric's name from the registry, with the suffix of its kind, so that a dashboard
never queries a metric that no router exports.
"""
