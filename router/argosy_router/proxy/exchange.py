"""Generation requests: each call's way through rate limits and flow control (`RequestHandler`), and one request from
dispatch to its end (`Exchange`): attempts, retries, hedging, forwarding.

Owns: the order of these steps, calls that are queued, and the number of requests that have not ended; the choice of a
replica for each attempt and how long to wait for it, which attempts are made, which of their responses becomes the
answer, and the request's outcome record until its end. Whether a failed attempt is followed by another one is decided
in `resilience`.
Must not know: HTTP framing, routes, parsing, discovery, policies, when a queued call is admitted, connections to
replicas (`attempt`), what is written to the client (`answer`).
Invariants: each request that `handle` or `take` gets ends once: its outcome is accounted for, its reservation settled,
and flow control told that it ended. A queued call whose client leaves is taken out at once and never sent. The client's
answer begins once. Before the client has received a byte of it, a failed attempt may be retried on another replica;
after that only a stream can move, and it continues after the last event that the client was sent. Every attempt is
ended. When the client leaves, the replicas' work is aborted at once.

    connecting -> waiting -> (unary)  buffering -> answered
         ^------- failed ---'  |
         |                     -> (stream) streaming -> answered
         `------ replica died --------------'        -> an error event, if no replica can continue

While a stream's first attempt waits and its answer is overdue, a hedge may run beside it: the first of the two to
respond is the request's attempt from then on; if one fails, the other one is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from argosy_protocol.errors import (
    ApiError,
    BadGateway,
    BadRequest,
    GatewayTimeout,
    InternalError,
    TooManyRequests,
    Unavailable,
)
from argosy_router.auth.accounts import Account, RateLimited
from argosy_router.fair_queue import QueuedRequest
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import CoreStalled, Replica
from argosy_router.fleet.service import Choice
from argosy_router.flow_control import FlowController
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.http.messages import Client, Request
from argosy_router.http.upstream import (
    ConnectFailed,
    FirstByteTimeout,
    IdleTimeout,
    RequestUnsendable,
    UpstreamError,
)
from argosy_router.metrics import Metrics
from argosy_router.proxy.accounting import CLIENT_GONE, RequestAccounting, RequestOutcome
from argosy_router.proxy.answer import Answer, CommentSchedule
from argosy_router.proxy.answer_tokens import Transcript
from argosy_router.proxy.attempt import Attempt, AttemptListener, UpstreamIds
from argosy_router.proxy.call import Call
from argosy_router.proxy.relay import (
    MAX_HELD_BYTES,
    EngineError,
    Refused,
    StreamRelay,
    UnaryRelay,
    is_error,
    is_key_refused,
    refusal,
)
from argosy_router.proxy.resilience import (
    AnswerProgress,
    Hedging,
    NextStep,
    OutlierDetector,
    RetryBudget,
    RetryBudgets,
    RetryState,
)

TTFT_FACTOR = 4.0
"""The first-byte timeout is at least this multiple of the predicted time to first token, unless the request timeout is
shorter. The alert ArgosyFirstTokenMispredicted has the same factor."""


class Dispatcher:
    """Chooses for all requests of one router. Times are a monotonic clock's, passed in."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        flow_control: FlowController,
        hedging: Hedging,
        *,
        first_byte_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self.hedging = hedging
        self._fleet = fleet
        self._metrics = metrics
        self._flow_control = flow_control
        self._first_byte_timeout_s = first_byte_timeout_s
        self._request_timeout_s = request_timeout_s

    def choose(
        self,
        call: Call,
        tried: Sequence[Replica],
        now: float,
        fingerprint: str = "",
        *,
        is_admitted: bool = False,
    ) -> Choice:
        """Choose a replica for the next attempt.

        Args:
            tried: replicas to exclude.
            fingerprint: of the model that must continue a stream; empty for any model.
            is_admitted: the request was in flight and has lost its replica; the in-flight limit does not apply to it.

        Raises:
            ApiError: no replica can take the request.
        """
        started = time.monotonic()
        if fingerprint:
            others = [r for r in call.service.replicas.values() if r.fingerprint != fingerprint]
            tried = [*tried, *others]
        choice = call.service.choose(
            call.prompt,
            now,
            self._fleet.rng,
            tried,
            self._fleet.policy,
            is_admitted=is_admitted or bool(fingerprint),
            sequences=call.estimate.sequences,
        )
        self._metrics.decision.observe((), time.monotonic() - started)
        return choice

    def choose_instead_of_stalled(
        self, call: Call, tried: Sequence[Replica], now: float, fingerprint: str
    ) -> Choice | None:
        """Choose the replica to which a request moves from a stalled one; None if no healthy replica can take it, in
        which case it stays."""
        try:
            choice = self.choose(call, tried, now, fingerprint, is_admitted=True)
        except ApiError:
            return None
        replica = choice.replica
        return choice if replica.health.is_healthy and not replica.is_stalled else None

    def choose_hedge(self, call: Call, tried: Sequence[Replica], now: float) -> Choice | None:
        """Choose a hedge's target for an overdue answer; None if no healthy replica has capacity, or if the service's
        share of hedges is used up."""
        if not self._flow_control.has_capacity(call.service, now, call.prompt.name, call.estimate.sequences):
            return None
        try:
            choice = self.choose(call, tried, now)
        except ApiError:
            return None
        health = choice.replica.health
        is_fit = health.is_healthy and not health.is_in_cooldown(now)
        return choice if is_fit and self.hedging.spend(call.service) else None

    def first_byte_timeout_s(self, call: Call, choice: Choice) -> float:
        """How long to wait for the first byte of the chosen replica's response."""
        whole = call.service.spec.limits.request_timeout_s or self._request_timeout_s
        if not call.is_stream:
            return whole
        return min(whole, max(self._first_byte_timeout_s, TTFT_FACTOR * choice.predicted_ttft_s))


