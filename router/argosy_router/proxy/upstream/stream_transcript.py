"""Stream transcript: what the client has of a stream, from which another replica can continue it.

Owns: the token ids that a stream's events carry, and the request that continues after them.
Must not know: connections, replicas, retries.
Invariants: only whole events count, and only those that the client was sent. An engine's output is a function of the
ids before it, so what was sent and what a continuation adds are together the stream of an undisturbed run. A stream
costs a reference per read until `READ_BYTES` have come together; then they are parsed, and four bytes per token stay.
A stream without ids, such as a foreign replica's, cannot be continued; nor can those that `request.stream_shape` names,
nor one of whose echoed prompt the client has only a part.
"""

from __future__ import annotations

from array import array
from typing import ClassVar

import msgspec

from argosy_protocol.headers import ID_COMMENT
from argosy_protocol.openai import Resume, ResumedChoice
from argosy_router.proxy.request.stream_shape import StreamShape
from argosy_router.proxy.upstream.stream_event import decode_chunk
from argosy_router.proxy.upstream.stream_tally import StreamTally

READ_BYTES = 32 * 1024
"""Some 120 events: most streams end before, and are never parsed. 5,000 open ones hold 160 MB at most."""
MAX_TOKENS = 1 << 20
"""Of all choices. A longer stream is not continued: 4 MB of memory, 7 MB of request."""
MAX_EVENTS = 8192
"""Parsed at once, which takes some 30 ms: a read has a third of them if they are as short as an engine's are."""
MAX_PARSED_BYTES = 1 << 20
"""Of an event beside its comment. Our engines split longer ones; one that is full of short values takes 40 ms."""
DONE = b"data: [DONE]\n\n"
_DATA = b"data: "
_decode_ids = msgspec.json.Decoder(list[int]).decode


class Transcript:
    """The part of one stream that the client was sent."""

    error_mark: ClassVar[bytes] = b'data: {"error":'
    """Beginning of an error event. No JSON string contains it, because quotes are escaped there."""
    unavailable_mark: ClassVar[bytes] = b'"type":"service_unavailable"'
    """What the error event of an engine that shuts down contains."""

    __slots__ = (
        "_created",
        "_finished",
        "_half_echoed",
        "_has_usage",
        "_is_done",
        "_is_readable",
        "_shape",
        "_tally",
        "_token_ids",
        "_unread",
        "_unread_bytes",
        "num_tokens",
    )

    def __init__(self, shape: StreamShape) -> None:
        self._shape = shape
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._is_readable = True
        self._is_done = False
        self._created = 0
        self._has_usage = False
        self._token_ids = [array("i") for _ in range(shape.choices)]
        self._finished = [False] * shape.choices
        self._half_echoed: set[int] = set()
        """Choices that have begun to echo the prompt."""
        self._tally: StreamTally | None = None
        """Counts the events from the first on that could not be parsed."""
        self.num_tokens = 0
        """Token ids of all choices, as far as they were parsed."""

    def is_end(self, events: bytes) -> bool:
        """Whether a stream whose last events are `events` has its end."""
        return events.endswith(DONE)

    def add(self, events: bytes) -> None:
        """Add whole events that the client is sent."""
        self._unread.append(events)
        self._unread_bytes += len(events)
        if self._unread_bytes > READ_BYTES:
            self.read()

    def read(self) -> bool:
        """Parse what was added; return whether the stream can be continued."""
        events = b"".join(self._unread)
        self._unread = []
        self._unread_bytes = 0
        before = self.num_tokens
        self._is_readable = self._is_readable and events.count(b"\n\n") <= MAX_EVENTS
        if self._is_readable and self._read_events(events):
            self._is_readable = self.num_tokens <= MAX_TOKENS
        else:
            self._is_readable = False
            self.num_tokens = before
            self._tally = self._tally or StreamTally()
            self._tally.add(events)
        return self._is_readable and not self._half_echoed

    @property
    def has_all_ids(self) -> bool:
        """Whether all events had their token ids, as far as they were parsed."""
        return self._tally is None

    def tokens(self, bytes_per_token: float) -> int:
        """Return the tokens of all choices, by their ids as far as the events have some that can be parsed; the others
        as `StreamTally.tokens` does."""
        self.read()
        return self.num_tokens + (0 if self._tally is None else self._tally.tokens(bytes_per_token))

    def _read_events(self, events: bytes) -> bool:
        """Return whether all events could be parsed."""
        start = 0
        try:
            while (end := events.find(b"\n\n", start)) >= 0:
                self._read_event(events[start:end])
                start = end + 2
        except (msgspec.DecodeError, LookupError, OverflowError, RecursionError, ValueError):
            return False
        return start == len(events)

    def _read_event(self, event: bytes) -> None:
        has_comment = event.startswith(ID_COMMENT)
        if has_comment:
            comment, _, event = event.partition(b"\n")
            self._read_comment(comment)
        if not event or (event.startswith(b":") and b"\n" not in event):
            return  # a comment, and nothing else
        data = event.removeprefix(_DATA)
        if data == b"[DONE]":
            self._is_done = True
            return
        if len(data) > MAX_PARSED_BYTES:
            raise LookupError("a long event")
        chunk = decode_chunk(data)
        self._created = self._created or chunk.created
        self._has_usage = self._has_usage or (chunk.usage is not None and not chunk.choices)
        for choice in chunk.choices:
            if choice.token_ids is not None:
                self._add_tokens(choice.index, choice.token_ids)
            elif not has_comment or choice.index < 0:
                raise LookupError
            self._finished[choice.index] |= choice.finish_reason is not None
            if self._shape.has_echo:
                if self._token_ids[choice.index] or self._finished[choice.index]:
                    self._half_echoed.discard(choice.index)
                else:
                    self._half_echoed.add(choice.index)

    def _read_comment(self, comment: bytes) -> None:
        index, _, token_ids = comment.removeprefix(ID_COMMENT).partition(b" ")
        if token_ids.count(b",") >= MAX_TOKENS:
            raise LookupError("more ids than a stream that is continued may have")
        if token_ids:
            self._add_tokens(int(index), _decode_ids(b"[%b]" % token_ids))

    def _add_tokens(self, index: int, token_ids: list[int]) -> None:
        if index < 0:
            raise LookupError
        self._token_ids[index].extend(token_ids)
        self.num_tokens += len(token_ids)

    # The rest is valid only after `read` has returned True.

    @property
    def missing_end(self) -> bytes | None:
        """The end that completes the stream, empty if it is complete; None if an engine must continue it."""
        if self._is_done:
            return b""
        is_complete = all(self._finished) and (self._has_usage or not self._shape.has_usage)
        return DONE if is_complete else None

    def continuing(self, body: bytes) -> bytes:
        """Return the JSON object `body` with the field that has an engine continue the stream."""
        resume = Resume(
            created=self._created,
            choices=[
                ResumedChoice(token_ids=list(token_ids), finished=finished)
                for token_ids, finished in zip(self._token_ids, self._finished, strict=True)
            ],
        )
        return b'%b,"resume":%b}' % (body[: body.rindex(b"}")], msgspec.json.encode(resume))
