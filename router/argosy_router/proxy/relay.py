"""A replica's response on its way to the client: what its status means, what is forwarded, and what is held back.

Owns: which statuses stand for a refusal, an error or an answer, and the bytes of one attempt's response.
Must not know: connections, the client, other attempts, what follows a failure.
Invariant: a unary response is forwarded whole or not at all, up to a bound; of a stream only whole events are.
"""

from __future__ import annotations

import re
from typing import Final

from argosy_protocol.errors import ResourceUnavailable, Unavailable
from argosy_protocol.headers import RESOURCE_BUSY
from argosy_router.http.limits import BodyReservation
from argosy_router.http.sse import (
    MAX_EVENT_BYTES,
    MAX_RESPONSE_EVENT_BYTES,
    EventCutter,
    EventTooLarge,
    Pieces,
    edges,
    without_comments,
    without_token_ids,
)
from argosy_router.http.upstream import ConnectionLost, UpstreamError
from argosy_router.proxy.answer_tokens import (
    StreamTally,
    TokenUsage,
    Transcript,
    UsageFinder,
    find_usage,
    is_final,
    message_delta_usage,
    message_start_usage,
    response_end_usage,
    without_progress,
    without_usage,
)

CONSECUTIVE_ERRORS = 5
"""Responses of 500 in a row, to requests that other replicas could answer, before ejection; Envoy's default."""
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
"""OpenAI's SDKs ignore a longer hint."""

_BUSY = frozenset((429, 503))
_KEY_REFUSED = frozenset((401, 403))
_GATEWAY = frozenset((502, 504))
_RETRYABLE = _BUSY | _KEY_REFUSED | _GATEWAY
_RESOURCE_BUSY_HEADER = re.compile(rb"^%b:" % RESOURCE_BUSY.encode(), re.IGNORECASE | re.MULTILINE)
_RETRY_AFTER = re.compile(rb"^retry-after:\s*(\d{1,9})\s*$", re.IGNORECASE | re.MULTILINE)


class Refused(UpstreamError):
    """The replica responded, but another one should answer the request."""

    reason = "refused"

    def __init__(self, status: int, head: bytes = b"", *, is_resource_busy: bool = False) -> None:
        """
        Args:
            head: the response's header lines.
            is_resource_busy: an event said what the header `RESOURCE_BUSY` says.
        """
        super().__init__(f"status {status}")
        self.status = status
        self._head = head
        self.is_resource_busy = is_resource_busy or _RESOURCE_BUSY_HEADER.search(head) is not None
        """Whether the replica is full for requests like this one only."""

    @property
    def is_busy(self) -> bool:
        """Whether the replica says that it is full, perhaps only for requests like this one, or shutting down."""
        return self.status in _BUSY

    @property
    def is_ambiguous(self) -> bool:
        """Whether the request may be at fault as well as the replica."""
        return self.status in _GATEWAY or is_error(self.status)

    @property
    def retry_after_s(self) -> float:
        """When the replica wants to be asked again, within what clients heed."""
        hint = _RETRY_AFTER.search(self._head)
        if hint is None:
            return DEFAULT_RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(DEFAULT_RETRY_AFTER_S, float(hint[1])))


class EngineError(Refused):
    """The replica responded with an error of its own, which the client gets if no other replica does better."""

    reason = "status"

    def __init__(self, status: int, head: bytes, body: bytes) -> None:
        super().__init__(status, head)
        self.head = head
        self.body = body


class OversizedEvent(Refused):
    """The replica sent an event of a stream that is too large to hold. It counts as a bad gateway: the request may be
    the cause."""

    reason = "malformed"

    def __init__(self) -> None:
        super().__init__(502)

    def __str__(self) -> str:
        return "an event is too large"


def refusal(status: int, head: bytes = b"") -> Refused | None:
    """Return the refusal that a response with this status stands for; None if it is the client's answer."""
    return Refused(status, head) if status in _RETRYABLE else None


def is_error(status: int) -> bool:
    """Whether the response is an error of the engine's own."""
    return status == 500 or status > 504


def is_key_refused(error: UpstreamError) -> bool:
    """Whether the replica did not know the router's key, and may know another one of its service."""
    return isinstance(error, Refused) and error.status == 401


def is_fault(status: int) -> bool:
    """Whether the response counts against the replica, unless it turns out to be the request's fault."""
    return is_error(status) or status in _KEY_REFUSED or status in _GATEWAY


MAX_BUFFERED_BYTES: Final = 1024 * 1024
"""Unary answers up to this size reach the client whole or not at all; longer ones are streamed and cannot be retried
once they have begun, and so are those for which there is no memory."""
MAX_HELD_BYTES: Final = 512 * 1024 * 1024
"""Unfinished events of all streams and what is held of unary answers, together, of which a service may have three times
as much as is free."""
_UNCOUNTED_BYTES: Final = 64 * 1024
"""Of each answer: nearly no event is larger."""
_SEEN: Final = b"\n"
_LAST_BYTES: Final = 64 * 1024
"""Of the events of a read, kept until the next two have come: the usage is in the last ones. An event may have
megabytes, and a stream goes on for as long as its replica says so."""
_RESOURCE_BUSY_CODE: Final = b'code":"%b"' % str(ResourceUnavailable.default_code).encode()
"""End of a field's name, `code` or `error_code`, and its value."""