@dataclass(slots=True)
class Shared:
    """What the requests of one router share."""

    dispatcher: Dispatcher
    outliers: OutlierDetector
    accounting: RequestAccounting
    wheel: TimerWheel
    now: Callable[[], float]
    """A monotonic clock: not the loop's, which stands still between turns and counts milliseconds."""
    upstream_ids: UpstreamIds = field(default_factory=UpstreamIds)
    event_memory: BodyMemory = field(default_factory=lambda: BodyMemory(MAX_HELD_BYTES))
    """Of the unfinished events of all streams."""


class Exchange(AttemptListener):
    """Sends one request, and forwards the answer."""

    def __init__(
        self,
        answer: Answer,
        outcome: RequestOutcome,
        on_end: Callable[[RequestOutcome], None],
        retry_budget: RetryBudget,
        shared: Shared,
    ) -> None:
        """
        Args:
            outcome: the request's empty outcome record; `on_end` gets it when nothing changes it any more.
            retry_budget: its service's.
        """
        self._answer = answer
        self.outcome = outcome
        self._call = outcome.call
        self._on_end = on_end
        self._shared = shared
        self._dispatcher = shared.dispatcher
        self._outliers = shared.outliers
        self._accounting = shared.accounting
        self._now = shared.now
        self._attempt: Attempt | None = None
        """The last attempt that is no hedge, or a hedge that won."""
        self._hedge: Attempt | None = None
        """The hedge, while the race is open."""
        self._tried: list[Replica] = []
        """Replicas that attempts were sent to since the client was last sent something."""
        self._retry_budget = retry_budget
        self._retry_state = RetryState(retry_budget)
        self._is_over = False

    def describe(self, now: float) -> str:
        """Describe for people, in one line, how far the request has come."""
        attempt, call, outcome = self._attempt, self._call, self.outcome
        line = f"{call.request_id.decode()}: model={call.service.name} age={now - outcome.started:.1f}s"
        if attempt is None:
            return line + " queued"
        state = "answering" if self._answer.is_started else "accepted" if self._answer.is_accepted else "sent"
        line += f" {state} replica={attempt.replica.name} since={now - attempt.started:.1f}s"
        line += f" attempts={outcome.attempts} migrations={outcome.migrations}"
        if self._hedge is not None:
            line += f" hedge={self._hedge.replica.name}"
        return line + (" client is behind" if self._answer.is_client_paused else "")

    # attempts

    def start(self) -> None:
        """Send the request to the best replica.

        Raises:
            Unavailable, TooManyRequests: no replica can take it; nothing has happened.
        """
        call, dispatcher = self._call, self._dispatcher
        choice = dispatcher.choose(call, self._tried, self._now())
        self._retry_budget.earn()
        self._attempt = attempt = self._send_to(choice)
        self._answer.is_sent = True
        if call.is_stream:
            hedging = dispatcher.hedging
            overdue = hedging.watch(call.service, choice.predicted_ttft_s, self.on_overdue)
            attempt.end_when_answering(overdue)

    def _send_to(self, choice: Choice, transcript: Transcript | None = None) -> Attempt:
        call, outcome = self._call, self.outcome
        outcome.attempts += 1
        self._tried.append(choice.replica)
        call.service.dispatched(choice, call.prompt, self._now())
        record = self._accounting.record_attempt(call, choice, outcome.attempts)
        attempt = Attempt(
            self,
            call,
            choice,
            record,
            transcript,
            BodyReservation(self._shared.event_memory, call.service, 0),
            wheel=self._shared.wheel,
            upstream_ids=self._shared.upstream_ids,
            first_byte_timeout_s=self._dispatcher.first_byte_timeout_s(call, choice),
            now=self._now,
        )
        if self._answer.is_client_paused:
            attempt.pause()
        attempt.start()
        return attempt

    # attempts that fail or stall

    def on_attempt_failed(self, attempt: Attempt, error: UpstreamError) -> None:
        """Do what the retry state decides: send the request again, leave it to the other attempt, or end it."""
        outcome, retry_state = self.outcome, self._retry_state
        if is_key_refused(error) and attempt.replica.is_routable and attempt.has_other_key():
            attempt.resend()  # costs no retry: the replica has read no request, and each key is tried once
            return
        if retry_state.may_reconnect(
            error,
            attempts=outcome.attempts,
            migrations=outcome.migrations,
            is_routable=attempt.replica.is_routable,
            now=self._now(),
        ):
            outcome.attempts = attempt.record.attempt = outcome.attempts + 1
            self._accounting.count_retry(self._call, "stale")
            attempt.start(fresh=True)
            return
        attempt.end()
        self._outliers.attempt_failed(self._call.service, attempt.replica, error, self._now())
        if isinstance(error, FirstByteTimeout) and not self._answer.is_started:
            self._observe_ttft(attempt)
        if isinstance(error, Refused) and error.is_ambiguous:
            retry_state.add_failed(attempt.replica, error.status)
        elif (
            isinstance(error, FirstByteTimeout) and attempt.replica.is_computing and not self._call.is_stream
        ):
            retry_state.is_request_at_fault = True
        progress = self._progress(attempt)
        step = retry_state.after_failure(
            progress,
            attempts=outcome.attempts,
            migrations=outcome.migrations,
            is_racing=self._hedge is not None,
        )
        if step == "leave_to_other":
            self._leave_to_other(attempt)
        elif step == "complete":
            self._complete(attempt)
        elif (choice := self._next_replica(step, attempt, error)) is not None:
            self._send_again(step, choice, attempt, error)
        elif progress == "none":
            self._give_up(attempt, error)
        else:
            self._interrupt(attempt, error, "refused" if progress == "unresumable" else "failed")

    def on_attempt_stalled(self, attempt: Attempt, error: CoreStalled) -> None:
        """Continue on another replica if one can; otherwise wait, because the core may still wake up."""
        if attempt is not self._attempt:
            return
        outcome = self.outcome
        step = self._retry_state.after_stall(
            self._progress(attempt),
            attempts=outcome.attempts,
            migrations=outcome.migrations,
            is_racing=self._hedge is not None,
        )
        choice = self._next_replica(step, attempt, error)
        if choice is None and step != "complete":
            return
        attempt.end()
        self._outliers.attempt_failed(self._call.service, attempt.replica, error, self._now())
        if not self._answer.is_started:
            self._observe_ttft(attempt)
        if choice is not None:
            self._send_again(step, choice, attempt, error)
        else:
            self._complete(attempt)

    def _progress(self, attempt: Attempt) -> AnswerProgress:
        """Return how much of its answer the client has, and whether another replica could continue it."""
        if not self._answer.is_started:
            return "none"
        transcript = attempt.transcript
        if transcript is None or not transcript.read():
            return "unresumable"
        return "resumable" if transcript.missing_end is None else "complete"

    def _next_replica(self, step: NextStep, attempt: Attempt, error: UpstreamError) -> Choice | None:
        """Choose where a retry or a migration goes, and pay for it; None for other steps, and if the request cannot go
        anywhere.

        A migration goes to a replica with the same model only, and a request leaves a stalled replica only for a
        healthy one.
        """
        if step not in ("retry", "migrate"):
            return None
        call, tried, now = self._call, self._tried, self._now()
        fingerprint = attempt.fingerprint if step == "migrate" else ""
        choice: Choice | None = None
        if isinstance(error, CoreStalled):
            choice = self._dispatcher.choose_instead_of_stalled(call, tried, now, fingerprint)
        else:
            is_admitted = step == "retry" and isinstance(error, Refused) and error.is_ambiguous
            try:
                choice = self._dispatcher.choose(call, tried, now, fingerprint, is_admitted=is_admitted)
            except ApiError:
                return None
        if choice is None:
            return None
        is_paid = self._retry_state.take_credit(
            step, error, migrations=self.outcome.migrations, now=self._now()
        )
        return choice if is_paid else None

    def _send_again(self, step: NextStep, choice: Choice, attempt: Attempt, error: UpstreamError) -> None:
        """Retry the request, or migrate its stream, after `attempt` has ended with `error`."""
        if step == "migrate":
            self.outcome.migrations += 1
            self._attempt = self._send_to(choice, attempt.transcript)
        else:
            self._accounting.count_retry(self._call, error.reason)
            self._attempt = self._send_to(choice)

    def _complete(self, attempt: Attempt) -> None:
        """Complete a stream of which the client has everything but its end."""
        transcript = attempt.transcript
        assert transcript is not None
        self._accounting.count_migration(self._call, "completed")
        if missing_end := transcript.missing_end:
            self._answer.send(missing_end)
        self._answer.finish()
        self._end()

    def _give_up(self, attempt: Attempt, error: UpstreamError) -> None:
        """Answer with the error that the last attempt ended with."""
        model = self._call.client_model
        if isinstance(error, EngineError):
            self._end_with(error.status, error.head, error.body)
        elif isinstance(error, Refused) and error.is_busy:
            message = f"the replicas of model {model!r} take no more requests"
            self.refuse(TooManyRequests(message, retry_after_s=error.retry_after_s))
        elif isinstance(error, FirstByteTimeout):
            message = f"model {model!r} did not answer in time"
            if attempt.replica.is_computing:
                self.outcome.is_cut_short = True
                if not self._call.is_stream:
                    message += "; an answer that takes this long must be streamed"
            self.refuse(GatewayTimeout(message, retry_after_s=1.0))
        elif isinstance(error, ConnectFailed):
            self.refuse(Unavailable(f"no replica of model {model!r} is reachable", retry_after_s=1.0))
        elif isinstance(error, RequestUnsendable):
            self.refuse(InternalError("internal error: the request could not be sent to a replica"))
        else:
            self.refuse(BadGateway(f"the replica of model {model!r} failed", retry_after_s=1.0))

    # hedging

    def on_overdue(self) -> None:
        """Send a hedge for the overdue answer, if another replica has capacity for it."""
        if self._answer.is_client_paused:
            return
        choice = self._dispatcher.choose_hedge(self._call, self._tried, self._now())
        if choice is not None:
            self._hedge = self._send_to(choice)
            self._hedge.record.hedge = "racing"

    def _resolve_race(self, winner: Attempt, hedge: Attempt) -> None:
        """Continue with the first of two attempts that responds, and end the other one."""
        first, self._attempt, self._hedge = self._attempt, winner, None
        assert first is not None
        if winner is hedge:
            # It would have taken longer; left out, a slow revision would look faster.
            self._observe_ttft(first)
            self._abandon(first)
            self._accounting.count_hedge(self._call, hedge.record, "won")
        else:
            self._abandon(hedge)
            self._accounting.count_hedge(self._call, hedge.record, "lost")

    def _observe_ttft(self, attempt: Attempt) -> None:
        """Tell the attempt's side of a canary rollout how long a client has waited for it: from its arrival, and from
        the attempt if another one was made before, which may have been the other side's."""
        call, now = self._call, self._now()
        if call.service.sides is not None and call.is_stream:
            since = self.outcome.started if attempt.record.attempt == 1 else attempt.started
            call.service.sides.observe_ttft(attempt.replica.revision, now - since, now)

    def _abandon(self, attempt: Attempt) -> None:
        """End an attempt that is not needed any more; this says nothing about its replica."""
        attempt.end()
        self._outliers.abandoned(self._call.service, attempt.replica)

    def _leave_to_other(self, attempt: Attempt) -> None:
        """Continue with the other one of two attempts, because `attempt` has failed."""
        hedge, self._hedge = self._hedge, None
        assert hedge is not None
        if attempt is hedge:
            self._accounting.count_hedge(self._call, hedge.record, "failed")
        else:
            self._attempt = hedge
            self._accounting.count_hedge(self._call, hedge.record, "promoted")

    # the replica's response

    def on_stream_accepted(self) -> None:
        self._answer.accepted()

    def on_attempt_data(self, attempt: Attempt, data: bytes) -> None:
        """Begin or continue the client's answer with `data`."""
        if attempt.is_answering:
            self._answer.send(data)
            return
        if self._hedge is not None:
            self._resolve_race(attempt, self._hedge)
        attempt.begin_answer()
        if attempt.status < 400:
            self._outliers.began(attempt.replica)
            self._blame_failed_replicas()
            if not self._answer.is_started:
                self._observe_ttft(attempt)
        self._tried = [attempt.replica]
        if self._answer.is_started:
            self._accounting.count_migration(self._call, "resumed")
            self._answer.send(data)
            return
        self._answer.start(
            attempt.status,
            attempt.headers,
            attempt.route_headers,
            data,
            is_events=isinstance(attempt.relay, StreamRelay),
        )

    def on_attempt_ended(self, attempt: Attempt, rest: bytes) -> None:
        """Complete the client's answer, unless the response is a refusal or an error."""
        status, hedge = attempt.status, self._hedge
        if self._answer.is_started:
            if rest:
                self.on_attempt_data(attempt, rest)
            self._end_answering(attempt)
            self._answer.finish()
            self._end()
        elif (refused := refusal(status, attempt.headers)) is not None:
            self.on_attempt_failed(attempt, refused)
        elif is_error(status):
            self.on_attempt_failed(attempt, EngineError(status, attempt.headers, rest))
        else:
            if hedge is not None:
                self._resolve_race(attempt, hedge)
            self._end_answering(attempt)
            if status < 400:
                self._blame_failed_replicas()
            self._end_with(status, attempt.headers, rest)

    def _end_answering(self, attempt: Attempt) -> None:
        """End an attempt whose whole response becomes the client's answer."""
        attempt.end()
        if is_error(attempt.status):
            self._outliers.errored(self._call.service, attempt.replica, self._now())
        else:
            self._outliers.answered(self._call.service, attempt.replica, attempt.status, self._now())

    def _blame_failed_replicas(self) -> None:
        """Blame the replicas that failed a request which another one can answer."""
        for replica, status in self._retry_state.take_failed():
            self._outliers.found_at_fault(self._call.service, replica, status, self._now())

    def _complete_outcome(self, *, is_cut: bool, silent_s: float) -> None:
        """Note the last attempt in the outcome, and the usage of its answer or of the part that was sent."""
        attempt, outcome = self._attempt, self.outcome
        if attempt is None:
            return
        outcome.choice = attempt.choice
        outcome.record = attempt.record
        outcome.sent_at = attempt.started
        if outcome.status == 200:
            outcome.note_answer(attempt.relay, attempt.choice, is_cut=is_cut, silent_s=silent_s)

    def _interrupt(self, attempt: Attempt, failure: UpstreamError, outcome: str) -> None:
        """End an answer that no replica continues; a stream's client gets an error event, since the status is sent."""
        self._accounting.count_interruption(self._call, attempt.replica)
        if isinstance(attempt.relay, UnaryRelay):
            self._answer.abort()
        else:
            self._accounting.count_migration(self._call, outcome)
            error = BadGateway("the replica failed while generating; the answer is incomplete")
            self._answer.interrupt(error)
        # A replica that was silent for too long had perhaps stopped long before.
        is_silent = isinstance(failure, IdleTimeout)
        self._end(is_cut=True, silent_s=0.0 if is_silent else self._now() - attempt.heard_at)

    # the client

    def on_client_lost(self) -> None:
        if self._is_over:
            return
        if self._attempt is not None:
            self._abandon(self._attempt)
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            self._abandon(hedge)
            self._accounting.count_hedge(self._call, hedge.record, "abandoned")
        if not self._answer.is_started:
            self.outcome.status = CLIENT_GONE
        self._accounting.count_disconnect(self._call)
        attempt = self._attempt
        self._end(is_cut=True, silent_s=0.0 if attempt is None else self._now() - attempt.heard_at)

    def on_client_paused(self) -> None:
        self._answer.is_client_paused = True
        for attempt in (self._attempt, self._hedge):
            if attempt is not None:
                attempt.pause()

    def on_client_resumed(self) -> None:
        self._answer.is_client_paused = False
        for attempt in (self._attempt, self._hedge):
            if attempt is not None:
                attempt.resume()

    # the end

    def _end_with(self, status: int, headers: bytes, body: bytes) -> None:
        self._answer.respond(status, headers, self._route_headers(), body)
        self._end()

    def refuse(self, error: ApiError) -> None:
        """Answer with an error of the router's own, which ends the request."""
        error.name_as_asked(self._call.client_model)
        self._answer.respond_error(error, self._route_headers())
        self._end()

    def _route_headers(self) -> bytes:
        return self._attempt.route_headers if self._attempt is not None else b""

    def _end(self, *, is_cut: bool = False, silent_s: float = 0.0) -> None:
        assert self._attempt is None or self._attempt.is_over, "every attempt was ended"
        assert self._hedge is None, "one attempt answers"
        assert not self._is_over, "a request ends once"
        self._is_over = True
        self._answer.close()
        for replica, _ in self._retry_state.take_failed():
            self._outliers.abandoned(self._call.service, replica)
        self._complete_outcome(is_cut=is_cut, silent_s=silent_s)
        self._on_end(self.outcome)
        self._attempt = None  # breaks a reference cycle, so that both and the body are freed at once


