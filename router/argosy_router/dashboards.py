"""The Grafana dashboard and the Prometheus rules that the chart installs, made from the metrics a router has.

    python -m argosy_router.dashboards charts/argosy/files

Owns: panels, alerts, and the files they are written to. Must not know: where the figures come from.
Invariant: every expression takes its metric's name out of the registry, with the suffix of its kind, so a dashboard
cannot ask for what no router exports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from argosy_router.config import RouterConfig
from argosy_router.metrics import PREFIX
from argosy_router.series import Counter, Histogram, Reading, Series
from argosy_router.server import Router

DASHBOARD = "router-dashboard.json"
RULES = "router-rules.yaml"
_WINDOW = "$__rate_interval"
_CHOSEN = 'model=~"$model"'


class Registry:
    """Full names of a router's series, by kind."""

    def __init__(self, series: Sequence[Series]) -> None:
        self._series = {one.name: one for one in series}

    @property
    def names(self) -> Sequence[str]:
        """Without prefix and suffix."""
        return tuple(self._series)

    @classmethod
    def of_router(cls) -> Registry:
        """The registry of a router as production runs it."""

        async def build() -> Registry:
            return cls(tuple(Router(RouterConfig(replicas=("http://127.0.0.1:1",))).metrics.series))

        return asyncio.run(build())

    def counter(self, name: str) -> str:
        series = self._series[name]
        assert isinstance(series, Counter) or (isinstance(series, Reading) and series.kind == "counter"), name
        return f"{PREFIX}{name}_total"

    def gauge(self, name: str) -> str:
        series = self._series[name]
        assert isinstance(series, Reading), name
        assert series.kind == "gauge", name
        return PREFIX + name

    def buckets(self, name: str) -> str:
        assert isinstance(self._series[name], Histogram), name
        return f"{PREFIX}{name}_bucket"


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: a title, Grafana's unit, and lines as (expression, legend)."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    text: str = ""
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


class Expressions:
    """PromQL over a registry, for a dashboard's chosen models or for rules over all."""

    def __init__(self, registry: Registry, window: str = _WINDOW, chosen: str = _CHOSEN) -> None:
        self._registry = registry
        self._window = window
        self._chosen = chosen

    def rate(self, counter: str, by: str = "", where: str = "", *, has_model: bool = True) -> str:
        """Increase per second, summed."""
        selector = self._selector(where, has_model=has_model)
        return f"sum{_by(by)}(rate({self._registry.counter(counter)}{selector}[{self._window}]))"

    def gauge(self, gauge: str, by: str = "", where: str = "", *, has_model: bool = True) -> str:
        return f"sum{_by(by)}({self._registry.gauge(gauge)}{self._selector(where, has_model=has_model)})"

    def quantile(self, share: float, histogram: str, by: str = "", *, has_model: bool = True) -> str:
        labels = ", ".join(filter(None, (by, "le")))
        selector = self._selector("", has_model=has_model)
        buckets = f"rate({self._registry.buckets(histogram)}{selector}[{self._window}])"
        return f"histogram_quantile({share:g}, sum by ({labels}) ({buckets}))"

    def _selector(self, where: str, *, has_model: bool) -> str:
        conditions = ", ".join(filter(None, (self._chosen if has_model else "", where)))
        return f"{{{conditions}}}" if conditions else ""


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def _quantiles(e: Expressions, histogram: str, shares: Sequence[float]) -> list[tuple[str, str]]:
    return [(e.quantile(share, histogram), f"p{share * 100:g}") for share in shares]


