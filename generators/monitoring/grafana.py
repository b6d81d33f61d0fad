"""The Grafana dashboards: their form, and the content of the router's (`operator_views` has the other).

Owns: the panels, and their form in Grafana. Must not know: the full names of metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monitoring.promql import Expressions, Registry


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
                        (e.rate("actual_cached_tokens"), "cached prompt"),
                        (e.rate("completion_tokens"), "generated"),
                    ],
                    "Per second, from the usage of responses.",
                ),
                Panel(
                    "Queue",
                    "short",
                    [(e.gauge("queued_requests", "model"), "{{model}}")],
                    "Requests queued while all replicas are full.",
                ),
            ),
        ),
        Row(
            "Routing",
            (
                Panel(
                    "Served from cache",
                    "percentunit",
                    [
                        (f"{e.rate('actual_cached_tokens')} / {e.rate('prompt_tokens')}", "actual"),
                        (f"{e.rate('predicted_cached_tokens')} / {e.rate('prompt_tokens')}", "expected"),
                    ],
                    "Share of prompt tokens.",
                ),
                Panel("Reasons", "reqps", [(e.rate("routes", "reason"), "{{reason}}")], is_stacked=True),
                Panel(
                    "State of the chosen replica",
                    "reqps",
                    [(e.rate("routes", "mode"), "{{mode}}")],
                    "synced: routed by the replica's announcements; stale, foreign: by the router's history.",
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
                    "1 is an exact prediction.",
                ),
                Panel(
                    "Decision time",
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
                    "Hedges",
                    "ops",
                    [(e.rate("hedges", "outcome"), "{{outcome}}")],
                    "Second attempts started beside an overdue one. If most are lost, --hedge-after is too low.",
                ),
                Panel(
                    "Ejections, cooldowns and interrupted streams",
                    "ops",
                    [
                        (e.rate("ejections", "replica"), "{{replica}} ejected"),
                        (e.rate("rests", "replica"), "{{replica}} cooldown"),
                        (e.rate("interrupted_streams", "replica"), "{{replica}} interrupted"),
                    ],
                ),
                Panel("Stream migrations", "ops", [(e.rate("migrations", "outcome"), "{{outcome}}")]),
                Panel("Client disconnects", "ops", [(e.rate("client_disconnects", "model"), "{{model}}")]),
            ),
        ),
        Row(
            "Keys and routers",
            (
                Panel("Tokens per key", "short", [(e.rate("usage_tokens", "key, kind"), "{{key}} {{kind}}")]),
                Panel(
                    "Refused by rate limits of keys",
                    "ops",
                    [(e.rate("rate_limited", "key", has_model=False), "{{key}}")],
                ),
                Panel(
                    "Client connections",
                    "short",
                    [
                        (e.gauge("client_connections", "instance", has_model=False), "{{instance}}"),
                        (
                            e.rate("refused_connections", "instance", has_model=False),
                            "{{instance}} refused per second",
                        ),
                    ],
                ),
                Panel(
                    "Versions",
                    "short",
                    [(e.gauge("build_info", "version, build", has_model=False), "{{version}} {{build}}")],
                ),
            ),
        ),
    ]


PANELS_PER_LINE = 3
_WIDTH, _HEIGHT = 24 // PANELS_PER_LINE, 8


def router_dashboard(registry: Registry, more: Sequence[Row]) -> dict[str, Any]:
    """The dashboard about routers, and replicas as they see them; `more` are its last rows."""
    models = f"label_values({registry.gauge('routable_replicas')}, model)"
    return dashboard("argosy-router", "Argosy router", [*rows(registry), *more], models)


def dashboard(uid: str, title: str, content: Sequence[Row], models: str) -> dict[str, Any]:
    """Grafana's dashboard model; `models` is the query for the values of its variable `model`."""
    panels: list[dict[str, Any]] = []
    line = 0
    for row in content:
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
        "uid": uid,
        "title": title,
        "tags": ["argosy"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_source_variable(), _model_variable(models)]},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _model_variable(query: str) -> dict[str, Any]:
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