class PendingRequest(Protocol):
    """A decoded request that flow control starts, queues or refuses: an exchange, or the pick of an endpoint for a
    gateway that forwards the request itself. It also listens to its client (`ClientListener`)."""

    outcome: RequestOutcome

    def start(self) -> None:
        """Send the request, or have it sent.

        Raises:
            Unavailable, TooManyRequests: no replica can take it; nothing has happened.
        """
        ...

    def refuse(self, error: ApiError) -> None:
        """Answer the request with an error; it has then ended."""
        ...

    def on_client_lost(self) -> None: ...

    def on_client_paused(self) -> None: ...

    def on_client_resumed(self) -> None: ...


class QueuedCall:
    """One queued call, and the exchange (or endpoint pick) that takes over when it leaves the queue. A
    `ClientListener`."""

    def __init__(
        self, flow_control: FlowController, exchange: PendingRequest, client: Client, now: Callable[[], float]
    ) -> None:
        """`now` is a monotonic clock."""
        call = exchange.outcome.call
        self.request = QueuedRequest(
            call.account,
            call.priority,
            call.estimate.cost,
            len(call.body) + call.prompt.name.num_bytes,
            call.prompt.name,
            call.estimate.sequences,
            self.admit,
            self.refuse,
        )
        self.request.since = exchange.outcome.started
        self._flow_control = flow_control
        self.exchange = exchange
        self._client = client
        self._now = now

    def admit(self) -> None:
        self._leave_queue("sent")
        try:
            self.exchange.start()
        except ApiError as error:
            service = self.exchange.outcome.call.service
            self._flow_control.retract(service, self._now(), self.request.sequences)
            self.exchange.refuse(error)

    def refuse(self, error: ApiError) -> None:
        self._leave_queue("refused")
        self.exchange.refuse(error)

    def _leave_queue(self, how: str) -> None:
        self._count_wait(how)
        self._client.attach(self.exchange)

    def _count_wait(self, how: str) -> None:
        outcome = self.exchange.outcome
        outcome.queued_s = seconds = self._now() - self.request.since
        self._flow_control.observe_wait(outcome.call.service, how, seconds)
        # This breaks a reference cycle, so that the exchange and the body are freed at once when the request has ended.
        self.request.admit, self.request.refuse = self.exchange.start, self.exchange.refuse

    # the client

    def on_client_lost(self) -> None:
        self._flow_control.remove(self.exchange.outcome.call.service, self.request, self._now())
        self._count_wait("abandoned")
        self.exchange.on_client_lost()

    def on_client_paused(self) -> None:
        self.exchange.on_client_paused()

    def on_client_resumed(self) -> None:
        self.exchange.on_client_resumed()


