"""The Prometheus rules: their form, and those about routers (`operator_views` has the others).

Owns: the alerts, with the remedy that each names. Must not know: the full names of metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monitoring.promql import Expressions, Registry


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
            "`kubectl get isvc -A -o wide` names the reason of a service, `kubectl get pods` whether its pods run.",
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
            f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state=~"ejected|half-open"}}) == 1',
            "5m",
            "warning",
            "{{ $labels.replica }} of {{ $labels.model }} keeps failing and gets no requests.",
            "Read its log, and delete the pod if it does not recover.",
        ),
        Alert(
            "ArgosyReplicaUnreachable",
            f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state="connecting"}}) == 1',
            "30m",
            "warning",
            "{{ $labels.replica }} of {{ $labels.model }} has not answered for half an hour.",
            "`kubectl get isvc -A -o wide` tells whether it still loads its model, or why its process keeps ending.",
        ),
        Alert(
            "ArgosyMostReplicasEjected",
            f"max by (model) ({registry.gauge('panic')}) == 1",
            "1m",
            "critical",
            "Most replicas of {{ $labels.model }} keep failing; requests are still sent to all of them.",
            "Look for a common cause: the requests, the network, or the version of the engine.",
        ),
        Alert(
            "ArgosyReplicaSilent",
            f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state="suspect"}}) == 1',
            "5m",
            "warning",
            "{{ $labels.replica }} of {{ $labels.model }} is silent, or its engine core is stuck.",
            "Read its log; a process that is stuck in its device needs the pod to be deleted.",
        ),
        Alert(
            "ArgosyTelemetryLost",
            f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state="stale"}}) == 1',
            "5m",
            "warning",
            "The router has lost the telemetry of {{ $labels.replica }}, and routes to it by its own history alone.",
            "Check the replica's log, and the network between it and the router.",
        ),
        Alert(
            "ArgosyStreamsCut",
            f"{e.rate('interrupted_streams', per_replica)} > 0",
            "10m",
            "warning",
            "{{ $labels.replica }} keeps dying while it streams.",
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
            "Routing relies on this prediction. Look for work that the replica does not report, such as other routers.",
        ),
        Alert(
            "ArgosyHitsMissing",
            f"{hits} / {predicted} < 0.5 and {predicted} > 100",
            "30m",
            "warning",
            "{{ $labels.replica }} finds less than half of the prefixes expected in its cache.",
            "Its KV cache may be too small for the traffic, or its chat template reorders fields of the request.",
        ),
        Alert(
            "ArgosyChoicesSlow",
            f"{e.quantile(0.99, 'decision_seconds')} > 0.001",
            "10m",
            "warning",
            "One in a hundred routing decisions takes more than a millisecond.",
            "The router lacks CPU: raise its requests, or add replicas of it.",
        ),
        Alert(
            "ArgosyConnectionsRefused",
            f"{e.rate('refused_connections', 'instance', has_model=False)} > 0",
            "5m",
            "warning",
            "{{ $labels.instance }} has reached its connection limit and refuses new clients.",
            "Add routers, or raise --max-connections, and the limit of open files with it.",
        ),
        Alert(
            "ArgosyRoutersNotCounted",
            f'max by (instance) ({registry.gauge("limiting_routers")}{{source="assumed"}}) > 0',
            "5m",
            "warning",
            "{{ $labels.instance }} cannot count the routers, and divides the limits of keys by an assumed number.",
            "Let its service account list and watch pods in its namespace, as the chart's Role does.",
        ),
        Alert(
            "ArgosyUsageNotWritten",
            f"sum by (instance) (increase({registry.counter('usage_write_failures')}[5m])) > 0",
            "0m",
            "critical",
            "{{ $labels.instance }} cannot write usage files; unwritten records are lost if it ends.",
            "Check the disk of --usage-log.",
        ),
    ]


def rules(group: str, found: list[Alert]) -> dict[str, Any]:
    """A PrometheusRule's `spec`."""
    return {
        "groups": [
            {
                "name": group,
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression,
                        "for": alert.wait,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.remedy},
                    }
                    for alert in found
                ],
            }
        ]
    }