def rows(registry: Registry) -> list[Row]:
    """The dashboard's content."""
    e = Expressions(registry)
    per_replica = "model, replica"
    return [
        Row(
            "Traffic",
            (
                Panel("Requests", "reqps", [(e.rate("requests", "code"), "{{code}}")], is_stacked=True),
                Panel("Time to first token", "s", _quantiles(e, "ttft_seconds", (0.5, 0.9, 0.99))),
                Panel("Time between tokens", "s", _quantiles(e, "itl_seconds", (0.5, 0.9, 0.99))),
                Panel("Request duration", "s", _quantiles(e, "request_duration_seconds", (0.5, 0.9, 0.99))),
                Panel(
                    "Tokens",
                    "short",
                    [
                        (e.rate("prompt_tokens"), "prompt"),
                        (e.rate("actual_cached_tokens"), "of it cached"),
                        (e.rate("completion_tokens"), "generated"),
                    ],
                    "Per second, by usage of the answers.",
                ),
                Panel(
                    "Queue",
                    "short",
                    [(e.gauge("queued_requests", "model"), "{{model}}")],
                    "Requests that wait because all replicas are full.",
                ),
            ),
        ),
        Row(
            "Choices",
            (
                Panel(
                    "Served from cache",
                    "percentunit",
                    [
                        (f"{e.rate('actual_cached_tokens')} / {e.rate('prompt_tokens')}", "in fact"),
                        (f"{e.rate('predicted_cached_tokens')} / {e.rate('prompt_tokens')}", "expected"),
                    ],
                    "Share of prompt tokens.",
                ),
                Panel("Reasons", "reqps", [(e.rate("routes", "reason"), "{{reason}}")], is_stacked=True),
                Panel(
                    "What was known of the replica",
                    "reqps",
                    [(e.rate("routes", "mode"), "{{mode}}")],
                    "synced: its own announcements; stale, foreign: the router's history.",
                    is_stacked=True,
                ),
                Panel(
                    "First token, actual over expected",
                    "short",
                    [
                        (
                            f"{e.rate('actual_ttft_seconds', per_replica)} / "
                            f"{e.rate('predicted_ttft_seconds', per_replica)}",
                            "{{replica}}",
                        )
                    ],
                    "1 is a prediction that holds.",
                ),
                Panel(
                    "Time to choose",
                    "s",
                    [
                        (e.quantile(share, "decision_seconds", has_model=False), f"p{share * 100:g}")
                        for share in (0.5, 0.99)
                    ],
                ),
                Panel(
                    "Index", "short", [(e.gauge("index_chunks", "model"), "{{model}}")], "Chunks of prompts."
                ),
            ),
        ),
        Row(
            "Replicas",
            (
                Panel("States", "short", [(e.gauge("replica_state", "state"), "{{state}}")], is_stacked=True),
                Panel(
                    "Requests in flight",
                    "short",
                    [(e.gauge("inflight_requests", per_replica), "{{replica}}")],
                ),
                Panel(
                    "Prompt tokens queued", "short", [(e.gauge("queued_tokens", per_replica), "{{replica}}")]
                ),
                Panel("KV cache", "percentunit", [(e.gauge("kv_usage_ratio", per_replica), "{{replica}}")]),
                Panel(
                    "Served from cache",
                    "percentunit",
                    [
                        (
                            f"{e.rate('actual_cached_tokens', per_replica)} / "
                            f"{e.rate('prompt_tokens', per_replica)}",
                            "{{replica}}",
                        )
                    ],
                ),
                Panel(
                    "Age of telemetry", "s", [(e.gauge("telemetry_age_seconds", per_replica), "{{replica}}")]
                ),
            ),
        ),
        Row(
            "Failures",
            (
                Panel(
                    "Failed attempts",
                    "ops",
                    [(e.rate("upstream_failures", "replica, reason"), "{{replica}} {{reason}}")],
                ),
                Panel("Retries", "ops", [(e.rate("retries", "reason"), "{{reason}}")]),
                Panel(
                    "Ejections and cut streams",
                    "ops",
                    [
                        (e.rate("ejections", "replica"), "{{replica}} ejected"),
                        (e.rate("interrupted_streams", "replica"), "{{replica}} cut"),
                    ],
                ),
                Panel(
                    "Streams whose replica died", "ops", [(e.rate("migrations", "outcome"), "{{outcome}}")]
                ),
                Panel("Clients that left", "ops", [(e.rate("client_disconnects", "model"), "{{model}}")]),
            ),
        ),
        Row(
            "Keys and routers",
            (
                Panel("Tokens per key", "short", [(e.rate("usage_tokens", "key, kind"), "{{key}} {{kind}}")]),
                Panel(
                    "Refused by a key's limits",
                    "ops",
                    [(e.rate("rate_limited", "key", has_model=False), "{{key}}")],
                ),
                Panel(
                    "Client connections",
                    "short",
                    [(e.gauge("client_connections", "instance", has_model=False), "{{instance}}")],
                ),
                Panel(
                    "Versions", "short", [(e.gauge("build_info", "version", has_model=False), "{{version}}")]
                ),
            ),
        ),
    ]


PANELS_PER_LINE = 3
_WIDTH, _HEIGHT = 24 // PANELS_PER_LINE, 8


