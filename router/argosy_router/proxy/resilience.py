"""What follows when attempts fail or are slow: retries, migrations, hedges, and the health of replicas (Envoy's terms).

Must not know: the bytes of requests and answers, connections, how the next replica is chosen, what the client is sent.

    answer so far              failed attempt               stalled attempt
    -------------              --------------               ---------------
    none, another one races    leave it to the other        wait
    none                       retry, else give up          retry, else wait
    part, resumable            migrate, else interrupt      migrate, else wait
    part, not resumable        interrupt                    wait
    all but the stream's end   complete                     complete

A request is retried or migrated if its bound allows it, if it is not itself at fault (a stall is never its fault), if
another replica can take it, and if the service's retry budget pays for it. The budget keeps retries from turning a
brown-out into an outage: each request that is sent earns `RETRY_RATIO` of a retry, and `FREE_RETRIES_PER_S` come free
so that a quiet router can still retry (Finagle's and Linkerd's budget; GEP-3388 has the same fields). It is asked last,
by `take_credit`, because no credit may be spent on a request that has nowhere to go.

If a second replica fails a request with the same status, the request is at fault: it is retried no more, and the error
counts against no replica. If another replica can answer it, the replicas that failed it are at fault. If no other
replica can be asked, nobody is blamed. A unary request whose whole time passes while its replica computes is at fault
itself: another replica would need as long for it.

A stream that is overdue at one replica is sent to a second one (Dean and Barroso, "The tail at scale"). Of the streams
of a service at most `HEDGED_SHARE` are hedged, plus one, and at most `MAX_HEDGE_CREDIT` in a row, so that hedges add
little work to a service that is slow because it is overloaded.

The outlier detector judges replicas by how attempts ended; the state of their health is `fleet.health`. For every
attempt exactly one of `attempt_failed`, `abandoned`, `errored` and `answered` is called; after an ambiguous failure
`found_at_fault` or `abandoned` follows, once the blame is known. So a half-open replica's probe always ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal

from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.health import CONSECUTIVE_FAILURES
from argosy_router.fleet.replica import CoreStalled, Replica
from argosy_router.fleet.service import Service
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.upstream import (
    ConnectFailed,
    ConnectionLost,
    FirstByteTimeout,
    IdleTimeout,
    RequestUnsendable,
    UpstreamError,
)
from argosy_router.metrics import Metrics
from argosy_router.proxy.relay import CONSECUTIVE_ERRORS, Refused, is_error, is_fault

log = logging.getLogger(__name__)


RETRY_RATIO = 0.2
FREE_RETRIES_PER_S = 10.0
MAX_RETRY_CREDIT = 100.0
RESERVED_CREDIT = 50.0
"""Credit that retries of errors leave for other retries, so that a flood of requests that are themselves at fault does
not use up the budget."""


class RetryBudget:
    """The retry credit of one service. Times are a monotonic clock's, passed in."""

    def __init__(self, now: float) -> None:
        self._credit = MAX_RETRY_CREDIT
        self._time = now

    def earn(self) -> None:
        """Add what a request earns when it is sent first; one that is refused by a limit earns nothing."""
        self._credit = min(MAX_RETRY_CREDIT, self._credit + RETRY_RATIO)

    def spend(self, now: float, *, is_error: bool = False) -> bool:
        """Take one retry; False when the budget is exhausted. `is_error`: an engine answered the request with an error,
        or is too busy for requests like it, so `RESERVED_CREDIT` must remain."""
        self._credit = min(MAX_RETRY_CREDIT, self._credit + FREE_RETRIES_PER_S * (now - self._time))
        self._time = now
        if self._credit < (1.0 + RESERVED_CREDIT if is_error else 1.0):
            return False
        self._credit -= 1.0
        return True


class RetryBudgets:
    """The budgets of all services."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._budgets: dict[Service, RetryBudget] = {}

    def of(self, service: Service, now: float) -> RetryBudget:
        """Return the service's budget. When it is new, those of removed services are dropped."""
        budget = self._budgets.get(service)
        if budget is None:
            for gone in set(self._budgets).difference(self._fleet.services.values()):
                del self._budgets[gone]
            budget = self._budgets[service] = RetryBudget(now)
        return budget


MAX_ATTEMPTS: Final = 3
"""Attempts before the answer begins."""
MAX_MIGRATIONS: Final = 4
"""Attempts to continue one stream. The first costs no retry credit: it repeats nothing that was answered, and the
streams of a replica that dies were all admitted. The bound keeps a request that kills engines from killing them all."""

AnswerProgress = Literal["none", "resumable", "unresumable", "complete"]
"""How much of its answer the client has: nothing; a part that another replica can continue; a part that none can;
everything except, perhaps, the end of the stream."""
NextStep = Literal["leave_to_other", "retry", "migrate", "complete", "interrupt", "give_up", "wait"]


