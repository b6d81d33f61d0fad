"""What exchanges need of the rest: the choice, the clock, the budgets, and where events are counted.

Owns: policy of attempts (deadlines, budget), health verdicts.
Must not know: the bytes of requests and answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from argosy_protocol import headers
from argosy_protocol.errors import ApiError
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.health import CONSECUTIVE_FAILURES
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Choice, Service
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.errors import (
    ConnectFailed,
    ConnectionLost,
    CoreStalled,
    IdleTimeout,
    UpstreamError,
)
from argosy_router.http.messages import render_headers
from argosy_router.http.roles import Client
from argosy_router.metrics.registry import Metrics
from argosy_router.proxy.begun_stream import KeepAlive
from argosy_router.proxy.books import Books
from argosy_router.proxy.call import Call
from argosy_router.proxy.decisions import DecisionRecord, HedgeOutcome
from argosy_router.proxy.exchange import Exchange
from argosy_router.proxy.gate import Gate
from argosy_router.proxy.hedging import Hedging
from argosy_router.proxy.retry import RetryBudget
from argosy_router.proxy.upstream_ids import UpstreamIds
from argosy_router.proxy.usage import TokenUsage
from argosy_router.proxy.verdict import CONSECUTIVE_ERRORS, Refused, is_error, is_fault

log = logging.getLogger(__name__)

FIRST_BYTE_TIMEOUT_S = 120.0
"""For streams, unless the first token is expected later. A unary answer begins when it is complete, so its deadline is
the whole request's."""
TTFT_FACTOR = 4.0
"""A first token is overdue after this many times its expected time: a prediction off by as much raises an alert."""
REQUEST_TIMEOUT_S = 600.0
"""OpenAI's SDK waits as long by default."""


_RESUME = f"{headers.RESUME}: 1\r\n".encode()


