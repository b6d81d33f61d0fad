"""ControlTokens: keeps text of a chat from becoming control tokens of the chat template (CVE-2026-44222).

A tokenizer turns `<|im_end|>` into a control token wherever it occurs in the rendered prompt, so a user could end a
message and begin a system message. This is prevented in three steps:

- Replace: before rendering, one character of each marker in a value, or of a part that could form one together with the
  template's text, is replaced by a private character.
- Render: the template copies the private characters.
- Split and restore: the text is split inside each such marker and the characters are restored. The tokenizer gets the
  parts one by one, so it never sees the marker.

Chats without such text, which is nearly all of them, are rendered and tokenised directly.

Control tokens are the tokens that the tokenizer calls special, and others of the form `<|...|>`. Markers that models
write as text, like `<think>` or `<tool_call>`, are not changed. A value that is a plain name (letters, digits, `_`,
`-`) is trusted, because templates expect roles between `<|` and `|>`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from argosy_engine.frontend.render_pool import stop_if_abandoned
from argosy_protocol.prompt_segments import Segment

_PRIVATE = 0x10F000
"""First of the private characters that replace others while a template renders."""
_SLICE_CHARS = 1 << 16
"""Characters searched at a time, for which the search holds the GIL about a millisecond."""
_NAME = re.compile(r"[A-Za-z0-9_-]*")


class ControlTokens:
    """
    Args:
        markers: texts of the control tokens, each of at least two characters.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        markers = frozenset(markers)
        self._longest = max(map(len, markers), default=0)
        self._marker = re.compile(_overlapping(markers)) if markers else None
        self._heads = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self._tails = {marker[-size:] for marker in markers for size in range(1, len(marker))}
        self._markers = markers
        self._all = "\0".join(markers)
        characters = sorted({char for marker in markers for char in marker})
        self._private = {char: chr(_PRIVATE + number) for number, char in enumerate(characters)}
        self._public = {private: char for char, private in self._private.items()}
        self._any_private = re.compile("[" + "".join(self._private.values()) + "]") if markers else None
        telling = {char for char in characters if not _NAME.fullmatch(char)}
        telling |= {marker for marker in markers if _NAME.fullmatch(marker)}
        # A backslash may begin an escape in a tool call's JSON.
        self._telling = [text.encode() for text in (*telling, "\\")] if markers else []

    def concern(self, segments: Sequence[Segment]) -> bool:
        """Whether these values may contain a part of a marker. Fast, with false positives."""
        data = b"\0".join([data for _, data in segments])
        return any(text in data for text in self._telling)

    def hide(self, value: Any) -> Any:
        """Copy a JSON value such that no string contains or completes a marker."""
        if isinstance(value, str):
            return self._hide_in(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, rendered: str) -> tuple[str, list[int]]:
        """Restore the rendered text; return it with the offsets at which it must be split."""
        if self._any_private is None:
            return rendered, []
        hidden = [
            match.start()
            for begin in _slices(rendered)
            for match in self._any_private.finditer(rendered, begin, begin + _SLICE_CHARS)
        ]
        text = _with(rendered, hidden, self._public)
        cuts = []
        for start, end in self._find(text) if hidden else ():
            index = bisect_left(hidden, start)
            if index < len(hidden) and hidden[index] < end:
                cuts.append(max(hidden[index], start + 1))
        return text, sorted(set(cuts))

    def _find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of the longest marker at each position, including overlapping ones."""
        if self._marker is None:
            return
        for begin in _slices(text):
            limit = begin + _SLICE_CHARS
            for match in self._marker.finditer(text, begin, limit + self._longest):
                if match.start() >= limit:
                    break
                assert match.lastindex is not None
                yield match.start(), match.end(match.lastindex)

    def _is_within(self, text: str) -> bool:
        """Whether a marker contains the text. All of them together may, too, if it has the character between them."""
        return text in self._all and any(text in marker for marker in self._markers)

    def _hide_in(self, text: str) -> str:
        if not text or (_NAME.fullmatch(text) and text not in self._all):
            return text
        positions = {start for start, _ in self._find(text)}
        for size in range(1, min(self._longest, len(text) + 1)):
            if text[-size:] in self._heads:
                positions.add(len(text) - size)
            if text[:size] in self._tails:
                positions.add(size - 1)
        if (
            len(text) < self._longest
            and self._is_within(text)
            and (odd := re.search(r"[^A-Za-z0-9_-]", text))
        ):
            positions.add(odd.start())
        return _with(text, sorted(positions), self._private)


def _overlapping(markers: Iterable[str]) -> str:
    """Make a pattern that matches the first character of each marker, including overlapping ones.

    Its group ends at the end of the longest marker from there. The pattern is a trie, so text with which no marker
    begins fails at once, however many markers there are.
    """
    by_first: dict[str, list[str]] = {}
    for marker in sorted(markers):
        by_first.setdefault(marker[0], []).append(marker[1:])
    return "|".join(f"{re.escape(first)}(?=({_longest_of(rest)}))" for first, rest in by_first.items())


def _longest_of(texts: Sequence[str]) -> str:
    """Make a pattern for the longest of these texts that matches."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text)
    branches = []
    for group in by_first.values():
        size = _shared_prefix(min(group), max(group))  # and of all between them
        branches.append(re.escape(group[0][:size]) + _longest_of([text[size:] for text in group]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


def _slices(text: str) -> Iterator[int]:
    """Yield the starts of the slices of a text that are searched at a time."""
    for begin in range(0, len(text), _SLICE_CHARS):
        stop_if_abandoned()
        yield begin


def _shared_prefix(one: str, other: str) -> int:
    """Return the length of the prefix that two strings share."""
    for size, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return size
    return min(len(one), len(other))


def _with(text: str, positions: Sequence[int], others: Mapping[str, str]) -> str:
    """Replace the characters at ascending positions."""
    if not positions:
        return text
    pieces: list[str] = []
    done = 0
    for position in positions:
        pieces += (text[done:position], others[text[position]])
        done = position + 1
    return "".join((*pieces, text[done:]))
