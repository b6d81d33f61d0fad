"""Event boundaries of a server-sent event stream.

Owns: splitting bytes after the last whole event. Must not know: what events contain; it never decodes or re-encodes,
except for one comment, which is not for clients.
Invariant: what `feed` has returned so far, plus `tail`, is exactly what was fed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from argosy_protocol.headers import ID_COMMENT

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""A chunk with 20 logprobs for 128 choices takes less than a tenth of it, and Argosy engines split larger ones."""
MAX_RESPONSE_EVENT_BYTES = 64 * 1024 * 1024
"""The last events of a stream of the Responses API repeat all text and logprobs: with 20 of these, 1.5 KB per token. As
much as `responses` stores."""
READ_BYTES = 256 * 1024
"""What a connection gives at once, at most."""
SMALL_BYTES = 1024
"""Smaller pieces are held together: one of two bytes alone would take thirty times as much."""


class EventTooLarge(Exception):
    """An unfinished event exceeds the bound, and buffering it further is not safe."""


class Pieces:
    """Bytes that come in pieces and are joined once, in little more memory than they have, however small they are."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._small = bytearray()
        """What came behind the parts, in small pieces."""
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        if len(data) < SMALL_BYTES:
            self._small += data
            return
        if self._small:
            self._parts.append(bytes(self._small))
            self._small.clear()
        self._parts.append(data)

    def joined(self, rest: bytes = b"") -> bytes:
        """Return all pieces, followed by `rest`; one that is alone is not copied."""
        parts: list[bytes | bytearray] = [*self._parts]
        if self._small:
            parts.append(self._small)
        if rest:
            parts.append(rest)
        return b"".join(parts)

    def clear(self) -> None:
        self._parts = []
        self._small = bytearray()
        self.size = 0


class EventCutter:
    """Splits a byte stream into whole events and an unfinished tail, scanning each byte once."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        """`max_bytes`: size of the largest unfinished event."""
        self._max_bytes = max_bytes
        self._tail = Pieces()
        self._edge = b""
        """The tail's last bytes, because a blank line may be split between two reads."""

    @property
    def tail(self) -> bytes:
        """The unfinished event."""
        return self._tail.joined()

    @property
    def size(self) -> int:
        """Bytes of the unfinished event."""
        return self._tail.size

    def feed(self, data: bytes) -> bytes:
        """Add bytes; return the whole events now available, unchanged.

        Raises:
            EventTooLarge: the unfinished event has grown too long.
        """
        tail = self._tail
        if not tail.size and data.endswith(b"\n\n"):  # true of nearly every read from nearly every engine
            return data
        edge = self._edge
        probe = edge + data
        end = _after_last_event(probe) - len(edge)
        if end <= 0:
            tail.add(data)
            self._edge = probe[-_EDGE_BYTES:]
            events = b""
        else:
            events = tail.joined(data[:end])
            rest = data[end:]
            tail.clear()
            tail.add(rest)
            self._edge = rest[-_EDGE_BYTES:]
        if tail.size > self._max_bytes:
            raise EventTooLarge
        return events


def edges(events: bytes) -> bytes:
    """Return the beginning and the end of a long piece of a stream, other pieces as they are.

    A piece that is longer than two reads begins with one event, which was not complete before the last of them; what is
    looked for in the middle of that takes the event loop tens of milliseconds.
    """
    if len(events) <= 2 * READ_BYTES:
        return events
    return events[:READ_BYTES] + events[-READ_BYTES:]


def response_events(*names: bytes) -> re.Pattern[bytes]:
    """Return the pattern of the line that names an event of the Responses API, for `named_events` and `named_data`. It
    begins with a text, for which the search takes a sixth of the time that one for the beginnings of lines takes."""
    return re.compile(rb"event: ?response\.(?:%b)\r?(?=\n|\Z)" % b"|".join(names))


def named_events(events: bytes, name: re.Pattern[bytes]) -> Iterator[int]:
    """Yield where lines begin that name an event so."""
    for found in name.finditer(events):
        if not found.start() or events.startswith(b"\n", found.start() - 1):
            yield found.start()


def named_data(events: bytes, name: re.Pattern[bytes]) -> tuple[int, int] | None:
    """Return where the data of the first event of such a name begins and ends; None if there is no such event, or no
    data behind its name."""
    for start in named_events(events, name):
        line_end = events.find(b"\n", start)
        data = None if line_end < 0 else _DATA.match(events, line_end)
        if data is None:
            continue
        begin, end = data.end(), events.find(b"\n", data.end())
        if end < 0:
            end = len(events)
        if end > begin and events.startswith(b"\r", end - 1):
            end -= 1
        return begin, end
    return None


def without_comments(events: bytes) -> bytes:
    """Drop leading comments and blank lines from whole events, up to a comment of token ids."""
    leading = _COMMENTS.match(events)
    return events if leading is None else events[leading.end() :]


def without_token_ids(events: bytes) -> bytes:
    """Drop the comments of token ids from whole events, and the events that are such a comment alone."""
    if events.find(ID_COMMENT) < 0:  # a tenth of the pattern's time
        return events
    return _TOKEN_IDS.sub(b"", events, count=_MAX_ID_COMMENTS)


_MAX_ID_COMMENTS: Final = 16_384
"""More than a read of events has tokens; each costs a step of the search."""
_TOKEN_IDS: Final = re.compile(rb"^%b[^\n]*\n\n?" % ID_COMMENT, re.MULTILINE)
_COMMENTS: Final = re.compile(rb"(?:(?!%b)(?::[^\r\n]*+)?+(?:\r\n|\n|\r))*+" % ID_COMMENT)
"""One search for all of them: who sends a million empty ones has them looked at once."""
_DATA: Final = re.compile(rb"\ndata: ?")
_EDGE_BYTES = 2
"""One less than the longest separator, which is three bytes."""


def _after_last_event(data: bytes) -> int:
    """Offset right after the last blank line, or 0. Lines end in LF, CRLF or CR."""
    end = 0
    for blank in (b"\n\n", b"\n\r\n", b"\r\r"):
        found = data.rfind(blank)
        if found >= 0:
            end = max(end, found + len(blank))
    return end
