"""The answer to one request: everything that is written to its client.

Owns: comments while there is nothing to send, the head, the body, errors.
Must not know: attempts, retries, which replica answers.
Invariant: the answer begins once; after comments it continues inside the same stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from argosy_protocol.errors import ApiError, ErrorReason, InternalError
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.server_interface import Client
from argosy_router.proxy.accounting.outcome import RequestOutcome
from argosy_router.proxy.downstream.api_shape import error_body, error_event, id_headers
from argosy_router.proxy.downstream.commented_stream import (
    COMMENT,
    STREAM_HEADERS,
    CommentedStream,
    CommentSchedule,
)
from argosy_router.proxy.downstream.error_headers import error_headers

log = logging.getLogger(__name__)


class Answer:
    """Writes to the client, and notes in the outcome what was written."""

    def __init__(
        self,
        client: Client,
        outcome: RequestOutcome,
        *,
        wheel: TimerWheel,
        comments: CommentSchedule,
        now: Callable[[], float],
    ) -> None:
        """`now` is a monotonic clock."""
        self._client = client
        self._outcome = outcome
        self._comments = comments
        self._now = now
        self._quiet: Deadline | None = None
        """Streams only: when the next comment is due if there is nothing else to send."""
        self._has_comments = False
        """Whether a comment was sent, and with it the status 200."""
        self._was_quiet = False
        """Whether nothing of the started answer was sent since the deadline was last set."""
        self.is_sent = False
        """Whether the request was sent to a replica."""
        self.is_accepted = False
        """Whether a replica has sent the head of a stream, perhaps without an event yet."""
        self.is_started = False
        """Whether a part of the answer was sent."""
        self.is_client_paused = False
        """Whether the client reads more slowly than the answer arrives."""
        if outcome.call.is_stream:
            self._quiet = Deadline(wheel, self._on_quiet)
            self._quiet.set(comments.interval_s)

    # comments

    def accepted(self) -> None:
        """Note that a replica has accepted the request, so that comments need not wait for `after_s`."""
        self.is_accepted = True
        if self._quiet is not None and not self._has_comments and not self.is_started:
            quiet_s = self._now() - self._outcome.started
            self._quiet.set(max(0.0, self._comments.interval_s - quiet_s))

    def _on_quiet(self) -> None:
        """Send a comment if one is due, and set the next deadline."""
        quiet, schedule = self._quiet, self._comments
        if quiet is None:
            return
        if self.is_started:
            # Only whole events are sent, so that a comment is never within one.
            if self._was_quiet and not self.is_client_paused:
                self._client.send(COMMENT)
            self._was_quiet = True
            quiet.set(schedule.interval_s)
            return
        if not self._has_comments and self.is_sent and not self.is_accepted:
            left_s = self._outcome.started + schedule.after_s - self._now()
            if left_s > 0.0:
                quiet.set(left_s)
                return
        if not self._has_comments:
            self._has_comments = True
            self._client.start(200, STREAM_HEADERS + self._identity, COMMENT)
            self._client = CommentedStream(self._client, self._outcome.call.path)
        elif not self.is_client_paused:
            self._client.send(COMMENT)
        quiet.set(schedule.interval_s)

    # the answer

    def start(self, status: int, headers: bytes, route: bytes, data: bytes, *, is_events: bool) -> None:
        """Begin an answer that is sent in pieces.

        Args:
            headers: lines of the replica's response.
            route: lines that tell how the replica was chosen.
            is_events: whether each piece is whole events, so that comments may come between them.
        """
        outcome = self._outcome
        self.is_started = True
        if is_events and self._quiet is not None:
            self._quiet.set(self._comments.interval_s)
        else:
            self.close()
        outcome.status = status
        now = self._now()
        outcome.first_event_s = now - outcome.started
        if status == 200 and outcome.call.is_stream:
            # Now rather than at the end: a long answer would tell the autoscaler of a load that is long past.
            outcome.call.service.demand.observe_ttft(outcome.first_event_s, outcome.started, now)
        self._client.start(status, headers + self._identity + route, data)

    def send(self, data: bytes) -> None:
        """Continue the answer."""
        self._was_quiet = False
        self._client.send(data)

    def finish(self) -> None:
        """Complete the answer."""
        self._client.finish()

    def respond(self, status: int, headers: bytes, route: bytes, body: bytes) -> None:
        """Send a whole answer; the arguments are those of `start`."""
        self._outcome.status = status
        self._client.respond(status, headers + self._identity + route, body)
        if status >= 400:
            self._outcome.error = ErrorReason.read(body)

    def respond_error(self, error: ApiError, route: bytes) -> None:
        """Send an error of the router's own."""
        if isinstance(error, InternalError):
            log.error("request %s: %s", self._outcome.call.request_id.decode(), error.message)
        body = error_body(error, self._outcome.call.path)
        self.respond(error.http_status, error_headers(error), route, body)
        self._outcome.error = error.reason()

    def interrupt(self, error: ApiError) -> None:
        """End a stream by an error event, since the status is sent."""
        path = self._outcome.call.path
        self._outcome.error = error.reason()
        self._client.send(error_event(error_body(error, path), path))
        self._client.finish()

    def abort(self) -> None:
        """Cut the connection, because the rest of a unary answer is lost."""
        self._client.abort()

    def close(self) -> None:
        """Send no more comments."""
        if self._quiet is not None:
            self._quiet.end()

    @property
    def _identity(self) -> bytes:
        """Header lines of every answer to this request."""
        call = self._outcome.call
        lines = id_headers(call.request_id, call.path)
        reservation = self._outcome.reservation
        return lines if reservation is None else lines + reservation.header_lines
