"""The answer to one request: everything that is written to its client.

Owns: the head, the body, the model's name in it, comments while there is nothing to send, errors and their shape
(Anthropic's below /v1/messages, else OpenAI's). Must not know: attempts, retries, which replica answers.
Invariant: the answer begins once; after comments it continues inside the same stream.

Load balancers close a connection on which nothing is sent for a minute or so; comments prevent this. Their price: the
status is 200 from the first comment on, and a later failure becomes an error event. Comments are no part of an answer,
so the request may still be sent to another replica.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from argosy_protocol import anthropic
from argosy_protocol.errors import ApiError, ErrorReason, InternalError
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.messages import Client, render_headers
from argosy_router.proxy.accounting import RequestOutcome
from argosy_router.proxy.call import Renaming

log = logging.getLogger(__name__)


def is_messages_path(path: bytes) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return anthropic.is_messages_path(path.decode("latin-1"))


def error_body(error: ApiError, path: bytes) -> bytes:
    return anthropic.error_body(error) if is_messages_path(path) else error.body()


def error_event(body: bytes, path: bytes) -> bytes:
    """Return the event by which a stream that has begun ends with an error; `body` has no line break."""
    kind = b"event: error\n" if is_messages_path(path) else b""
    return b"%bdata: %b\n\n" % (kind, body)


def answer_event(status: int, body: bytes, path: bytes) -> bytes:
    """Return the event that has a whole answer, in a stream that has begun: an error, or the answer of an engine that
    did not stream."""
    line = b" ".join(body.splitlines())
    return error_event(line, path) if status >= 400 else b"data: %b\n\n" % line


def id_headers(request_id: bytes, path: bytes) -> bytes:
    """Render the header lines that tell a request's id; Anthropic's clients read it as `request-id`."""
    lines = b"x-request-id: %b\r\n" % request_id
    return lines + b"request-id: %b\r\n" % request_id if is_messages_path(path) else lines


def error_headers(error: ApiError) -> bytes:
    """Render the headers of an error."""
    lines = b"content-type: application/json\r\n"
    extra = error.headers() | error.retry_advice()
    if extra:
        lines += render_headers([(name.encode(), value.encode()) for name, value in extra.items()])
    return lines


STREAM_HEADERS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
COMMENT = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class CommentSchedule:
    """When the client of a stream that has no event for it gets a comment. Times in seconds."""

    interval_s: float = 10.0
    """Time between two comments: a sixth of the idle time that common load balancers allow. After an event the first
    comment comes within twice this time."""
    after_s: float = 15.0
    """A request that was sent to a replica and not accepted gets comments once it is this old. Most failures happen
    earlier, and can then still have a status of their own."""


MAX_RENAMED: Final = 16_384
"""Fields that are renamed in one piece of an answer, which takes some milliseconds: each event has one."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ModelRenaming:
    """Puts the client's name for the model into an answer. Nothing else changes: quotes inside of JSON strings are
    escaped, so `"model":"NAME"` is a field; only whole answers of Anthropic's API and of OpenAI's Responses API have
    other fields that may be called so, within a tool."""

    def __init__(self, names: Renaming, *, has_own_fields: bool = False) -> None:
        """`has_own_fields`: answers may have fields of that name that are the client's own."""
        self._has_own_fields = has_own_fields
        self._engine = msgspec.json.encode(names.engine)
        self._field = re.compile(rb'("model":\s?)' + re.escape(self._engine))
        self._value = msgspec.json.encode(names.client)

    def piece(self, data: bytes) -> bytes:
        """Rename in whole events or a part of an answer. If an answer over `relay.MAX_BUFFERED_BYTES` is split within
        the field, the field keeps the engine's name."""
        return self._field.sub(lambda found: found[1] + self._value, data, count=MAX_RENAMED)

    def whole(self, body: bytes) -> bytes:
        """Rename in a whole answer."""
        if not self._has_own_fields:
            return self.piece(body)
        try:
            fields = _fields.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body
        if bytes(fields.get("model", b"")) != self._engine:
            return body
        fields["model"] = msgspec.Raw(self._value)
        return msgspec.json.encode(fields)


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
        call = outcome.call
        self._renaming: ModelRenaming | None = None
        if call.renaming is not None:
            has_own_fields = call.endpoint in ("messages", "responses")
            self._renaming = ModelRenaming(call.renaming, has_own_fields=has_own_fields)
        if call.is_stream:
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
        data = self._renamed(data)
        if self._has_comments:
            self._client.send(data)
        else:
            self._client.start(status, headers + self._identity + route, data)

    def send(self, data: bytes) -> None:
        """Continue the answer."""
        self._was_quiet = False
        self._client.send(self._renamed(data))

    def finish(self) -> None:
        """Complete the answer."""
        self._client.finish()

    def respond(self, status: int, headers: bytes, route: bytes, body: bytes) -> None:
        """Send a whole answer; the arguments are those of `start`. After comments it is one event."""
        self._outcome.status = status
        if self._has_comments:
            self._client.send(self._renamed(answer_event(status, body, self._outcome.call.path)))
            self._client.finish()
        else:
            whole = body if self._renaming is None else self._renaming.whole(body)
            self._client.respond(status, headers + self._identity + route, whole)
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
        self._client.send(self._renamed(error_event(error_body(error, path), path)))
        self._client.finish()

    def abort(self) -> None:
        """Cut the connection, because the rest of a unary answer is lost."""
        self._client.abort()

    def close(self) -> None:
        """Send no more comments."""
        if self._quiet is not None:
            self._quiet.end()

    def _renamed(self, data: bytes) -> bytes:
        return data if self._renaming is None else self._renaming.piece(data)

    @property
    def _identity(self) -> bytes:
        """Header lines of every answer to this request."""
        call = self._outcome.call
        lines = id_headers(call.request_id, call.path)
        reservation = self._outcome.reservation
        return lines if reservation is None else lines + reservation.header_lines