class UnaryRelay:
    """Holds a unary response back until it is complete; until then another replica can take over. One that is large, or
    for which there is no memory, is forwarded as it comes."""

    failure: UpstreamError | None = None
    """Always None: only the connection can fail."""

    def __init__(self, held: BodyReservation) -> None:
        """`held` is what is reserved for what is held back; released by the caller when the attempt is over."""
        self._held = held
        self._pieces = Pieces()
        self._is_passing = False
        self._finder = UsageFinder()

    @property
    def usage(self) -> TokenUsage | None:
        """The usage that the forwarded part reports."""
        return self._finder.usage

    def feed(self, data: bytes) -> bytes:
        """Take in data, and return what to forward now."""
        if self._is_passing:
            self._finder.feed(data)
            return data
        self._pieces.add(data)
        if self._pieces.size <= MAX_BUFFERED_BYTES and _reserve(self._held, self._pieces.size):
            return b""
        self._is_passing = True
        return self._release()

    def end(self) -> bytes:
        """Note that the response is complete, and return what is left to forward."""
        return self._release() if self._pieces.size else b""

    def _release(self) -> bytes:
        held = self._pieces.joined()
        self._pieces.clear()
        self._held.release()
        self._finder.feed(held)
        return held


class StreamRelay:
    """Forwards the events of a stream unchanged, and adds them to a transcript if there is one.

    Comments before the first event are dropped, because another engine may still answer instead of the one that sent
    them. An engine that shuts down announces it by an event: if the stream can be continued, that event and later ones
    end the attempt and are not forwarded. Comments of token ids are not forwarded either, nor is usage to a client that
    did not ask for it, nor the usage that each event reports to one that did not ask for that.
    """

    def __init__(
        self,
        transcript: Transcript | None,
        held: BodyReservation,
        *,
        hides_usage: bool = False,
        hides_progress: bool = False,
        is_response: bool = False,
    ) -> None:
        """
        Args:
            held: what is reserved for the unfinished event; released by the caller when the attempt is over.
            is_response: the stream is one of the Responses API.
        """
        self._held = held
        self._cutter = EventCutter(MAX_RESPONSE_EVENT_BYTES if is_response else MAX_EVENT_BYTES)
        self._is_response = is_response
        self._transcript = transcript
        self._tally = StreamTally(is_response=is_response) if transcript is None else None
        self._hides_usage = hides_usage
        self._hides_progress = hides_progress
        self._before = b""
        self._last = b""
        """The ends of the events of the last two reads; of a response, none but whether there were any."""
        self._response_usage: TokenUsage | None = None
        self._begun: TokenUsage | None = None
        """The usage in `message_start`; None of streams that are not Anthropic's."""
        self.failure: UpstreamError | None = None

    @property
    def usage(self) -> TokenUsage | None:
        """The usage that the last events report: usage and `[DONE]` may come in two reads."""
        if self._is_response:
            return self._response_usage
        end = self._before + self._last
        return find_usage(end) if self._begun is None else message_delta_usage(end, self._begun)

    @property
    def has_whole_usage(self) -> bool:
        """Whether `usage`, if there is one, is that of the whole answer."""
        return self._is_response or self._begun is not None or is_final(self._before + self._last)

    @property
    def has_token_ids(self) -> bool:
        """Whether the events have told the ids of all tokens in them."""
        return self._transcript is not None and self._transcript.has_all_ids

    def tokens(self, bytes_per_token: float) -> int:
        """Return the tokens that the client was sent: by the ids in the events, else as `StreamTally.tokens` does."""
        counted = self._transcript if self._tally is None else self._tally
        assert counted is not None
        return counted.tokens(bytes_per_token)

    def feed(self, data: bytes) -> bytes:
        """Take in data, and return the whole events to forward now; the last ones if `failure` is set then."""
        try:
            events = self._cutter.feed(data)
        except EventTooLarge:
            self.failure = OversizedEvent()
            return b""
        if not _reserve(self._held, self._cutter.size):
            self.failure = Refused(503, is_resource_busy=True)
            return b""
        if not self._last:
            events = without_comments(events)
            self._begun = message_start_usage(events)
        if not events:
            return b""
        transcript = self._transcript
        if transcript is not None:
            if events.rfind(transcript.error_mark) >= 0:  # half of the time that `in` takes
                events = self._before_failure(transcript, events)
            transcript.add(events)
        elif self._tally is not None:
            self._tally.add(events)
        if self._is_response:
            self._response_usage = response_end_usage(edges(events)) or self._response_usage
            self._last = _SEEN
        else:
            self._before, self._last = self._last, events[-_LAST_BYTES:]
        if transcript is not None:
            events = without_token_ids(events)
        if self._hides_progress:
            events = without_progress(events)
        return without_usage(events) if self._hides_usage else events

    def end(self) -> bytes:
        """Note that the response is complete, and return what is left to forward; nothing if the stream was cut."""
        if self._transcript is not None and not self._transcript.is_end(self._last):
            self.failure = ConnectionLost("the stream ended without its last event")
            return b""
        return self._cutter.tail

    def _before_failure(self, transcript: Transcript, events: bytes) -> bytes:
        start = events.index(transcript.error_mark)
        end = events.find(b"\n\n", start)
        end = len(events) if end < 0 else end  # its last line may end in another way
        if transcript.unavailable_mark not in events[start:end]:
            return events
        self.failure = Refused(503, is_resource_busy=_RESOURCE_BUSY_CODE in events[start:end])
        return events[:start]


def _reserve(held: BodyReservation, size: int) -> bool:
    """Have so much reserved for what is held back; return whether there is enough."""
    if held.size > size:
        held.release()
    if size <= _UNCOUNTED_BYTES or size == held.size:
        return True
    try:
        held.grow(size - held.size)
    except Unavailable:
        return False
    return True
