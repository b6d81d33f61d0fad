"""One generation request from dispatch to its end: attempts, retries, hedging, forwarding.

Owns: which attempts are made, and everything written to the client.
Must not know: parsing, discovery, policies, connections to replicas (`attempt`).
Invariants: the client's answer begins once; until the client has something of it a failed attempt may be repeated on
another replica, after that only a stream goes on there, behind what the client has; every attempt is ended; a client
that leaves aborts the replicas' work at once.

    connecting -> waiting -> (unary)  buffering -> answered
         ^------- failed ---'  |
         |                     -> (stream) streaming -> answered
         `------ replica died --------------'        -> an error event, when nobody can go on

While a stream's first attempt waits, and its answer is overdue, a second one may run beside it (`hedging`): the first
of the two to say something is the request's attempt from then on, and so is the one that is left when the other fails.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from argosy_protocol.errors import (
    ApiError,
    BadGateway,
    GatewayTimeout,
    InternalError,
    TooManyRequests,
    Unavailable,
)
from argosy_router.admission.accounts import Reservation
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Choice
from argosy_router.http.deadlines import Deadline
from argosy_router.http.errors import (
    ConnectFailed,
    ConnectionLost,
    CoreStalled,
    FirstByteTimeout,
    UpstreamError,
)
from argosy_router.http.roles import Client
from argosy_router.proxy.attempt import Attempt
from argosy_router.proxy.begun_stream import COMMENT, STREAM_HEADERS, BegunStream
from argosy_router.proxy.call import Call
from argosy_router.proxy.decisions import DecisionRecord
from argosy_router.proxy.migration import Transcript
from argosy_router.proxy.relay import StreamRelay, UnaryRelay
from argosy_router.proxy.verdict import EngineError, Refused, Suspects, is_error, refusal

if TYPE_CHECKING:
    from argosy_router.proxy.dispatcher import Dispatcher

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Before the answer begins."""
MAX_MIGRATIONS = 4
"""Attempts to go on with one stream. The first costs no retry credit: it repeats nothing that was answered, and the
streams of a replica that dies were all admitted. The bound keeps a request that kills engines from killing them all."""