class Dispatcher:
    """Shared by all exchanges of one router."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        books: Books,
        gate: Gate,
        hedging: Hedging,
        *,
        wheel: TimerWheel,
        keep_alive: KeepAlive,
        first_byte_timeout_s: float = FIRST_BYTE_TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self.wheel = wheel
        self.keep_alive = keep_alive
        self._fleet = fleet
        self._metrics = metrics
        self._books = books
        self._gate = gate
        self.hedging = hedging
        self._first_byte_timeout_s = first_byte_timeout_s
        self._request_timeout_s = request_timeout_s
        self.now = time.monotonic
        """Not the loop's clock, which stands still between turns and counts milliseconds."""
        self._budgets: dict[Service, RetryBudget] = {}
        self.upstream_ids = UpstreamIds()
        self.inflight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def begin(self, exchange: Exchange, client: Client) -> None:
        """A request was accepted; `finished` ends it."""
        self._budget(exchange.call.service).earn()
        if not self.inflight:
            self.idle.clear()
        self.inflight += 1
        client.attach(exchange)
        if exchange.call.is_stream:
            exchange.keep_alive(Deadline(self.wheel, exchange.on_quiet))
        self._gate.enter(exchange, client)

    def choose(
        self, call: Call, tried: Sequence[Replica], fingerprint: str = "", *, is_admitted: bool = False
    ) -> Choice:
        """
        Args:
            fingerprint: of the model that must go on with a stream, which was admitted before; empty for any.
            is_admitted: the request has left the seat that it had; the in-flight limit does not stop it.

        Raises:
            ApiError: no replica can take the request.
        """
        started = self.now()
        if fingerprint:
            others = [r for r in call.service.replicas.values() if r.fingerprint != fingerprint]
            tried = [*tried, *others]
        choice = call.service.choose(
            call.prompt,
            started,
            self._fleet.rng,
            tried,
            self._fleet.policy,
            is_admitted=is_admitted or bool(fingerprint),
            sequences=call.estimate.sequences,
        )
        self._metrics.decision.observe((), self.now() - started)
        return choice

    def dispatched(self, call: Call, choice: Choice, attempt: int) -> DecisionRecord:
        call.service.dispatched(choice, call.prompt, self.now())
        return self._books.dispatched(call, choice, attempt)

    def request_head(
        self, call: Call, replica: Replica, upstream_id: bytes, body_bytes: int, *, is_resumable: bool
    ) -> bytes:
        """Everything before the body."""
        key = f"authorization: Bearer {call.service.key}\r\n".encode("latin-1") if call.service.key else b""
        resume = _RESUME if is_resumable else b""
        internal = call.internal_headers if replica.is_ours else b""
        return b"POST %b HTTP/1.1\r\nhost: %b\r\n%b%b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            call.path,
            replica.pool.authority_bytes,
            key,
            resume,
            internal,
            call.headers,
            upstream_id,
            body_bytes,
        )

    def first_byte_timeout_s(self, call: Call, choice: Choice) -> float:
        whole = call.service.spec.limits.request_timeout_s or self._request_timeout_s
        if not call.is_stream:
            return whole
        return min(whole, max(self._first_byte_timeout_s, TTFT_FACTOR * choice.predicted_ttft_s))

    def may_retry(self, call: Call, *, is_error: bool = False) -> bool:
        """Takes a retry from the service's budget; `is_error` for a request that an engine answered with an error."""
        return self._budget(call.service).spend(self.now(), is_error=is_error)

    def _budget(self, service: Service) -> RetryBudget:
        budget = self._budgets.get(service)
        if budget is None:
            for gone in set(self._budgets).difference(self._fleet.services.values()):
                del self._budgets[gone]
            budget = self._budgets[service] = RetryBudget(self.now())
        return budget

    # hedging

    def elsewhere(self, call: Call, tried: Sequence[Replica], fingerprint: str) -> Choice | None:
        """Where a request goes on whose replica's core is stalled; None leaves it where it is, if nobody is well."""
        try:
            choice = self.choose(call, tried, fingerprint, is_admitted=True)
        except ApiError:
            return None
        replica = choice.replica
        return choice if replica.health.is_well and not replica.is_stalled else None

    def hedge(self, call: Call, tried: Sequence[Replica]) -> Choice | None:
        """Who else is asked for an answer that is overdue; None if nobody can be who is well and has room."""
        if not self._gate.has_room(call.service, self.now(), call.prompt.name, call.estimate.sequences):
            return None
        try:
            choice = self.choose(call, tried)
        except ApiError:
            return None
        health = choice.replica.health
        is_fit = health.is_well and not health.is_resting(self.now())
        return choice if is_fit and self.hedging.spend(call.service) else None

    def hedged(self, call: Call, record: DecisionRecord, outcome: HedgeOutcome) -> None:
        """What became of the hedge that `record` is about."""
        record.hedge = outcome
        self._metrics.hedges.add((call.service.spec.model, outcome))

    # verdicts

    def retried(self, call: Call, reason: str) -> None:
        self._metrics.retries.add((call.service.spec.model, reason))

    def attempt_failed(self, call: Call, replica: Replica, error: UpstreamError) -> None:
        """An attempt gave no answer. Whose fault an open error is, `found_at_fault` or `abandoned` will tell."""
        self._metrics.failures.add((call.service.spec.model, replica.name, error.reason))
        log.info("replica %s failed a request: %s (%s)", replica.name, error.reason, error)
        if isinstance(error, Refused):
            if error.is_open:
                return
            if error.is_busy:
                self._rest(call, replica, error.retry_after_s)
        if _is_no_fault(error, replica):
            self.abandoned(call, replica)
            return
        refused = isinstance(error, ConnectFailed) and error.refused
        self._blame(call, replica, refused=refused)

    def abandoned(self, call: Call, replica: Replica) -> None:
        """An attempt ended, and says nothing about its replica."""
        if replica.health.abandoned():
            call.service.invalidate()

    def found_at_fault(self, call: Call, replica: Replica, status: int) -> None:
        """The replica answered with this error, and another one could answer the same request."""
        self._blame(call, replica, after=CONSECUTIVE_ERRORS if is_error(status) else CONSECUTIVE_FAILURES)

    def began(self, replica: Replica) -> None:
        """The client gets the beginning of the replica's own answer, which is no error."""
        if replica.health.began():
            self._fleet.changed()

    def answered(self, replica: Replica) -> None:
        """The client gets the replica's own answer, which is whole and no error."""
        if replica.health.succeeded():
            self._fleet.changed()

    def _blame(
        self, call: Call, replica: Replica, *, refused: bool = False, after: int = CONSECUTIVE_FAILURES
    ) -> None:
        may_eject = call.service.may_eject()
        if replica.health.failed(self.now(), refused=refused, after=after, may_eject=may_eject):
            self._metrics.ejections.add((call.service.spec.model, replica.name))
            self._fleet.changed()

    def _rest(self, call: Call, replica: Replica, seconds: float) -> None:
        if replica.health.rest(self.now(), seconds, until_room=not replica.load.has_seat):
            self._metrics.rests.add((call.service.spec.model, replica.name))
            call.service.invalidate()

    def interrupted(self, call: Call, replica: Replica) -> None:
        self._metrics.interrupted.add((call.service.spec.model, replica.name))

    def migrated(self, call: Call, outcome: str) -> None:
        """A stream lost its replica; `outcome` is what became of it."""
        self._metrics.migrations.add((call.service.spec.model, outcome))

    def client_lost(self, call: Call) -> None:
        self._metrics.disconnects.add((call.service.spec.model,))

    def measured(self, call: Call, choice: Choice, record: DecisionRecord, usage: TokenUsage) -> None:
        """An answer told its token counts."""
        self._books.measured(call, choice, record, usage)

    def counted(self, record: DecisionRecord, tokens: int) -> None:
        """A stream ended without its token counts; the client was sent so many tokens."""
        self._books.counted(record, tokens)

    def finished(self, exchange: Exchange) -> None:
        now = self.now()
        self._books.close(exchange, now - exchange.started)
        self._gate.ended(exchange, now)
        self.inflight -= 1
        if not self.inflight:
            self.idle.set()

    def error_headers(self, error: ApiError) -> bytes:
        """Headers of an answer of our own; `x-should-retry` is what OpenAI's SDKs obey first."""
        lines = b"content-type: application/json\r\n"
        extra = error.headers()
        if extra:
            lines += render_headers([(name.encode(), value.encode()) for name, value in extra.items()])
        if error.http_status >= 500 or error.retryable:
            lines += b"x-should-retry: true\r\n" if error.retryable else b"x-should-retry: false\r\n"
        return lines


def _is_no_fault(error: UpstreamError, replica: Replica) -> bool:
    """Whether a failed attempt says nothing about its replica. A pause in a stream says nothing while the replica tells
    that it computes, and a stalled core has made it a suspect already."""
    if isinstance(error, Refused):
        return not is_fault(error.status)
    if isinstance(error, IdleTimeout):
        return replica.is_computing
    if isinstance(error, CoreStalled):
        return True
    return isinstance(error, ConnectionLost) and error.stale
