"""Scanners: find marks, and the end of a tool call, in text that arrives in pieces.

Invariant: each character is looked at once, so that reading is linear in the output however it is cut, and what a
scanner keeps between pieces is bounded. A scanner does not decide whether the text is a call; it only ends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol


class Markers:
    """Texts of which the first is looked for. False if there are none."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.texts = tuple(sorted(set(markers), key=len, reverse=True))
        self._pattern = _pattern(self.texts)

    def __bool__(self) -> bool:
        return bool(self.texts)

    def search(self, text: str, position: int) -> re.Match[str] | None:
        """Return the first marker."""
        return self._pattern.search(text, position) if self.texts else None

    def overlap(self, text: str, position: int) -> int:
        """Return the length of the longest end of the text from `position` on with which a marker begins."""
        return max(_overlap(text[max(position, len(text) - len(marker)) :], marker) for marker in self.texts)


class DroppedMarks:
    """Drops marks from a text that arrives in pieces, with up to `max_newlines` newlines before and after each."""

    def __init__(self, marks: Iterable[str], max_newlines: int) -> None:
        self._marks = Markers(marks)
        self._max_newlines = max_newlines
        self._num_to_skip = 0
        """Newlines after a mark that still belong to it."""
        self._held = ""

    def feed(self, text: str, is_last: bool) -> str:
        """Return the text without marks, as far as it is certain; all of it with `is_last`."""
        text, self._held = self._held + text, ""
        kept: list[str] = []
        position = self._skipped(text, 0)
        while (found := self._marks.search(text, position)) is not None:
            before = text[position : found.start()]
            kept.append(before[: len(before) - self._num_newlines(before)])
            self._num_to_skip = self._max_newlines
            position = self._skipped(text, found.end())
        rest = text[position:]
        held = 0
        if not is_last:
            held = self._marks.overlap(rest, 0)
            held += self._num_newlines(rest[: len(rest) - held])
        kept.append(rest[: len(rest) - held])
        self._held = rest[len(rest) - held :]
        return "".join(kept)

    def _skipped(self, text: str, position: int) -> int:
        while self._num_to_skip and text.startswith("\n", position):
            position += 1
            self._num_to_skip -= 1
        if position < len(text):
            self._num_to_skip = 0
        return position

    def _num_newlines(self, text: str) -> int:
        return min(len(text) - len(text.rstrip("\n")), self._max_newlines)


@lru_cache(maxsize=256)
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of the texts. A server has a few sets of them, and looks for one in every answer."""
    return re.compile("|".join(map(re.escape, texts)))


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` with which `marker` begins."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


MAX_HEAD_CHARS = 256
"""Characters in which a call that has no end marker must begin to look like one, so that prose is not held back."""
NO_CALL = -2
"""What a scanner returns for a text that cannot be a call's. It is read again, because it may contain markers."""
_BRACKETS = {"'": re.compile(r"['\"\[\](){}]"), '"': re.compile(r"[\"\[\]{}]")}
_IN_STRING = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}


class Scanner(Protocol):
    """Finder of one call's end."""

    def feed(self, text: str, start: int) -> int:
        """Read `text` from `start` on; return the offset just after the call, -1 if more text is needed, or
        `NO_CALL`."""