class RequestHandler:
    """Handles all generation requests of one router."""

    def __init__(
        self,
        flow_control: FlowController,
        retry_budgets: RetryBudgets,
        comments: CommentSchedule,
        shared: Shared,
    ) -> None:
        self._flow_control = flow_control
        self._retry_budgets = retry_budgets
        self._comments = comments
        self.shared = shared
        self._accounting = shared.accounting
        self.inflight = 0
        """Requests that have not ended, including queued ones."""
        self.idle = asyncio.Event()
        """Set while no request is in flight."""
        self.idle.set()

    def handle(
        self, client: Client, call: Call, started: float, on_end: Callable[[], None] | None = None
    ) -> None:
        """Send a call, queue it, or refuse it with an error.

        Args:
            started: when the whole request had arrived.
            on_end: called when it has ended.
        """
        outcome = RequestOutcome(call, started)
        answer = Answer(
            client, outcome, wheel=self.shared.wheel, comments=self._comments, now=self.shared.now
        )
        ended = self.on_end if on_end is None else partial(self._on_end_of, on_end)
        budget = self._retry_budgets.of(call.service, self.now())
        self.take(Exchange(answer, outcome, ended, budget, self.shared), client)

    def now(self) -> float:
        """Return the time by the monotonic clock of requests."""
        return self.shared.now()

    def charge(self, request: Request, account: Account) -> None:
        """Charge a request to its key's limits, before its body is read.

        Raises:
            RateLimited: the key's rate is reached.
        """
        request.is_charged = self._accounting.charge_request(account, self.now())

    def take(self, request: PendingRequest, client: Client) -> None:
        """Start a request, queue it, or refuse it. It must call `on_end` once, when it has ended."""
        if not self.inflight:
            self.idle.clear()
        self.inflight += 1
        client.attach(request)
        try:
            self._accounting.reserve(request.outcome)
        except (RateLimited, BadRequest) as refusal:
            request.refuse(refusal)
            return
        self._admit(request, client)

    def _admit(self, request: PendingRequest, client: Client) -> None:
        """Start a request at once if flow control admits it, else queue it."""
        outcome, flow_control = request.outcome, self._flow_control
        call, now = outcome.call, outcome.started
        sequences = call.estimate.sequences
        if flow_control.try_admit(call.service, now, call.prompt.name, sequences, call.account):
            try:
                request.start()
            except (Unavailable, TooManyRequests):  # the replicas' capacity was last looked up a moment ago
                flow_control.retract(call.service, now, sequences)
            else:
                return
        queued = QueuedCall(flow_control, request, client, self.shared.now)
        client.attach(queued)
        try:
            flow_control.enqueue(call.service, queued.request, now)
        except ApiError as error:
            queued.refuse(error)

    def _on_end_of(self, on_end: Callable[[], None], outcome: RequestOutcome) -> None:
        on_end()
        self.on_end(outcome)

    def on_end(self, outcome: RequestOutcome) -> None:
        """Account for a request that has ended, and free its place."""
        now = self.now()
        self._accounting.close(outcome, now)
        if outcome.attempts:
            self._flow_control.ended(outcome.call.service, now, outcome.call.estimate.sequences)
        self.inflight -= 1
        if not self.inflight:
            self.idle.set()
