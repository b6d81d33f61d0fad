"""Markers: texts to look for in an output that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


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
