"""The Prometheus rules: their form, and those about routers (`operator_views` has the others).

Owns: the alerts, with the remedy that each names. Must not know: the full names of metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monitoring.promql import Expressions, Registry

RUNBOOKS = "docs/reference/alerts.md"
WANTED = "argosy_operator_service_wanted_replicas"
_SERVICE = "{{ $labels.namespace }}/{{ $labels.name }}"
SERVICE = "service_namespace, service_name"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule; `summary` says what is wrong, `remedy` what to do about it."""

    name: str
    expression: str
    wait: str
    severity: str
    summary: str
    remedy: str

    @property
    def runbook(self) -> str:
        """Its section of the documentation; the chart puts an address in the place of RUNBOOKS."""
        return f"{RUNBOOKS}#{self.name.lower()}"


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
            named(
                f"max by (model) ({registry.gauge('routable_replicas')}) == 0",
                registry,
                # Also while the first replica starts, for which requests are held.
                without=f"min by ({SERVICE}) (min_over_time({WANTED}[10m])) == 0",
            ),
            "2m",
            "critical",
            f"No replica of {_SERVICE} can be reached: its requests are answered with 503.",
            "`kubectl argosy why NAME -n NAMESPACE` names the reason, `kubectl get pods` whether its pods run. A "
            "service that wants no replica is left out, also for ten minutes after one is wanted again.",
        ),
        Alert(
            "ArgosyRequestsFail",
            named(f"{failed} / {answered} > 0.05 and {answered} > 0.1", registry),
            "5m",
            "critical",
            "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail.",
            "The dashboard's failed attempts say which replica and how; its log says why.",
        ),
        Alert(
            "ArgosyReplicaEjected",
            named(
                f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state=~"ejected|half-open"}}) == 1',
                registry,
            ),
            "5m",
            "warning",
            "{{ $labels.replica }} of {{ $labels.model }} keeps failing and gets no requests.",
            "Read its log, and delete the pod if it does not recover.",
        ),
        Alert(
            "ArgosyReplicaUnreachable",
            named(
                f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state="connecting"}}) == 1',
                registry,
            ),
            "30m",
            "warning",
            "{{ $labels.replica }} of {{ $labels.model }} has not answered for half an hour.",
            "`kubectl get isvc -A -o wide` tells whether it still loads its model, or why its process keeps ending.",
        ),
        Alert(
            "ArgosyMostReplicasEjected",
            named(f"max by (model) ({registry.gauge('panic')}) == 1", registry),
            "1m",
            "critical",
            "Most replicas of {{ $labels.model }} keep failing; requests are still sent to all of them.",
            "Look for a common cause: the requests, the network, or the version of the engine.",
        ),
        Alert(
            "ArgosyReplicaSilent",
            named(
                f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state="suspect"}}) == 1',
                registry,
            ),
            "5m",
            "warning",
            "{{ $labels.replica }} of {{ $labels.model }} is silent, or its engine core is stuck.",
            "Read its log; a process that is stuck in its device needs the pod to be deleted.",
        ),
        Alert(
            "ArgosyTelemetryLost",
            named(
                f'max by ({per_replica}) ({registry.gauge("replica_state")}{{state="stale"}}) == 1', registry
            ),
            "5m",
            "warning",
            "The router has lost the telemetry of {{ $labels.replica }}, and routes to it by its own history alone.",
            "Check the replica's log, and the network between it and the router.",
        ),
        Alert(
            "ArgosyStreamsCut",
            named(f"{e.rate('interrupted_streams', per_replica)} > 0", registry),
            "10m",
            "warning",
            "{{ $labels.replica }} keeps dying while it streams.",
            "`kubectl describe pod` shows the last termination; an OOM kill asks for a smaller KV cache.",
        ),
        Alert(
            "ArgosyRequestsWait",
            named(f"min_over_time({registry.gauge('queued_requests')}[10m]) > 0", registry),
            "5m",
            "warning",
            "Requests to {{ $labels.model }} have been waiting for ten minutes: its replicas are full.",
            "Add replicas, or lower the limits of the keys that send most.",
        ),
        Alert(
            "ArgosyFirstTokenMispredicted",
            named(
                f"({actual} / {expected} > 4 or {actual} / {expected} < 0.1) and {expected} > 0.01", registry
            ),
            "30m",
            "warning",
            "First tokens of {{ $labels.replica }} come {{ $value | humanize }} times as late as expected.",
            "Routing relies on this prediction. Look for work that the replica does not report, such as other routers.",
        ),
        Alert(
            "ArgosyHitsMissing",
            named(f"{hits} / {predicted} < 0.5 and {predicted} > 100", registry),
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


def named(expression: str, registry: Registry, *, without: str = "") -> str:
    """An expression by model, with the labels `namespace` and `name` of the service, by which alerts are routed. Those
    services are left out that `without` names."""
    info = f"topk by (model) (1, max by (model, {SERVICE}) ({registry.gauge('service_info')}))"
    found = f"({expression}) * on (model) group_left ({SERVICE}) {info}"
    if without:
        found = f"({found}) unless on ({SERVICE}) ({without})"
    return as_service(found)


def as_service(expression: str) -> str:
    """The expression with its labels of a service as `namespace` and `name`. Prometheus has labels of its own by these
    names for what it scrapes."""
    found = f'label_replace({expression}, "namespace", "$1", "service_namespace", "(.*)")'
    found = f'label_replace({found}, "name", "$1", "service_name", "(.*)")'
    return f"max without ({SERVICE}) ({found})"


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
                        "annotations": {
                            "summary": alert.summary,
                            "description": alert.remedy,
                            "runbook_url": alert.runbook,
                        },
                    }
                    for alert in found
                ],
            }
        ]
    }