class RetryState:
    """Decides for one request, and keeps the replicas that failed it with an ambiguous error until it is known whose
    fault that was. Times are a monotonic clock's, passed in."""

    def __init__(self, budget: RetryBudget) -> None:
        """`budget` is the service's."""
        self._budget = budget
        self._failed: list[tuple[Replica, int]] = []
        self.is_request_at_fault = False
        """Whether two replicas failed the request with the same status, or its whole time passed while its replica
        computed."""

    def add_failed(self, replica: Replica, status: int) -> None:
        """Note that the replica answered with this status, which is an error."""
        self.is_request_at_fault |= any(
            before == status and other is not replica for other, before in self._failed
        )
        self._failed.append((replica, status))

    def take_failed(self) -> list[tuple[Replica, int]]:
        """Return the replicas with the status that each answered, and forget them."""
        failed, self._failed = self._failed, []
        return failed

    def may_reconnect(
        self, error: UpstreamError, *, attempts: int, migrations: int, is_routable: bool, now: float
    ) -> bool:
        """Whether to ask the same replica again on a new connection, which takes a retry from the budget: the replica
        is rarely at fault if a pooled connection dies at once.

        Args:
            is_routable: whether requests may still be sent to that replica.
        """
        if not isinstance(error, ConnectionLost) or not error.stale or not is_routable:
            return False
        return attempts < MAX_ATTEMPTS + migrations and self._budget.spend(now)

    def after_failure(
        self, answer: AnswerProgress, *, attempts: int, migrations: int, is_racing: bool
    ) -> NextStep:
        """Decide what follows a failed attempt; `is_racing`: another attempt at the request is in flight, because one
        of the two is a hedge."""
        if is_racing:
            return "leave_to_other"
        if answer == "complete":
            return "complete"
        is_at_fault = self.is_request_at_fault
        if answer == "none":
            return "retry" if attempts < MAX_ATTEMPTS and not is_at_fault else "give_up"
        if answer == "resumable" and migrations < MAX_MIGRATIONS and not is_at_fault:
            return "migrate"
        return "interrupt"

    def after_stall(
        self, answer: AnswerProgress, *, attempts: int, migrations: int, is_racing: bool
    ) -> NextStep:
        """Decide what follows when a replica's core stalls. It may still wake up, so the attempt waits for it if the
        request cannot go elsewhere. The arguments are those of `after_failure`."""
        if is_racing:
            return "wait"
        if answer == "complete":
            return "complete"
        if answer == "none":
            return "retry" if attempts < MAX_ATTEMPTS else "wait"
        return "migrate" if answer == "resumable" and migrations < MAX_MIGRATIONS else "wait"

    def take_credit(self, step: NextStep, error: UpstreamError, *, migrations: int, now: float) -> bool:
        """Pay for a retry or a migration whose target has been chosen; False if the budget is exhausted."""
        is_busy = isinstance(error, Refused) and error.is_resource_busy
        if step == "migrate":
            return migrations == 0 or self._budget.spend(now, is_error=is_busy)
        is_error = is_busy or (isinstance(error, Refused) and error.is_ambiguous)
        return self._budget.spend(now, is_error=is_error)


HEDGED_SHARE = 0.05
"""The cost of the paper's example of a deferred hedge, which waits for the 95th percentile."""
MAX_HEDGE_CREDIT = 10.0
"""Hedges that a service may save up: a replica that hangs holds a handful of requests."""
MIN_FIRST_TOKEN_S = 0.1
"""Minimum wait for a first token, however short the prediction: scheduling alone may take as long."""


class Hedging:
    """Decides when to hedge, for all requests of one router."""

    def __init__(self, fleet: Fleet, wheel: TimerWheel, factor: float) -> None:
        """`factor` is the default of services that set none; zero disables hedging."""
        self._fleet = fleet
        self._wheel = wheel
        self._factor = factor
        self.credit: dict[Service, float] = {}
        """Hedges that each service may send."""

    def watch(
        self, service: Service, predicted_ttft_s: float, on_overdue: Callable[[], None]
    ) -> Deadline | None:
        """Call `on_overdue` when the first token of a stream that was just sent is overdue, unless the returned
        deadline is ended before; None if the service's requests are not hedged."""
        factor = service.spec.hedge_after
        if factor is None:
            factor = self._factor
        if not factor:
            return None
        credit = self.credit.get(service)
        if credit is None:
            credit = self._add(service)
        self.credit[service] = min(MAX_HEDGE_CREDIT, credit + HEDGED_SHARE)
        deadline = Deadline(self._wheel, on_overdue)
        deadline.set(max(MIN_FIRST_TOKEN_S, factor * predicted_ttft_s))
        return deadline

    def spend(self, service: Service) -> bool:
        """Take one hedge; False when the service's share is used up."""
        credit = self.credit.get(service, 0.0)
        if credit < 1.0:
            return False
        self.credit[service] = credit - 1.0
        return True

    def _add(self, service: Service) -> float:
        for gone in set(self.credit).difference(self._fleet.services.values()):
            del self.credit[gone]
        return 1.0


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
