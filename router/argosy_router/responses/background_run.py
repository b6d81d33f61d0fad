"""One background response while it is generated, its events, and the clients that follow them.

Owns: the events of a run, and which of them each follower has. Must not know: where responses are stored, how many runs
there are.
Invariants: an event is kept once; followers get events as they read them, and a stream that misses some does not end as
if it were whole.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final

import msgspec

from argosy_protocol.errors import Unavailable
from argosy_router.http.body_memory import BodyReservation
from argosy_router.http.server_interface import Client, ClientListener
from argosy_router.http.sse import EventCutter, EventTooLarge
from argosy_router.responses.adopted_answer import (
    AdoptedAnswer,
    event_with_response_fields,
    with_response_fields,
)
from argosy_router.responses.storing_client import begins_last, last_response

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
WRITE_BYTES: Final = 64 * 1024
"""Size from which events are not joined to one write."""
STREAM_HEADERS: Final = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_EVENT_END: Final = re.compile(rb"\n\r?\n")
"""Begins with a byte that is searched for at once; an event may end with the carriage return before it."""
MAX_PARTIAL_BYTES: Final = 1024 * 1024
"""Pieces of a stream are whole events; an answer that has more without the end of one is no stream, nor a response."""
_EVENT_OVERHEAD: Final = 64
"""Bytes that an event takes in memory beside its own: engines may send millions of short ones."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BackgroundRun:
    """One run. A `Client` without a connection."""

    def __init__(
        self,
        owner: str,
        response_id: str,
        queued: bytes,
        is_streamed: bool,
        reserved: BodyReservation,
        count: Callable[[int], None],
    ) -> None:
        """
        Args:
            queued: the response that its client got at first, as JSON.
            reserved: the memory of the request's body, and of an answer that comes in pieces and is no stream.
            count: told of more bytes of events.
        """
        self.owner = owner
        self.heartbeat = ""
        """The id of this router's heartbeat (`run_heartbeats`)."""
        self.reserved = reserved
        self._adopted = AdoptedAnswer(response_id)
        fields = _decode_fields(queued)
        self._own_fields: dict[str, msgspec.Raw] = {
            name: fields[name] for name in ("background", "store") if name in fields
        }
        self._count = count
        self.is_streamed = is_streamed
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        """Status and body, once they are complete; status 0 if the answer was cut."""
        self.events: list[bytes] = []
        self.is_over = False
        self.is_cancelled = False
        """Whether the run was ended, or its record removed: its followers get no last event."""
        self.is_forgotten = False
        """Whether the events were dropped."""
        self.followers: set[Follower] = set()
        self.size = 0
        """Bytes that the events take."""
        self._size = 0
        self._listener: ClientListener | None = None
        self._status = 0
        self._body: list[bytes] = []
        """The answer, unless it is a stream of events."""
        self._last = b""
        """The last event of the response, as the engine sent it."""
        self._cutter = EventCutter(MAX_PARTIAL_BYTES)

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        if self.is_streamed and status == 200:
            self.start(status, headers, body)
            self.finish()
        else:
            self._end(status, body)

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._status = status
        self.send(first)

    def send(self, data: bytes) -> None:
        if self.is_streamed:
            data = self._adopted.renamed(data)  # pieces are whole events
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            self.leave()
            return
        try:
            if not self.is_streamed or self._status != 200:
                self.reserved.grow(len(data))
                self._body.append(data)
                return
            events = [event for event in self._whole_events(data) if event and not event.startswith(b":")]
        except (EventTooLarge, Unavailable):
            self.leave()
            return
        for event in events:
            if begins_last(event):
                self._last = event + b"\n\n"
        if not self.is_forgotten:
            size = len(data) + _EVENT_OVERHEAD * len(events)
            self.size += size
            self._count(size)
        if not self.is_forgotten:  # by what counts them
            self.events += [self._own(event) + b"\n\n" for event in events]
            self.notify()

    def _whole_events(self, data: bytes) -> list[bytes]:
        """Return the events that are whole with more data, without their ends. An answer that is no stream of events
        comes in pieces as well, and none of its bytes is looked at twice."""
        whole = self._cutter.feed(data)
        return [event.removesuffix(b"\r") for event in _EVENT_END.split(whole)] if whole else []

    def response_of(self, body: bytes) -> bytes:
        """Return the response as its client knows it, as JSON; nothing if there is none. To be called once.

        Args:
            body: the whole answer; of a stream nothing, because its last event was kept.
        """
        last, self._last = self._last, b""  # the run may be kept for long, and does not count it
        response = last_response(last) if self.is_streamed else self._adopted.renamed(body)
        if self._adopted.is_foreign:
            response = with_response_fields(response, self._own_fields)
        return response

    def fail(self, response: bytes) -> None:
        """Give a run that was refused before its first event those of a response that failed."""
        if self.is_streamed and not self.events:
            for number, name in enumerate((b"response.created", b"response.failed")):
                self.events.append(
                    b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b}\n\n'
                    % (name, name, number, response)
                )

    def finish(self) -> None:
        if self._cutter.tail:
            self.send(b"\n\n")
        self._end(self._status, b"".join(self._body))

    def abort(self) -> None:
        self._end(0, b"")

    def leave(self) -> None:
        """Abort the request, unless it has been answered."""
        listener = self._listener
        self._end(0, b"")
        if listener is not None:
            listener.on_client_lost()

    def forget(self) -> int:
        """Drop the events; return their size."""
        size, self.size = self.size, 0
        self.events, self.is_forgotten = [], True
        self.notify()
        return size

    def notify(self) -> None:
        """Send the followers what they can read."""
        for follower in list(self.followers):
            follower.push()

    def _own(self, event: bytes) -> bytes:
        """Return an event as this router's: engines of other makes are not asked to work in the background."""
        return event_with_response_fields(event, self._own_fields) if self._adopted.is_foreign else event

    def _end(self, status: int, body: bytes) -> None:
        self._listener = None
        self._body = []
        if not self.answer.done():
            self.answer.set_result((status, body))


class Follower:
    """A client that reads the events of a run. A `ClientListener`."""

    def __init__(self, client: Client, run: BackgroundRun, position: int, headers: bytes) -> None:
        self._client = client
        self._run = run
        self._position = position
        self._headers = headers
        self._has_started = False
        self._is_paused = False
        client.attach(self)
        run.followers.add(self)

    def on_client_lost(self) -> None:
        self._run.followers.discard(self)

    def on_client_paused(self) -> None:
        self._is_paused = True

    def on_client_resumed(self) -> None:
        self._is_paused = False
        self.push()

    def push(self) -> None:
        """Send the events that the client does not have, as far as it reads them, and then the end."""
        run = self._run
        while not self._is_paused and self in run.followers:
            data = self._next()
            if data:
                self._send(data)
                continue
            if run.is_over or run.is_forgotten:
                self._end()
            return

    def _next(self) -> bytes:
        """Return the next events, for one write."""
        events, end, size = self._run.events, self._position, 0
        while end < len(events) and size < WRITE_BYTES:
            size += len(events[end])
            end += 1
        data = b"".join(events[self._position : end])
        self._position = end
        return data

    def _send(self, data: bytes) -> None:
        if self._has_started:
            self._client.send(data)
            return
        self._has_started = True
        self._client.start(200, self._headers, data)

    def _end(self) -> None:
        run = self._run
        run.followers.discard(self)
        if run.is_forgotten and not run.is_cancelled:
            self._client.abort()
        elif self._has_started:
            self._client.finish()
        else:
            self._client.respond(200, self._headers, b"")
