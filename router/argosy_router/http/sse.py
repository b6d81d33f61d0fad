"""Event boundaries of a server-sent event stream.

Owns: cutting bytes after the last whole event. Must not know: what events contain; it never decodes or re-encodes.
Invariant: what `feed` returned so far, plus `tail`, is exactly what was fed.
"""

from __future__ import annotations

import re
from typing import Final

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""A chunk with 20 logprobs for 128 choices stays below a tenth of it."""


class EventTooLarge(Exception):
    """An event exceeds `MAX_EVENT_BYTES`: not a stream we can hold back safely."""


class EventCutter:
    """Splits a byte stream into whole events and an unfinished tail. Each byte is looked at once."""

    __slots__ = ("_edge", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._edge = b""
        """The tail's last bytes: a blank line may straddle two reads."""

    @property
    def tail(self) -> bytes:
        """The unfinished event."""
        return b"".join(self._parts)

    def feed(self, data: bytes) -> bytes:
        """The whole events now available, untouched.

        Raises:
            EventTooLarge: the unfinished event has grown too long.
        """
        if not self._parts and data.endswith(b"\n\n"):  # nearly every read of nearly every engine
            return data
        edge = self._edge
        probe = edge + data
        end = _after_last_event(probe) - len(edge)
        if end <= 0:
            self._parts.append(data)
            self._size += len(data)
            self._edge = probe[-_EDGE_BYTES:]
            events = b""
        else:
            events = b"".join((*self._parts, data[:end]))
            rest = data[end:]
            self._parts = [rest] if rest else []
            self._size = len(rest)
            self._edge = rest[-_EDGE_BYTES:]
        if self._size > MAX_EVENT_BYTES:
            raise EventTooLarge
        return events


def without_comments(events: bytes) -> bytes:
    """Whole events, less those at the beginning that are nothing but comments and blank lines."""
    while events.startswith((b":", b"\n", b"\r")):
        line_end = _LINE_END.search(events)
        if line_end is None:
            break
        events = events[line_end.end() :]
    return events


_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_EDGE_BYTES = 2
"""The longest blank line is three bytes."""


def _after_last_event(data: bytes) -> int:
    """Offset just after the last blank line, or 0. Lines end in LF, CRLF or CR."""
    end = 0
    for blank in (b"\n\n", b"\n\r\n", b"\r\r"):
        found = data.rfind(blank)
        if found >= 0:
            end = max(end, found + len(blank))
    return end