def dashboard(registry: Registry) -> dict[str, Any]:
    """Grafana's dashboard model."""
    panels: list[dict[str, Any]] = []
    line = 0
    for row in rows(registry):
        panels.append(
            {"type": "row", "title": row.title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": line}, "panels": []}
        )
        line += 1
        for position, panel in enumerate(row.panels):
            column = position % PANELS_PER_LINE
            panels.append(_panel(panel, column * _WIDTH, line))
            if column == PANELS_PER_LINE - 1 or panel is row.panels[-1]:
                line += _HEIGHT
    for number, entry in enumerate(panels, 1):
        entry["id"] = number
    return {
        "uid": "argosy-router",
        "title": "Argosy router",
        "tags": ["argosy"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source_variable(), _model_variable(registry)]},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _model_variable(registry: Registry) -> dict[str, Any]:
    query = f"label_values({registry.gauge('routable_replicas')}, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "model"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, column: int, line: int) -> dict[str, Any]:
    style: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 12, "showPoints": "never"}
    if panel.is_stacked:
        style |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column, "y": line},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": style}, "overrides": []},
        "options": {"legend": {"placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": expression,
                "legendFormat": legend,
                "datasource": _SOURCE,
            }
            for number, (expression, legend) in enumerate(panel.lines)
        ],
    }


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule; `summary` says what is wrong, `remedy` what to do about it."""

    name: str
    expression: str
    wait: str
    severity: str
    summary: str
    remedy: str


def alerts(registry: Registry) -> list[Alert]:
    """The rules. Ratios need some traffic before they count."""
    e = Expressions(registry, window="5m", chosen="")
    slow = Expressions(registry, window="15m", chosen="")
    per_replica = "model, replica"
    failed, answered = e.rate("requests", "model", 'code=~"5.."'), e.rate("requests", "model")
    actual, expected = (slow.rate(f"{name}_ttft_seconds", per_replica) for name in ("actual", "predicted"))
    hits, predicted = (slow.rate(f"{name}_cached_tokens", per_replica) for name in ("actual", "predicted"))
    return [
        Alert(
            "ArgosyNoRoutableReplica",
            f"max by (model) ({registry.gauge('routable_replicas')}) == 0",
            "2m",
            "critical",
            "No replica of {{ $labels.model }} can be reached: its requests are answered with 503.",
            "`argosy why` names the reason of a service; `kubectl get pods` shows whether its pods run.",
        ),
        Alert(
            "ArgosyRequestsFail",
            f"{failed} / {answered} > 0.05 and {answered} > 0.1",
            "5m",
            "critical",
            "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail.",
            "The dashboard's failed attempts say which replica and how; its log says why.",
        ),
        Alert(
            "ArgosyReplicaEjected",
            f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state="ejected"}}) == 1',
            "5m",
            "warning",
            "{{ $labels.replica }} of {{ $labels.model }} keeps failing and gets no requests.",
            "Read its log, and delete the pod if it does not recover.",
        ),
        Alert(
            "ArgosyTelemetryLost",
            f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state="stale"}}) == 1',
            "5m",
            "warning",
            "The router has lost the telemetry of {{ $labels.replica }}: it is routed by history alone.",
            "Check the replica's log and what lies between it and the router.",
        ),
        Alert(
            "ArgosyStreamsCut",
            f"{e.rate('interrupted_streams', per_replica)} > 0",
            "10m",
            "warning",
            "{{ $labels.replica }} keeps dying under its streams.",
            "`kubectl describe pod` shows the last termination; an OOM kill asks for a smaller KV cache.",
        ),
        Alert(
            "ArgosyRequestsWait",
            f"min_over_time({registry.gauge('queued_requests')}[10m]) > 0",
            "5m",
            "warning",
            "Requests to {{ $labels.model }} have been waiting for ten minutes: its replicas are full.",
            "Add replicas, or lower the limits of the keys that send most.",
        ),
        Alert(
            "ArgosyFirstTokenMispredicted",
            f"({actual} / {expected} > 4 or {actual} / {expected} < 0.1) and {expected} > 0.01",
            "30m",
            "warning",
            "First tokens of {{ $labels.replica }} come {{ $value | humanize }} times as late as expected.",
            "Choices rest on this. Look for work the replica does not report: other routers, other processes.",
        ),
        Alert(
            "ArgosyHitsMissing",
            f"{hits} / {predicted} < 0.5 and {predicted} > 100",
            "30m",
            "warning",
            "{{ $labels.replica }} finds less than half of the prefixes expected in its cache.",
            "Its KV cache may be too small for the traffic, or chat templates differ between router and engine.",
        ),
        Alert(
            "ArgosyChoicesSlow",
            f"{e.quantile(0.99, 'decision_seconds')} > 0.001",
            "10m",
            "warning",
            "One in a hundred choices takes more than a millisecond.",
            "The router lacks CPU: raise its requests, or add replicas of it.",
        ),
        Alert(
            "ArgosyUsageNotWritten",
            f"sum by (instance) (increase({registry.counter('usage_write_failures')}[5m])) > 0",
            "0m",
            "critical",
            "{{ $labels.instance }} cannot write usage files; what it holds is lost if it ends.",
            "Look at the disk behind --usage-log.",
        ),
    ]


def rules(registry: Registry) -> dict[str, Any]:
    """A PrometheusRule's `spec`."""
    return {
        "groups": [
            {
                "name": "argosy-router",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression,
                        "for": alert.wait,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.remedy},
                    }
                    for alert in alerts(registry)
                ],
            }
        ]
    }


def render(registry: Registry) -> dict[str, str]:
    """The files, by name."""
    return {
        DASHBOARD: json.dumps(dashboard(registry), indent=1) + "\n",
        RULES: yaml.safe_dump(rules(registry), sort_keys=False, width=1000),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files into a directory."""
    parser = argparse.ArgumentParser(prog="python -m argosy_router.dashboards", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(argv).directory
    for name, text in render(Registry.of_router()).items():
        (directory / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
