"""Prometheus metrics of `argosy batch`.

Invariant: no label has unbounded values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

STATUSES: Final = ("validating", "in_progress", "finalizing", "cancelling", "elsewhere")


class BatchMetrics:
    """Metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ended = Counter(
            "argosy_batch_batches_ended",
            "Batches that this process ran to their end, by their last status.",
            ["status"],
            registry=self.registry,
        )
        self.requests = Counter(
            "argosy_batch_requests",
            "Requests of batches by outcome: completed, failed, or retried after 429, 503 or a failure.",
            ["outcome"],
            registry=self.registry,
        )
        self.batches = Gauge(
            "argosy_batch_batches",
            "Batches that have not ended: by status those that this process runs; elsewhere: those that other "
            "processes run, or none yet.",
            ["status"],
            registry=self.registry,
        )
        self.inflight = Gauge(
            "argosy_batch_requests_inflight",
            "Requests of batches that this process has in flight.",
            registry=self.registry,
        )
        self.stored_bytes = Gauge(
            "argosy_batch_stored_bytes",
            "Bytes of all keys' files, batches and responses in the storage, at the last sweep.",
            registry=self.registry,
        )
        self.stored_objects = Gauge(
            "argosy_batch_stored_objects",
            "Number of files, batches and responses in the storage, at the last sweep.",
            registry=self.registry,
        )
        self.quarantined = Gauge(
            "argosy_batch_quarantined_objects",
            "Objects that could not be read, and were put aside, since the process started.",
            registry=self.registry,
        )
        self.restarts = Counter(
            "argosy_batch_task_restarts",
            "Parts of the program that failed, and were begun anew.",
            ["task"],
            registry=self.registry,
        )

    def follow(
        self,
        *,
        statuses: Callable[[], Iterable[tuple[str, float]]],
        inflight: Callable[[], float],
        stored: Callable[[], tuple[float, float]],
        quarantined: Callable[[], float],
    ) -> None:
        """Read values from now on whenever they are asked for."""
        for status in STATUSES:
            self.batches.labels(status).set_function(lambda status=status: dict(statuses()).get(status, 0.0))
        self.inflight.set_function(inflight)
        self.stored_bytes.set_function(lambda: stored()[0])
        self.stored_objects.set_function(lambda: stored()[1])
        self.quarantined.set_function(quarantined)
