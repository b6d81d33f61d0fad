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
