"""Stream tally: how many tokens a stream has shown whose events carry no token ids.

Owns: the count by usage that events report, else by text. Must not know: why the stream has no ids, who pays.
Invariants: the count never rests on the number of events alone, because an event may show thousands of tokens. A stream
costs a reference per read until `SCAN_BYTES` have come together; most end before, with their usage, and are never
scanned. Of an event that is longer than some reads only both ends are scanned, and stand for the whole.

Engines of other makes count the tokens of each choice by itself in what an event reports.
"""

from __future__ import annotations

import re
from typing import Final

from argosy_router.http.sse import READ_BYTES
from argosy_router.proxy.upstream.usage_scan import event_usage, num_events

SCAN_BYTES: Final = 32 * 1024
"""Some 120 events. 5,000 open streams hold 160 MB at most."""
MAX_CHOICES: Final = 1024
"""Choices whose usage is kept apart; more than a request may have."""

_STRING: Final = rb'"\s*+:\s*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
_TEXT: Final = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|thinking|refusal|arguments|partial_json)' + _STRING,
    re.DOTALL,
)
"""Quotes inside strings are escaped, so an unescaped key is one. Objects, such as `delta`, and lists are no text."""
_RESPONSE_TEXT: Final = re.compile(rb'"delta' + _STRING, re.DOTALL)
"""Other texts of a stream of the Responses API repeat these."""
_ESCAPED_CHARACTER_BYTES: Final = 6
_CHARACTER_BYTES: Final = 3
"""UTF-8 of the scripts that some engines escape (`\\u4e2d`)."""


class StreamTally:
    """What one stream has shown so far."""

    __slots__ = (
        "_events",
        "_opening",
        "_repeats",
        "_reported",
        "_text",
        "_text_bytes",
        "_unread",
        "_unread_bytes",
    )

    def __init__(self, *, is_response: bool = False) -> None:
        """`is_response`: the stream is one of the Responses API."""
        self._text = _RESPONSE_TEXT if is_response else _TEXT
        self._repeats = is_response
        """Whether long events repeat what others have told."""
        self._opening = b'"delta":"' if is_response else b'"content":"'
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._events = 0
        self._text_bytes = 0
        self._reported: dict[int, int] = {}
        """Completion tokens that events reported, by choice."""

    def add(self, events: bytes) -> None:
        """Add whole events."""
        if len(events) > 2 * READ_BYTES:
            self._add_long(events)
            return
        self._unread.append(events)
        self._unread_bytes += len(events)
        if self._unread_bytes > SCAN_BYTES:
            self._read()

    def _add_long(self, events: bytes) -> None:
        """Add events of which the first is longer than some reads."""
        self._read()
        before, between = self._text_bytes, len(events) - SCAN_BYTES - READ_BYTES
        front, back = events[:SCAN_BYTES].rstrip(b"\\") + b'"', events[-READ_BYTES:]
        self._scan(front)
        shown = self._text_bytes - before
        if any(text.end() == len(front) for text in self._text.finditer(front)):  # that goes on behind it
            self._text_bytes += between
            back = self._opening + back
        elif shown > 0 and not self._repeats:
            self._text_bytes += shown * between // SCAN_BYTES
        self._scan(back)

    def tokens(self, bytes_per_token: float) -> int:
        """Return the tokens of all choices that were shown: those that events report, and for what came after the last
        report (all, if there is none) its text by this ratio, but a token for each event at least."""
        self._read()
        return sum(self._reported.values()) + max(int(self._text_bytes / bytes_per_token), self._events)

    def _read(self) -> None:
        events = b"".join(self._unread)
        self._unread = []
        self._unread_bytes = 0
        self._scan(events)

    def _scan(self, events: bytes) -> None:
        """Count what events show."""
        reported_until = 0
        for choice, tokens, end in event_usage(events):
            reported_until = end
            if choice in self._reported or len(self._reported) < MAX_CHOICES:
                self._reported[choice] = max(tokens, self._reported.get(choice, 0))
        if reported_until:
            self._events = self._text_bytes = 0
            events = events[reported_until:]
        self._events += num_events(events)
        for text in self._text.findall(events):
            escaped = text.count(b"\\u") if b"\\" in text else 0
            self._text_bytes += len(text) - (_ESCAPED_CHARACTER_BYTES - _CHARACTER_BYTES) * escaped
