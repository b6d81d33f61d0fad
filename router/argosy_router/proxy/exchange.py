"""One generation request from dispatch to its end: attempts, retries, hedging, forwarding.

Owns: which attempts are made, which of their responses becomes the answer, and the request's outcome record until its
end.
Must not know: parsing, discovery, policies, flow control, connections to replicas (`attempt`), what is written to the
client (`answer`).
Invariants: the client's answer begins once; until the client has something of it a failed attempt may be repeated on
another replica, after that only a stream continues there, behind what the client has; every attempt is ended; a client
that leaves aborts the replicas' work at once.

    connecting -> waiting -> (unary)  buffering -> answered
         ^------- failed ---'  |
         |                     -> (stream) streaming -> answered
         `------ replica died --------------'        -> an error event, if no replica can continue

While a stream's first attempt waits and its answer is overdue, a hedge may run beside it (`hedging`): the first of the
two to respond is the request's attempt from then on, and so is the one that is left when the other fails.
"""

from __future__ import annotations

from collections.abc import Callable

from argosy_protocol.errors import (
    ApiError,
    BadGateway,
    GatewayTimeout,
    TooManyRequests,
    Unavailable,
)
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.replica_errors import CoreStalled
from argosy_router.fleet.service import Choice
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.errors import (
    ConnectFailed,
    ConnectionLost,
    FirstByteTimeout,
    UpstreamError,
)
from argosy_router.proxy.accounting.outcome import CLIENT_GONE, RequestOutcome
from argosy_router.proxy.accounting.request_accounting import RequestAccounting
from argosy_router.proxy.dispatcher import Dispatcher
from argosy_router.proxy.downstream.answer import Answer
from argosy_router.proxy.resilience.outlier_detection import OutlierDetector, Suspects
from argosy_router.proxy.resilience.retry_budget import RetryBudget
from argosy_router.proxy.upstream.attempt import Attempt, AttemptListener
from argosy_router.proxy.upstream.relay import StreamRelay, UnaryRelay
from argosy_router.proxy.upstream.response_status import EngineError, Refused, is_error, refusal
from argosy_router.proxy.upstream.stream_transcript import Transcript
from argosy_router.proxy.upstream.upstream_ids import UpstreamIds

MAX_ATTEMPTS = 3
"""Before the answer begins."""
MAX_MIGRATIONS = 4
"""Attempts to continue one stream. The first costs no retry credit: it repeats nothing that was answered, and the
streams of a replica that dies were all admitted. The bound keeps a request that kills engines from killing them all."""


