"""Prometheus metrics of the operator.

Invariant: no label has unbounded values: objects are counted, not named, but for services, of which a fleet document
has some thousands at most, and namespaces that the chart names.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class OperatorMetrics:
    """Metrics of one operator process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "argosy_operator_reconcile_seconds",
            "Time to reconcile one resource, API calls included.",
            ["outcome"],
            registry=self.registry,
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 15.0),
        )
        self.writes = Counter(
            "argosy_operator_api_writes",
            "Writes to the API server.",
            ["kind", "verb"],
            registry=self.registry,
        )
        self.services = Gauge(
            "argosy_operator_services",
            "InferenceServices by status of their Ready condition.",
            ["ready"],
            registry=self.registry,
        )
        self.not_ready = Gauge(
            "argosy_operator_service_not_ready",
            "1 for each InferenceService whose Ready is not True, by the reason; of a canary that goes on, its own.",
            ["service_namespace", "service_name", "reason"],
            registry=self.registry,
        )
        self.wanted_replicas = Gauge(
            "argosy_operator_service_wanted_replicas",
            "Replicas that each InferenceService should have now: those of its spec, or of spec.scaling.",
            ["service_namespace", "service_name"],
            registry=self.registry,
        )
        self.queued = Gauge(
            "argosy_operator_queued_keys", "Keys waiting to be reconciled.", registry=self.registry
        )
        self.routers = Gauge("argosy_operator_routers_alive", "Routers that answer.", registry=self.registry)
        self.unreachable_routers = Gauge(
            "argosy_operator_unreachable_routers",
            "Routers whose pod runs and that have not answered the operator for a minute.",
            registry=self.registry,
        )
        self.leading = Gauge(
            "argosy_operator_leading",
            "1 if this operator holds the lease and writes, 0 if another one does.",
            registry=self.registry,
        )
        self.resync_timestamp = Gauge(
            "argosy_operator_last_resync_timestamp_seconds",
            "When the operator last listed everything.",
            registry=self.registry,
        )
        self.unreadable = Gauge(
            "argosy_operator_unreadable_namespaces",
            "1 for each namespace that the operator serves and cannot read; `*` stands for all.",
            ["watched_namespace"],
            registry=self.registry,
        )
