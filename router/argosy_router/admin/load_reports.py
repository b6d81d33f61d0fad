"""Load reports: what the operator's autoscaler reads of this router.

Owns: how the figures of queues and replicas become a report. Must not know: how the operator scales.
"""

from __future__ import annotations

import time

from argosy_protocol.load_report import LoadReport, ReplicaLoadReport, ServiceLoadReport
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.flow_control.controller import FlowController


class LoadReports:
    """Makes the load reports of one router."""

    def __init__(self, fleet: Fleet, flow_control: FlowController) -> None:
        self._fleet = fleet
        self._flow_control = flow_control
        self._started = time.monotonic()

    async def wait_for_hold(self, after: int, timeout_s: float) -> None:
        """Wait until a service begins to hold requests after revision `after`, at most `timeout_s`."""
        await self._flow_control.wait_for_hold(after, timeout_s)

    def now(self, router: str) -> LoadReport:
        """The report of this moment."""
        now = time.monotonic()
        return LoadReport(
            router=router,
            revision=self._flow_control.hold_revision,
            uptime_s=round(now - self._started, 3),
            services=tuple(self._service(service, now) for service in self._fleet.services.values()),
        )

    def _service(self, service: Service, now: float) -> ServiceLoadReport:
        queue = self._flow_control.queue_of(service)
        return ServiceLoadReport(
            service=service.name,
            held=queue.num_held if queue is not None else 0,
            queued=queue.num_queued if queue is not None else 0,
            queued_tokens=round(queue.queued_cost) if queue is not None else 0,
            idle_s=round(self._flow_control.idle_s(service, now), 3),
            ttft_counts=service.demand.ttft_counts(now),
            replicas=tuple(_replica(replica, now) for replica in service.replicas.values()),
            rollout=None if service.sides is None else service.sides.report(now),
        )


def _replica(replica: Replica, now: float) -> ReplicaLoadReport:
    load = replica.load
    return ReplicaLoadReport(
        name=replica.name,
        uid=replica.uid,
        routable=replica.is_available,
        requests=load.requests,
        inflight=load.inflight_sequences,
        queued_tokens=load.queued_tokens * load.data_parallel_size,
        kv_usage=round(load.kv_usage, 4),
        cache_value=round(replica.cache_value.rate(now), 3),
    )
