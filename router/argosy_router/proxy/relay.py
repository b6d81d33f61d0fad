"""A replica's answer on its way to the client: what may be sent on, and what is kept.

Owns: the bytes of one attempt's answer. Must not know: who sends them where, what follows a failure.
Invariant: a unary answer is passed on whole or not at all, up to a bound; of a stream only whole events are.
"""

from __future__ import annotations

from typing import Final

from argosy_router.http.errors import ConnectionLost, MalformedResponse, UpstreamError
from argosy_router.http.sse import EventCutter, EventTooLarge, without_comments
from argosy_router.proxy.migration import DONE, Transcript
from argosy_router.proxy.response_status import Refused
from argosy_router.proxy.usage import TokenUsage, UsageFinder, find_usage, num_events, without_usage

MAX_BUFFERED_BYTES: Final = 1024 * 1024
"""Unary answers up to this size reach the client whole or not at all; longer ones are streamed and cannot be retried
once they have begun."""
_ERROR: Final = b'data: {"error":'
"""No JSON string contains it, because quotes are escaped there."""
_UNAVAILABLE: Final = b'"type":"service_unavailable"'


class UnaryRelay:
    """A unary answer, held back so that its replica's death can be hidden."""

    failure: UpstreamError | None = None
    """Never: only the connection can fail."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._finder = UsageFinder()

    @property
    def usage(self) -> TokenUsage | None:
        """What the part that was passed on says of it."""
        return self._finder.usage

    def feed(self, data: bytes) -> bytes:
        """What is to be sent on now."""
        is_passing = self._size > MAX_BUFFERED_BYTES
        self._size += len(data)
        if is_passing:
            self._finder.feed(data)
            return data
        self._parts.append(data)
        return self._release() if self._size > MAX_BUFFERED_BYTES else b""

    def end(self) -> bytes:
        """The answer is complete: what is still to be sent on."""
        return self._release() if self._parts else b""

    def _release(self) -> bytes:
        held = b"".join(self._parts)
        self._parts = []
        self._finder.feed(held)
        return held


class StreamRelay:
    """Events of a stream, sent on as they are, and noted in a transcript if there is one.

    Comments before the first event are dropped: an engine sends them while it has nothing to say, and another may still
    answer instead. An engine that goes down says so by an event. If the stream can be resumed, that event and what
    follows are not the client's: they end the attempt. Neither is the usage, if the client did not ask for it.
    """

    def __init__(self, transcript: Transcript | None, *, hides_usage: bool = False) -> None:
        self._cutter = EventCutter()
        self._transcript = transcript
        self._hides_usage = hides_usage
        self._before = b""
        self._last = b""
        self._events = 0
        self.failure: UpstreamError | None = None

    @property
    def usage(self) -> TokenUsage | None:
        """What the end of the stream says of it: usage and `[DONE]` may come in two reads."""
        return find_usage(self._before + self._last)

    @property
    def num_tokens(self) -> int:
        """Generated tokens that the client was sent, as far as events tell: their ids, else one in each."""
        if self._transcript is None:
            return self._events
        self._transcript.read()
        return self._transcript.num_tokens

    def feed(self, data: bytes) -> bytes:
        """Whole events to be sent on now; with `failure` set, the last ones."""
        try:
            events = self._cutter.feed(data)
        except EventTooLarge:
            self.failure = MalformedResponse("an event is too large")
            return b""
        if not self._last:
            events = without_comments(events)
        if not events:
            return b""
        transcript = self._transcript
        if transcript is not None:
            if events.rfind(_ERROR) >= 0:  # half of the time that `in` takes
                events = self._before_failure(events)
            transcript.add(events)
        else:
            self._events += num_events(events)
        self._before, self._last = self._last, events
        return without_usage(events) if self._hides_usage else events

    def end(self) -> bytes:
        """The response is complete: what is still to be sent on, nothing if that is not the whole stream."""
        if self._transcript is not None and not self._last.endswith(DONE):
            self.failure = ConnectionLost("the stream ended without [DONE]")
            return b""
        return self._cutter.tail

    def _before_failure(self, events: bytes) -> bytes:
        start = events.index(_ERROR)
        end = events.index(b"\n\n", start)
        if _UNAVAILABLE not in events[start:end]:
            return events
        self.failure = Refused(503)
        return events[:start]
