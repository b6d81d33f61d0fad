"""Outlier detection: judges replicas by how the attempts sent to them ended (Envoy's term).

Owns: which failure counts against a replica, which one puts it in cooldown.
Must not know: the bytes of requests and answers, retries; the state of a replica's health is `fleet.health`.
Invariant: for every attempt exactly one of `attempt_failed`, `abandoned`, `errored` and `answered` is called; after an
ambiguous failure `found_at_fault` or `abandoned` follows, once the blame is known. So a half-open replica's probe
always ends.

An error may be the request's fault or the replica's; `fault_attribution` finds out which.
"""

from __future__ import annotations

import logging

from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.health.replica_health import CONSECUTIVE_FAILURES
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.replica_errors import CoreStalled
from argosy_router.fleet.service import Service
from argosy_router.http.upstream_errors import (
    ConnectFailed,
    ConnectionLost,
    FirstByteTimeout,
    IdleTimeout,
    RequestUnsendable,
    UpstreamError,
)
from argosy_router.metrics.registry import Metrics
from argosy_router.proxy.upstream.response_status import CONSECUTIVE_ERRORS, Refused, is_error, is_fault

log = logging.getLogger(__name__)


class OutlierDetector:
    """Judges the replicas of one router by the attempts sent to them. Times are a monotonic clock's, passed in."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    def attempt_failed(self, service: Service, replica: Replica, error: UpstreamError, now: float) -> None:
        """Count an attempt that gave no answer, and blame its replica unless the error is ambiguous; then
        `found_at_fault` or `abandoned` follows."""
        self._metrics.failures.add((service.spec.model, replica.name, error.reason))
        log.info("replica %s failed a request: %s (%s)", replica.name, error.reason, error)
        if service.sides is not None and _is_failure(error):
            service.sides.failed(replica.revision, now)
        if isinstance(error, Refused):
            if error.is_ambiguous:
                return
            if error.is_busy and not error.is_resource_busy:
                self._cool_down(service, replica, error.retry_after_s, now)
        if _is_no_fault(error, replica):
            self.abandoned(service, replica)
            return
        refused = isinstance(error, ConnectFailed) and error.refused
        self._blame(service, replica, now, refused=refused)

    def abandoned(self, service: Service, replica: Replica) -> None:
        """Note an attempt that ended without telling anything about its replica."""
        if replica.health.abandoned():
            service.invalidate()

    def found_at_fault(self, service: Service, replica: Replica, status: int, now: float) -> None:
        """Blame a replica that answered with this error, because another one could answer the same request."""
        after = CONSECUTIVE_ERRORS if is_error(status) else CONSECUTIVE_FAILURES
        self._blame(service, replica, now, after=after)

    def began(self, replica: Replica) -> None:
        """Note that the client gets the beginning of the replica's own answer, which is no error."""
        if replica.health.began():
            self._fleet.replica_changed(replica)

    def errored(self, service: Service, replica: Replica, now: float) -> None:
        """Note that the client got the replica's own error, of which a part was sent before it was whole: nobody is
        blamed, but it is a failure of its revision."""
        if service.sides is not None:
            service.sides.failed(replica.revision, now)
        self.abandoned(service, replica)

    def answered(self, service: Service, replica: Replica, status: int, now: float) -> None:
        """Note that the client gets the replica's own answer, which is whole and no error of the engine."""
        if service.sides is not None:
            service.sides.ended(replica.revision, status, now)
        if replica.health.succeeded():
            self._fleet.replica_changed(replica)

    def _blame(
        self,
        service: Service,
        replica: Replica,
        now: float,
        *,
        refused: bool = False,
        after: int = CONSECUTIVE_FAILURES,
    ) -> None:
        may_eject = service.may_eject()
        if replica.health.failed(now, refused=refused, after=after, may_eject=may_eject):
            self._metrics.ejections.add((service.spec.model, replica.name))
            self._fleet.replica_changed(replica)

    def _cool_down(self, service: Service, replica: Replica, seconds: float, now: float) -> None:
        if replica.health.cool_down(now, seconds, until_capacity=not replica.load.has_free_slot):
            self._metrics.cooldowns.add((service.spec.model, replica.name))
            service.invalidate()


def _is_failure(error: UpstreamError) -> bool:
    """Whether a failed attempt counts as a failure of its revision. A canary rollout compares what clients would have
    met without a retry: an ambiguous error, a stalled core or an answer that is late counts, whoever is at fault, but
    no refusal of a full replica and nothing that did not reach it."""
    if isinstance(error, Refused):
        return not error.is_busy
    return not isinstance(error, RequestUnsendable) and not (
        isinstance(error, ConnectionLost) and error.stale
    )


def _is_no_fault(error: UpstreamError, replica: Replica) -> bool:
    """Whether a failed attempt says nothing about its replica. A response that is late or pauses says nothing while
    the replica reports that it computes, and a stalled core has made the replica suspect already."""
    if isinstance(error, Refused):
        return not is_fault(error.status)
    if isinstance(error, (FirstByteTimeout, IdleTimeout)):
        return replica.is_computing
    if isinstance(error, (CoreStalled, RequestUnsendable)):
        return True
    return isinstance(error, ConnectionLost) and error.stale
