"""One background response while it is generated, its events, and the clients that follow them.

Owns: the events of a run, and which of them each follower has. Must not know: where responses are stored, how many runs
there are.
Invariants: an event is kept once; followers get events as they read them, and a stream that misses some does not end as
if it were whole.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from argosy_protocol.errors import Unavailable
from argosy_router.http.body_memory import BodyReservation
from argosy_router.http.server_interface import Client, ClientListener
from argosy_router.http.sse import EventCutter, EventTooLarge
from argosy_router.proxy.request.ended_response import (
    AdoptedAnswer,
    Fields,
    Find,
    FoundResponse,
    begins_last,
    find_at_once,
    has_response,
)
from argosy_router.responses.storing_client import HELD_TWICE

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
WRITE_BYTES: Final = 64 * 1024
"""Size from which events are not joined to one write."""
STREAM_HEADERS: Final = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_EVENT_END: Final = re.compile(rb"\n\r?\n")
"""Begins with a byte that is searched for at once; an event may end with the carriage return before it."""
_FEW_LINES: Final = 1024
"""Ends of long events are searched for line by line, which takes a tenth of the pattern's time; those behind so many
lines are short."""
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
        find: Find = find_at_once,
    ) -> None:
        """
        Args:
            queued: the response that its client got at first, as JSON.
            reserved: the memory of the request's body, of an answer that is no stream, and of the last event and its
                response, which wait for the storage.
            count: told of more bytes of events.
            find: finds the response in an answer or an event.
        """
        self.owner = owner
        self.heartbeat = ""
        """The id of this router's heartbeat (`run_heartbeats`)."""
        self.reserved = reserved
        self._adopted = AdoptedAnswer(response_id)
        fields = _decode_fields(queued)
        self._own_fields: Fields = {
            name: bytes(fields[name]) for name in ("background", "store") if name in fields
        }
        self._find = find
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
        self._foreign: deque[bytes] = deque()
        """Events of an engine of another make that wait until those before them are this router's."""
        self._adopting: asyncio.Task[None] | None = None
        self.failure = ""
        """Why the run was left, for its client."""

    def attach(self, listener: ClientListener) -> None:
        self._listener = listener

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        if self.is_streamed and status == 200:
            self.start(status, headers, body)
            self.finish()
        elif status != 200 or self._reserve(HELD_TWICE * len(body)):
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
                if self._reserve(len(data)):
                    self._body.append(data)
                return
            whole = self._cutter.feed(data)
            events = [
                event for event in split_events(whole) if event != b"\n\n" and not event.startswith(b":")
            ]
        except EventTooLarge:
            self.leave()
            return
        for event in events:
            if begins_last(event):
                if not self._reserve(HELD_TWICE * len(event)):
                    return
                self._last = event
        if not self.is_forgotten:
            size = len(data) + _EVENT_OVERHEAD * len(events)
            self.size += size
            self._count(size)
        if not self.is_forgotten:  # by what counts them
            if self._adopted.is_foreign:
                self._adopt(events)
            else:
                self.events += events
            self.notify()

    def _reserve(self, size: int) -> bool:
        """Reserve memory for what waits for the storage; return whether there is any, else leave the run."""
        try:
            self.reserved.grow(size)
        except Unavailable as error:
            self.failure = error.message
            self.leave()
            return False
        return True

    async def response_of(self, body: bytes) -> tuple[msgspec.Raw | None, bool]:
        """Return the response as its client knows it, None if there is none; and whether it has ended. To be called
        once.

        Args:
            body: the whole answer; of a stream nothing, because its last event was kept.
        """
        if self._adopting is not None:
            await self._adopting
        end, self._last = self._last, b""  # the run may be kept for long, and does not count it
        if not self.is_streamed:
            end = self._adopted.renamed(body)
        found = await self._found(end) if end else FoundResponse()
        return (found.response_in(end) if found.end else None), found.is_ended

    async def _found(self, end: bytes) -> FoundResponse:
        fields = self._own_fields if self._adopted.is_foreign else {}
        return await self._find(end, self.is_streamed, fields)

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
        self._foreign.clear()
        self.notify()
        return size

    def notify(self) -> None:
        """Send the followers what they can read."""
        for follower in list(self.followers):
            follower.push()

    def _adopt(self, events: list[bytes]) -> None:
        """Keep events as this router's: engines of other makes are not asked to work in the background. Those behind
        one that has the response wait for it."""
        for event in events:
            if not self._foreign and self._adopting is None and not has_response(event):
                self.events.append(event)
            else:
                self._foreign.append(event)
        if self._foreign and self._adopting is None:
            self._adopting = asyncio.create_task(self._work(), name="events of another engine")

    async def _work(self) -> None:
        while self._foreign:
            event = self._foreign.popleft()
            if has_response(event):
                event = (await self._found(event)).own_event(event)
            if not self.is_forgotten:
                self.events.append(event)
                self.notify()
        self._adopting = None

    def _end(self, status: int, body: bytes) -> None:
        self._listener = None
        self._body = []
        if not self.answer.done():
            self.answer.set_result((status, body))


def split_events(whole: bytes) -> list[bytes]:
    """Split after blank lines, each of which becomes a line feed; one event is returned as it is."""
    events: list[bytes] = []
    begin = num_lines = 0
    end = whole.find(b"\n") if len(whole) >= WRITE_BYTES else -1
    while end >= 0 and num_lines < _FEW_LINES:
        num_lines += 1
        if whole.startswith(b"\n", end + 1) and not whole.startswith(b"\r", end - 1):
            events.append(whole[begin : end + 2])
            begin = end = end + 2
        elif (blank := _EVENT_END.match(whole, end)) is not None:
            events.append(whole[begin:end].removesuffix(b"\r") + b"\n\n")
            begin = end = blank.end()
        else:
            end += 1
        end = whole.find(b"\n", end)
    rest = whole[begin:]
    return events + [event.removesuffix(b"\r") + b"\n\n" for event in _EVENT_END.split(rest) if event]


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
