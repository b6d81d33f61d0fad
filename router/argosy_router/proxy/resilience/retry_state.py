"""Retry state: whether a request is sent again after an attempt failed or stalled (Envoy's term).

Owns: every condition for it: the bounds per request, whose fault the error is, and the service's retry budget.
Must not know: connections, how the next replica is chosen, what the client is sent.

    answer so far              failed attempt               stalled attempt
    -------------              --------------               ---------------
    none, another one races    leave it to the other        wait
    none                       retry, else give up          retry, else wait
    part, resumable            migrate, else interrupt      migrate, else wait
    part, not resumable        interrupt                    wait
    all but the stream's end   complete                     complete

A request is retried or migrated if its bound allows it, if it is not itself at fault (a stall is never its fault), if
another replica can take it, and if the budget pays for it. The budget is asked last, by `take_credit`, because no
credit may be spent on a request that has nowhere to go.
"""

from __future__ import annotations

from typing import Final, Literal

from argosy_router.http.upstream_errors import ConnectionLost, UpstreamError
from argosy_router.proxy.resilience.fault_attribution import FaultAttribution
from argosy_router.proxy.resilience.retry_budget import RetryBudget
from argosy_router.proxy.upstream.response_status import Refused

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
    """Decides for one request. Times are a monotonic clock's, passed in."""

    __slots__ = ("_budget", "_faults")

    def __init__(self, budget: RetryBudget, faults: FaultAttribution) -> None:
        """`budget` is the service's, `faults` the request's own."""
        self._budget = budget
        self._faults = faults

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
        """Decide what follows a failed attempt.

        Args:
            is_racing: another attempt at the request is in flight, because one of the two is a hedge.
        """
        if is_racing:
            return "leave_to_other"
        if answer == "complete":
            return "complete"
        is_at_fault = self._faults.is_request_at_fault
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