class MarkerScanner:
    """Finds the end of a call that a marker closes."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._tail = ""

    def feed(self, text: str, start: int) -> int:
        size = len(self._marker)
        if self._tail:
            seam = self._tail + text[start : start + size - 1]
            if (found := seam.find(self._marker)) >= 0:
                return start + found + size - len(self._tail)
        if (found := text.find(self._marker, start)) >= 0:
            return found + size
        if size > 1:
            self._tail = (self._tail + text[max(start, len(text) - size + 1) :])[1 - size :]
        return -1


class EnclosingScanner:
    """Finds the end of a call that a marker closes, and whether the marker stands within a value.

    A marker within a value may belong to it. Then reading on from there finds the next one, or `NO_CALL`.

    Args:
        marker: ends the call.
        opening, closing: marks around values. By default those of JSON's strings.
    """

    def __init__(self, marker: str, opening: str = '"', closing: str = '"') -> None:
        parts = rf"(?P<marker>{re.escape(marker)})"
        self._outside = re.compile(rf"{parts}|(?P<opening>{re.escape(opening)})")
        parts += rf"|(?P<closing>{re.escape(closing)})"
        begun = [marker, opening, closing]
        if closing == '"':
            parts += r"|\\(?s:.)|(?P<broken>[\x00-\x1f])"
            begun.append("\\.")
        self._inside = re.compile(parts)
        self._begun = Markers(begun)
        self._tail = ""
        self._is_broken = False
        """Whether a value has a character that it cannot have, so that nothing tells where values end."""
        self._has_passed = False
        """Whether a marker within a value has been found."""
        self.is_inside = False
        """Whether what has been read ends within a value."""

    def feed(self, text: str, start: int) -> int:
        offset = 0
        if self._tail:
            offset = start - len(self._tail)
            text, start, self._tail = self._tail + text[start:], 0, ""
        position = start
        while found := (self._inside if self.is_inside else self._outside).search(text, position):
            position = found.end()
            match found.lastgroup:
                case "marker":
                    self._has_passed = self.is_inside
                    return position + offset
                case "opening":
                    self.is_inside = not self._is_broken
                case "closing":
                    self.is_inside = False
                case "broken" if self._has_passed:
                    return NO_CALL
                case "broken":
                    self.is_inside, self._is_broken = False, True
        if overlap := self._begun.overlap(text, position):
            self._tail = text[-overlap:]
        return -1


class ValueScanner:
    """Finds the end of a value in brackets, which may contain strings and further brackets.

    Args:
        quotes: `"` for JSON, `'` for Python's literals, whose strings have either quote.
    """

    def __init__(self, quotes: str = '"') -> None:
        self._outside = _BRACKETS[quotes]
        self._quote = ""
        self._depth = 0
        self._is_escaped = False

    def feed(self, text: str, start: int) -> int:
        position, size = start, len(text)
        while position < size:
            if self._is_escaped:
                self._is_escaped, position = False, position + 1
                continue
            pattern = _IN_STRING[self._quote] if self._quote else self._outside
            match = pattern.search(text, position)
            if match is None:
                return -1
            position, char = match.end(), match.group()
            if char == "\\":
                self._is_escaped = True
            elif char in "'\"":
                self._quote = "" if self._quote else char
            elif char in "[({":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return position
        return -1


class HeadScanner:
    """Tells at once if the first characters cannot be a call's, and leaves the rest to another scanner.

    Args:
        head: pattern of the characters after the marker that tell a call. The value begins with its group.
        allowed: pattern that matches every beginning of what `head` matches, up to its last character.
        value: reads the value.
    """

    def __init__(self, head: re.Pattern[str], allowed: re.Pattern[str], value: Scanner) -> None:
        self._head = head
        self._allowed = allowed
        self._value = value
        self._seen = ""
        self._is_open = False

    def feed(self, text: str, start: int) -> int:
        if self._is_open:
            return self._value.feed(text, start)
        before = len(self._seen)
        seen = self._seen + text[start : start + MAX_HEAD_CHARS - before]
        if (match := self._head.match(seen)) is not None:
            self._is_open = True
            begin = match.start(match.lastgroup or 0)
            if begin < before:
                self._value.feed(seen[:before], begin)
                begin = before
            return self._value.feed(text, start + begin - before)
        allowed = self._allowed.match(seen)
        end = 0 if allowed is None else allowed.end()
        if end < len(seen) or len(seen) >= MAX_HEAD_CHARS:
            return NO_CALL
        self._seen = seen
        return -1