class Exchange(AttemptListener):
    """One request under way."""

    def __init__(
        self,
        answer: Answer,
        outcome: RequestOutcome,
        on_end: Callable[[RequestOutcome], None],
        *,
        dispatcher: Dispatcher,
        outliers: OutlierDetector,
        retry_budget: RetryBudget,
        accounting: RequestAccounting,
        upstream_ids: UpstreamIds,
        wheel: TimerWheel,
        now: Callable[[], float],
    ) -> None:
        """
        Args:
            outcome: the request's empty outcome record; `on_end` gets it when nothing changes it any more.
            retry_budget: its service's.
            now: a monotonic clock.
        """
        self._answer = answer
        self.outcome = outcome
        self._call = outcome.call
        self._on_end = on_end
        self._dispatcher = dispatcher
        self._outliers = outliers
        self._retry_budget = retry_budget
        self._accounting = accounting
        self._upstream_ids = upstream_ids
        self._wheel = wheel
        self._now = now
        self._attempt: Attempt | None = None
        """The last one."""
        self._hedge: Attempt | None = None
        """The hedge, while the race is open."""
        self._tried: list[Replica] = []
        """Since the client was last sent something."""
        self._suspects = Suspects()
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
        self._attempt = attempt = self._send_to(choice)
        self._answer.is_sent = True
        if call.is_stream:
            attempt.end_when_answering(dispatcher.watch_first_token(call, choice, self.on_overdue))

    def refuse(self, error: ApiError) -> None:
        """Answer with an error a request that was not sent."""
        self._end_with_error(error)

    # attempts that fail

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
            wheel=self._wheel,
            upstream_ids=self._upstream_ids,
            first_byte_timeout_s=self._dispatcher.first_byte_timeout_s(call, choice),
            now=self._now,
        )
        if self._answer.is_client_paused:
            attempt.pause()
        attempt.start()
        return attempt

    def on_attempt_failed(self, attempt: Attempt, error: UpstreamError) -> None:
        """Repeat the attempt, leave the request to the other one of two, or give up."""
        if isinstance(error, ConnectionLost) and error.stale and self._may_reconnect(attempt.replica):
            self.outcome.attempts = attempt.record.attempt = self.outcome.attempts + 1
            self._accounting.count_retry(self._call, "stale")
            attempt.start(fresh=True)
            return
        attempt.end()
        self._outliers.attempt_failed(self._call.service, attempt.replica, error, self._now())
        if isinstance(error, Refused) and error.is_ambiguous:
            self._suspects.add(attempt.replica, error.status)
        if self._hedge is not None:
            self._leave_to_other(attempt, self._hedge)
        elif self._answer.is_started:
            self._continue(attempt)
        else:
            self._retry(error)

    def _may_reconnect(self, replica: Replica) -> bool:
        """Whether to ask the same replica again: it is rarely at fault if a pooled connection dies at once."""
        allowed = MAX_ATTEMPTS + self.outcome.migrations
        return replica.is_routable and self.outcome.attempts < allowed and self._may_retry()

    def _may_retry(self, *, is_error: bool = False) -> bool:
        """Take a retry from the service's budget."""
        return self._retry_budget.spend(self._now(), is_error=is_error)

    def _retry(self, error: UpstreamError) -> None:
        """Ask another replica for an answer that has not begun."""
        may_go_on = self.outcome.attempts < MAX_ATTEMPTS and not self._suspects.is_request_at_fault
        is_error = isinstance(error, Refused) and error.is_ambiguous
        following = self._another(is_admitted=is_error) if may_go_on else None
        if following is not None and self._may_retry(is_error=is_error):
            self._accounting.count_retry(self._call, error.reason)
            self._attempt = self._send_to(following)
        else:
            self._give_up(error)

    def _continue(self, attempt: Attempt) -> None:
        """Continue on another replica an answer that has begun, or tell the client that it is incomplete."""
        transcript = attempt.transcript
        if transcript is None or not transcript.read():
            self._interrupt(attempt, "refused")
        elif transcript.missing_end is not None:
            self._accounting.count_migration(self._call, "completed")
            if transcript.missing_end:
                self._answer.send(transcript.missing_end)
            self._answer.finish()
            self._end()
        elif (successor := self._successor(attempt.fingerprint)) is not None:
            self.outcome.migrations += 1
            self._attempt = self._send_to(successor, transcript)
        else:
            self._interrupt(attempt, "failed")

    def _successor(self, fingerprint: str) -> Choice | None:
        """Choose a replica to continue the stream; None if it may not be continued."""
        if self.outcome.migrations >= MAX_MIGRATIONS or self._suspects.is_request_at_fault:
            return None
        successor = self._another(fingerprint)
        if successor is None or (self.outcome.migrations and not self._may_retry()):
            return None
        return successor

    def on_attempt_stalled(self, attempt: Attempt, error: CoreStalled) -> None:
        """Continue on another replica if one can; otherwise wait, because the core may still wake up."""
        if attempt is not self._attempt or self._hedge is not None:
            return
        transcript, choice = None, None
        if self._answer.is_started:
            transcript = attempt.transcript
            if transcript is None or not transcript.read():
                return
        if transcript is None or transcript.missing_end is None:
            choice = self._away_from_stall(attempt)
            if choice is None:
                return
        attempt.end()
        self._outliers.attempt_failed(self._call.service, attempt.replica, error, self._now())
        if choice is None:
            self._continue(attempt)  # all that is missing is the stream's end
            return
        if self._answer.is_started:
            self.outcome.migrations += 1
        else:
            self._accounting.count_retry(self._call, error.reason)
        self._attempt = self._send_to(choice, transcript)

    def _away_from_stall(self, attempt: Attempt) -> Choice | None:
        """Choose a healthy replica to continue in place of a stalled one."""
        outcome = self.outcome
        sent, most = outcome.attempts, MAX_ATTEMPTS
        if self._answer.is_started:
            sent, most = outcome.migrations, MAX_MIGRATIONS
        if sent >= most:
            return None
        fingerprint = attempt.fingerprint if self._answer.is_started else ""
        choice = self._dispatcher.choose_instead_of_stalled(self._call, self._tried, self._now(), fingerprint)
        is_free = self._answer.is_started and not outcome.migrations
        return choice if choice is not None and (is_free or self._may_retry()) else None

    def _another(self, fingerprint: str = "", *, is_admitted: bool = False) -> Choice | None:
        """Choose the next replica to try; None if no replica can take the request."""
        try:
            now = self._now()
            return self._dispatcher.choose(self._call, self._tried, now, fingerprint, is_admitted=is_admitted)
        except ApiError:
            return None

    def _give_up(self, error: UpstreamError) -> None:
        model = self._call.service.spec.model
        if isinstance(error, EngineError):
            self._end_with(error.status, error.head, error.body)
        elif isinstance(error, Refused) and error.is_busy:
            message = f"the replicas of model {model!r} take no more requests"
            self._end_with_error(TooManyRequests(message, retry_after_s=error.retry_after_s))
        elif isinstance(error, FirstByteTimeout):
            self._end_with_error(GatewayTimeout(f"model {model!r} did not answer in time", retry_after_s=1.0))
        elif isinstance(error, ConnectFailed):
            self._end_with_error(
                Unavailable(f"no replica of model {model!r} is reachable", retry_after_s=1.0)
            )
        else:
            self._end_with_error(BadGateway(f"the replica of model {model!r} failed", retry_after_s=1.0))

    # hedging

    def on_overdue(self) -> None:
        """Send a hedge for the overdue answer, if another replica has capacity for it."""
        if self._answer.is_client_paused:
            return
        choice = self._dispatcher.choose_hedge(self._call, self._tried, self._now())
        if choice is not None:
            self._hedge = self._send_to(choice)
            self._hedge.record.hedge = "racing"

    def _win(self, winner: Attempt, hedge: Attempt) -> None:
        """Give up the other one of two attempts: this one responds."""
        first, self._attempt, self._hedge = self._attempt, winner, None
        assert first is not None
        if winner is hedge:
            self._abandon(first)
            self._accounting.count_hedge(self._call, hedge.record, "won")
        else:
            self._abandon(hedge)
            self._accounting.count_hedge(self._call, hedge.record, "lost")

    def _abandon(self, attempt: Attempt) -> None:
        """End an attempt that nobody needs any more, which tells nothing about its replica."""
        attempt.end()
        self._outliers.abandoned(self._call.service, attempt.replica)

    def _leave_to_other(self, attempt: Attempt, hedge: Attempt) -> None:
        """Go on with the other one of two attempts: this one has failed."""
        self._hedge = None
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
            self._win(attempt, self._hedge)
        attempt.begin_answer()
        if attempt.status < 400:
            self._outliers.began(attempt.replica)
            self._find_at_fault()
        self._tried = [attempt.replica]
        if self._answer.is_started:
            self._accounting.count_migration(self._call, "resumed")
            self._answer.send(data)
            return
        self._answer.start(attempt.status, attempt.headers, attempt.route_headers, data)

    def on_attempt_ended(self, attempt: Attempt, rest: bytes) -> None:
        """Complete the client's answer, unless the response is a refusal or an error."""
        status, hedge = attempt.status, self._hedge
        if self._answer.is_started:
            if rest:
                self.on_attempt_data(attempt, rest)
            self._settle(attempt)
            self._answer.finish()
            self._end()
        elif (refused := refusal(status, attempt.headers)) is not None:
            self.on_attempt_failed(attempt, refused)
        elif is_error(status):
            self.on_attempt_failed(attempt, EngineError(status, attempt.headers, rest))
        else:
            if hedge is not None:
                self._win(attempt, hedge)
            self._settle(attempt)
            if status < 400:
                self._find_at_fault()
            self._end_with(status, attempt.headers, rest)

    def _settle(self, attempt: Attempt) -> None:
        """End an attempt whose whole response becomes the client's answer."""
        attempt.end()
        if is_error(attempt.status):
            self._outliers.abandoned(self._call.service, attempt.replica)
        else:
            self._outliers.answered(attempt.replica)

    def _find_at_fault(self) -> None:
        """Blame the replicas that failed a request which another one can answer."""
        for replica, status in self._suspects.take():
            self._outliers.found_at_fault(self._call.service, replica, status, self._now())

    def _complete_outcome(self) -> None:
        """Note the last attempt in the outcome, and what its answer, or the part that the client has, used."""
        attempt, outcome = self._attempt, self.outcome
        if attempt is None:
            return
        outcome.choice = attempt.choice
        outcome.record = attempt.record
        outcome.sent_at = attempt.started
        if outcome.status == 200:
            relay = attempt.relay
            outcome.usage = relay.usage
            if outcome.usage is None and isinstance(relay, StreamRelay):
                outcome.sent_tokens = relay.num_tokens

    def _interrupt(self, attempt: Attempt, outcome: str) -> None:
        """End an answer that nobody continues; a stream's client gets an error event, since the status is sent."""
        self._accounting.count_interruption(self._call, attempt.replica)
        if isinstance(attempt.relay, UnaryRelay):
            self._answer.abort()
        else:
            self._accounting.count_migration(self._call, outcome)
            error = BadGateway("the replica failed while generating; the answer is incomplete")
            self._answer.interrupt(error)
        self._end()

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
        self._end()

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

    def _end_with_error(self, error: ApiError) -> None:
        self._answer.respond_error(error, self._route_headers())
        self._end()

    def _route_headers(self) -> bytes:
        return self._attempt.route_headers if self._attempt is not None else b""

    def _end(self) -> None:
        assert self._attempt is None or self._attempt.is_over, "every attempt was ended"
        assert self._hedge is None, "one attempt answers"
        assert not self._is_over, "a request ends once"
        self._is_over = True
        self._answer.close()
        for replica, _ in self._suspects.take():
            self._outliers.abandoned(self._call.service, replica)
        self._complete_outcome()
        self._on_end(self.outcome)
        self._attempt = None  # it refers to us: without the cycle both, and the body, are freed at once