class Exchange:
    """One request under way."""

    def __init__(self, dispatcher: Dispatcher, client: Client, call: Call, started: float) -> None:
        self._dispatcher = dispatcher
        self._client = client
        self.call = call
        self.started = started
        self.status = 0
        """Status sent to the client; 499 when it left before one was."""
        self.attempts = 0
        self.migrations = 0
        """Those of the attempts that went on with a stream."""
        self.first_event_s: float | None = None
        self.waited_s = 0.0
        """Of it, time in the queue."""
        self.reservation: Reservation | None = None
        """What it took of its key's limits."""
        self.is_client_paused = False
        self._attempt: Attempt | None = None
        """The last one."""
        self._hedge: Attempt | None = None
        """The one beside it, until one of the two answers or fails."""
        self._tried: list[Replica] = []
        """Since the client was last sent something."""
        self._suspects = Suspects()
        self._quiet: Deadline | None = None
        """Of a stream's client that has heard nothing."""
        self._is_accepted = False
        """Whether a replica has begun a stream for it, perhaps without an event yet."""
        self._is_begun = False
        """Whether its client has heard something, perhaps comments alone."""
        self._is_over = False
        self._is_started = False

    @property
    def choice(self) -> Choice | None:
        """Of the last attempt."""
        return self._attempt.choice if self._attempt is not None else None

    @property
    def record(self) -> DecisionRecord | None:
        """Of the last attempt."""
        return self._attempt.record if self._attempt is not None else None

    @property
    def sent_at(self) -> float:
        """When the last attempt began; when the request arrived if there was none."""
        return self._attempt.started if self._attempt is not None else self.started

    def describe(self, now: float) -> str:
        """Where it stands, in a line for people."""
        attempt, call = self._attempt, self.call
        line = f"{call.request_id.decode()}: model={call.service.name} age={now - self.started:.1f}s"
        if attempt is None:
            return line + " queued"
        state = "answering" if self._is_started else "accepted" if self._is_accepted else "sent"
        line += f" {state} replica={attempt.replica.name} since={now - attempt.started:.1f}s"
        line += f" attempts={self.attempts} migrations={self.migrations}"
        if self._hedge is not None:
            line += f" hedge={self._hedge.replica.name}"
        return line + (" client is behind" if self.is_client_paused else "")

    # attempts

    def start(self) -> None:
        """Sends the request to the best replica.

        Raises:
            Unavailable, TooManyRequests: none can take it; nothing has happened.
        """
        self._attempt = attempt = self._send_to(self._dispatcher.choose(self.call, self._tried))
        if self.call.is_stream:
            attempt.watch()

    def refuse(self, error: ApiError) -> None:
        """Ends a request that was not sent."""
        self._answer_error(error)

    # keep-alive comments

    def keep_alive(self, quiet: Deadline) -> None:
        """Lets a stream's client hear comments until its first event; `quiet` calls `on_quiet`."""
        self._quiet = quiet
        quiet.set(self._dispatcher.keep_alive.interval_s)

    def on_quiet(self) -> None:
        """The client of a stream has heard nothing for a while."""
        quiet, times = self._quiet, self._dispatcher.keep_alive
        if quiet is None or self._is_started:
            return
        if not self._is_begun and self._attempt is not None and not self._is_accepted:
            left_s = self.started + times.after_s - self._dispatcher.now()
            if left_s > 0.0:
                quiet.set(left_s)
                return
        if not self._is_begun:
            self._is_begun = True
            self._client.start(200, STREAM_HEADERS + self.identity, COMMENT)
            self._client = BegunStream(self._client)
        elif not self.is_client_paused:
            self._client.send(COMMENT)
        quiet.set(times.interval_s)

    def on_accepted(self) -> None:
        """A replica has answered with the head of a stream: it took the request, and comments need not wait longer."""
        self._is_accepted = True
        if self._quiet is not None and not self._is_begun and not self._is_started:
            quiet_s = self._dispatcher.now() - self.started
            self._quiet.set(max(0.0, self._dispatcher.keep_alive.interval_s - quiet_s))

    def _send_to(self, choice: Choice, transcript: Transcript | None = None) -> Attempt:
        self.attempts += 1
        self._tried.append(choice.replica)
        record = self._dispatcher.dispatched(self.call, choice, self.attempts)
        attempt = Attempt(self, self._dispatcher, choice, record, transcript)
        attempt.start()
        return attempt

    def on_attempt_failed(self, attempt: Attempt, error: UpstreamError) -> None:
        """Its replica has given no answer, or not all of it."""
        if isinstance(error, ConnectionLost) and error.stale and self._may_reconnect(attempt.replica):
            self.attempts = attempt.record.attempt = self.attempts + 1
            self._dispatcher.retried(self.call, "stale")
            attempt.start(fresh=True)
            return
        attempt.end()
        self._dispatcher.attempt_failed(self.call, attempt.replica, error)
        if isinstance(error, Refused) and error.is_open:
            self._suspects.add(attempt.replica, error.status)
        if self._hedge is not None:
            self._leave_to_other(attempt, self._hedge)
        elif self._is_started:
            self._continue(attempt)
        else:
            self._retry(error)

    def _may_reconnect(self, replica: Replica) -> bool:
        """Whether the same replica is asked again: a kept connection that dies at once is rarely its fault."""
        allowed = MAX_ATTEMPTS + self.migrations
        return replica.is_routable and self.attempts < allowed and self._dispatcher.may_retry(self.call)

    def _retry(self, error: UpstreamError) -> None:
        """Nothing has been answered yet: another replica may."""
        may_go_on = self.attempts < MAX_ATTEMPTS and not self._suspects.is_request_at_fault
        is_error = isinstance(error, Refused) and error.is_open
        following = self._another(is_admitted=is_error) if may_go_on else None
        if following is not None and self._dispatcher.may_retry(self.call, is_error=is_error):
            self._dispatcher.retried(self.call, error.reason)
            self._attempt = self._send_to(following)
        else:
            self._give_up(error)

    def _continue(self, attempt: Attempt) -> None:
        """The replica died after the answer began: another one goes on with it, or the client hears of it."""
        transcript = attempt.transcript
        if transcript is None or not transcript.read():
            self._interrupt(attempt, "refused")
        elif transcript.missing_end is not None:
            self._dispatcher.migrated(self.call, "completed")
            if transcript.missing_end:
                self._client.send(transcript.missing_end)
            self._client.finish()
            self._end()
        elif (successor := self._successor(attempt.fingerprint)) is not None:
            self.migrations += 1
            self._attempt = self._send_to(successor, transcript)
        else:
            self._interrupt(attempt, "failed")

    def _successor(self, fingerprint: str) -> Choice | None:
        """Whoever may go on with the stream."""
        if self.migrations >= MAX_MIGRATIONS or self._suspects.is_request_at_fault:
            return None
        successor = self._another(fingerprint)
        if successor is None or (self.migrations and not self._dispatcher.may_retry(self.call)):
            return None
        return successor

    def on_stalled(self, attempt: Attempt, error: CoreStalled) -> None:
        """Its replica's core has stopped. Another one goes on if it can; otherwise the core may still wake up."""
        if attempt is not self._attempt or self._hedge is not None:
            return
        transcript, choice = None, None
        if self._is_started:
            transcript = attempt.transcript
            if transcript is None or not transcript.read():
                return
        if transcript is None or transcript.missing_end is None:
            choice = self._away_from_stall(attempt)
            if choice is None:
                return
        attempt.end()
        self._dispatcher.attempt_failed(self.call, attempt.replica, error)
        if choice is None:
            self._continue(attempt)  # all that is missing is the stream's end
            return
        if self._is_started:
            self.migrations += 1
        else:
            self._dispatcher.retried(self.call, error.reason)
        self._attempt = self._send_to(choice, transcript)

    def _away_from_stall(self, attempt: Attempt) -> Choice | None:
        """A well replica that may go on in place of a stalled one."""
        sent, most = (self.migrations, MAX_MIGRATIONS) if self._is_started else (self.attempts, MAX_ATTEMPTS)
        if sent >= most:
            return None
        fingerprint = attempt.fingerprint if self._is_started else ""
        choice = self._dispatcher.elsewhere(self.call, self._tried, fingerprint)
        is_free = self._is_started and not self.migrations
        return choice if choice is not None and (is_free or self._dispatcher.may_retry(self.call)) else None

    def _another(self, fingerprint: str = "", *, is_admitted: bool = False) -> Choice | None:
        """The next replica to try; None leaves it at the error at hand."""
        try:
            return self._dispatcher.choose(self.call, self._tried, fingerprint, is_admitted=is_admitted)
        except ApiError:
            return None

    def _give_up(self, error: UpstreamError) -> None:
        model = self.call.service.spec.model
        if isinstance(error, EngineError):
            self._answer(error.status, error.head, error.body)
        elif isinstance(error, Refused) and error.is_busy:
            message = f"the replicas of model {model!r} take no more requests"
            self._answer_error(TooManyRequests(message, retry_after_s=error.retry_after_s))
        elif isinstance(error, FirstByteTimeout):
            self._answer_error(GatewayTimeout(f"model {model!r} did not answer in time", retry_after_s=1.0))
        elif isinstance(error, ConnectFailed):
            self._answer_error(Unavailable(f"no replica of model {model!r} is reachable", retry_after_s=1.0))
        else:
            self._answer_error(BadGateway(f"the replica of model {model!r} failed", retry_after_s=1.0))

    # hedging

    def on_overdue(self) -> None:
        """The first attempt should have answered by now: another replica is asked, too, if that costs nobody else."""
        choice = None if self.is_client_paused else self._dispatcher.hedge(self.call, self._tried)
        if choice is not None:
            self._hedge = self._send_to(choice)
            self._hedge.record.hedge = "racing"

    def _win(self, winner: Attempt, hedge: Attempt) -> None:
        """One of two attempts answers: the other is given up."""
        first, self._attempt, self._hedge = self._attempt, winner, None
        assert first is not None
        if winner is hedge:
            first.abandon()
            self._dispatcher.hedged(self.call, hedge.record, "won")
        else:
            hedge.abandon()
            self._dispatcher.hedged(self.call, hedge.record, "lost")

    def _leave_to_other(self, attempt: Attempt, hedge: Attempt) -> None:
        """One of two attempts has ended without an answer."""
        self._hedge = None
        if attempt is hedge:
            self._dispatcher.hedged(self.call, hedge.record, "failed")
        else:
            self._attempt = hedge
            self._dispatcher.hedged(self.call, hedge.record, "promoted")

    # the replica's answer

    def forward(self, attempt: Attempt, data: bytes) -> None:
        """The answer begins, or goes on, with `data`."""
        if attempt.is_answering:
            self._client.send(data)
            return
        if self._hedge is not None:
            self._win(attempt, self._hedge)
        attempt.answers()
        if attempt.status < 400:
            self._dispatcher.began(attempt.replica)
            self._find_at_fault()
        self._tried = [attempt.replica]
        if self._is_started:
            self._dispatcher.migrated(self.call, "resumed")
            self._client.send(data)
            return
        self._is_started = True
        if self._quiet is not None:
            self._quiet.end()
        self.status = attempt.status
        self.first_event_s = self._dispatcher.now() - self.started
        self._client.start(self.status, attempt.headers + self._own_headers(), data)

    def on_attempt_ended(self, attempt: Attempt, rest: bytes) -> None:
        """The replica's response is complete; `rest` is still to be sent on."""
        status, hedge = attempt.status, self._hedge
        if self._is_started:
            if rest:
                self.forward(attempt, rest)
            self._settle(attempt)
            self._client.finish()
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
            self._answer(status, attempt.headers, rest)

    def _settle(self, attempt: Attempt) -> None:
        """The replica gave a whole answer, of which the client has at least the beginning."""
        attempt.end()
        if is_error(attempt.status):
            self._dispatcher.abandoned(self.call, attempt.replica)
        else:
            self._dispatcher.answered(attempt.replica)

    def _find_at_fault(self) -> None:
        """A replica can answer the request: those that failed it are at fault."""
        for replica, status in self._suspects.take():
            self._dispatcher.found_at_fault(self.call, replica, status)

    def _measure(self) -> None:
        """What the answer used, or the part of it that the client has."""
        attempt = self._attempt
        if attempt is None or self.status != 200:
            return
        relay = attempt.relay
        usage = relay.usage
        if usage is not None:
            self._dispatcher.measured(self.call, attempt.choice, attempt.record, usage)
        elif isinstance(relay, StreamRelay):
            self._dispatcher.counted(attempt.record, relay.num_tokens)

    def _interrupt(self, attempt: Attempt, outcome: str) -> None:
        """Nobody goes on with the answer: say so inside it, the status is gone."""
        self._dispatcher.interrupted(self.call, attempt.replica)
        if isinstance(attempt.relay, UnaryRelay):
            self._client.abort()
        else:
            self._dispatcher.migrated(self.call, outcome)
            error = BadGateway("the replica failed while generating; the answer is incomplete")
            self._client.send(b"data: " + error.body() + b"\n\n")
            self._client.finish()
        self._end()

    # the client

    def on_client_lost(self) -> None:
        if self._is_over:
            return
        if self._attempt is not None:
            self._attempt.abandon()
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            hedge.abandon()
            self._dispatcher.hedged(self.call, hedge.record, "abandoned")
        if not self._is_started:
            self.status = 499
        self._dispatcher.client_lost(self.call)
        self._end()

    def on_client_paused(self) -> None:
        self.is_client_paused = True
        for attempt in (self._attempt, self._hedge):
            if attempt is not None:
                attempt.pause()

    def on_client_resumed(self) -> None:
        self.is_client_paused = False
        for attempt in (self._attempt, self._hedge):
            if attempt is not None:
                attempt.resume()

    # answers

    @property
    def identity(self) -> bytes:
        """Header lines of every answer to this request."""
        lines = b"x-request-id: %b\r\n" % self.call.request_id
        return lines if self.reservation is None else lines + self.reservation.header_lines

    def _own_headers(self) -> bytes:
        attempt, identity = self._attempt, self.identity
        if attempt is None:
            return identity
        decision = attempt.choice.decision
        return b"%b%bx-argosy-route: %b\r\nx-argosy-mode: %b\r\nx-argosy-predicted-tokens: %d\r\n" % (
            identity,
            attempt.replica.name_header,
            decision.reason.encode(),
            attempt.record.mode.encode(),
            decision.predicted_tokens,
        )

    def _answer(self, status: int, headers: bytes, body: bytes) -> None:
        self.status = status
        self._client.respond(status, headers + self._own_headers(), body)
        self._end()

    def _answer_error(self, error: ApiError) -> None:
        if isinstance(error, InternalError):
            log.error("request %s: %s", self.call.request_id.decode(), error.message)
        self._answer(error.http_status, self._dispatcher.error_headers(error), error.body())

    def _end(self) -> None:
        assert self._attempt is None or self._attempt.is_over, "every attempt was ended"
        assert self._hedge is None, "one attempt answers"
        assert not self._is_over, "a request ends once"
        self._is_over = True
        if self._quiet is not None:
            self._quiet.end()
        for replica, _ in self._suspects.take():
            self._dispatcher.abandoned(self.call, replica)
        self._measure()
        self._dispatcher.finished(self)
        self._attempt = None  # it knows us: without a circle both, and the body, go at once
