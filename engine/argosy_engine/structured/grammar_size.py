"""Size limits of regular expressions and EBNF grammars, measured with their repetitions written out.

The time in which XGrammar builds automata grows much faster than the text: `.{1,1000}` takes 18 s with a vocabulary of
100k tokens, and adjacent repetitions without an upper bound (`a*a*a*...`) multiply the states that each step follows.
The sizes are computed by a hand-written scanner in linear time; XGrammar rejects malformed text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import reduce
from itertools import chain
from typing import NamedTuple

from argosy_engine.errors import InvalidRequest
from argosy_engine.structured.pattern_syntax import check_syntax

MAX_PATTERN_CHARS = 4096
MAX_PATTERN_SIZE = 1000
"""Limit on the characters to match with repetitions written out. Such a pattern compiles in well under a second for
small vocabularies."""
MAX_REPETITION = 1000
"""Limit on the items that counted repetitions (`{m,n}`) add to a regular expression; bytes limit its literal text."""
MAX_UNBOUNDED = 64
"""Limit on repetitions without an upper bound (`*`, `+`, `{m,}`) in a pattern, written out. A pattern for a form of a
few dozen fields has one or two per field; with 200 side by side a single step takes 0.8 s."""
MAX_GRAMMAR_REPETITION = 4096
MAX_GRAMMAR_UNBOUNDED = 256
"""Limit for all rules of an EBNF grammar together; grammars of programming languages have up to a hundred."""

_CAP = 1 << 40
"""Counts saturate here, so that nested repetitions do not let the numbers grow without bound."""


class RepetitionSize(NamedTuple):
    """Size of an expression."""

    num_items: int
    """Items as written: characters and classes of a pattern, terminals and rule names of a grammar."""
    written_out: int
    """Items with every `{m,n}` written out; items under `*` and `+` count once."""
    unbounded: int
    """Repetitions without an upper bound, with every `{m,n}` written out."""


NO_REPETITION = RepetitionSize(0, 0, 0)
ONE_ITEM = RepetitionSize(1, 1, 0)


def sum_sizes(sizes: Iterable[RepetitionSize]) -> RepetitionSize:
    """Return the size of a sequence or of alternatives."""
    total = NO_REPETITION
    for size in sizes:
        total = RepetitionSize(*(min(a + b, _CAP) for a, b in zip(total, size, strict=True)))
    return total


def repeated(size: tuple[int, int, int], times: int, *, is_open: bool) -> RepetitionSize:
    """Return the size of an item repeated up to `times` times, or, if open, without an upper bound."""
    times = max(times, 1)
    num_items, written_out, unbounded = size
    return RepetitionSize(num_items, min(written_out * times, _CAP), min(unbounded * times + is_open, _CAP))


def check_pattern(pattern: object) -> None:
    """Check the `pattern` of a JSON schema.

    Raises:
        InvalidRequest: it is not a string, too long, too large with repetitions written out, or has syntax that would
            not be enforced.
    """
    if not isinstance(pattern, str):
        raise InvalidRequest("must be a string")
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(f"is longer than {MAX_PATTERN_CHARS} characters")
    size = pattern_size(pattern)
    if size.written_out > MAX_PATTERN_SIZE:
        raise InvalidRequest(
            f"is too large: its repetitions written out exceed {MAX_PATTERN_SIZE} characters"
        )
    _check(size, MAX_REPETITION, MAX_UNBOUNDED)
    check_syntax(pattern)


def check_regex(pattern: str) -> RepetitionSize:
    """Check a regular expression for an output or a part of it; return its size.

    Raises:
        InvalidRequest: it has too many repetitions, or syntax that would not be enforced.
    """
    size = pattern_size(pattern)
    _check(size, MAX_REPETITION, MAX_UNBOUNDED)
    check_syntax(pattern)
    return size


def check_grammar_size(size: RepetitionSize) -> None:
    """Check the size of an EBNF grammar.

    Raises:
        InvalidRequest: it has too many repetitions.
    """
    _check(size, MAX_GRAMMAR_REPETITION, MAX_GRAMMAR_UNBOUNDED)


def check_tag_size(size: RepetitionSize) -> None:
    """Check the size of all parts of a structural tag together. Raises as `check_grammar_size` does."""
    _check(size, MAX_GRAMMAR_REPETITION, MAX_GRAMMAR_UNBOUNDED)


def _check(size: RepetitionSize, max_repetition: int, max_unbounded: int) -> None:
    if size.written_out - size.num_items > max_repetition:
        raise InvalidRequest(
            f"is too large: its repetitions written out add more than {max_repetition} items"
        )
    if size.unbounded > max_unbounded:
        raise InvalidRequest(
            f"has more than {max_unbounded} repetitions without an upper bound ('*', '+', '{{m,}}'), "
            "counted repetitions written out: use fewer, or a single character class"
        )


def expanded_size(pattern: str) -> int:
    """Return the number of single-character matches with every `{m,n}` written out; `*` and `+` count once."""
    return pattern_size(pattern).written_out


def pattern_size(pattern: str) -> RepetitionSize:
    """Compute the size of a regular expression."""
    return _size(pattern, _read_pattern)


def grammar_size(text: str) -> RepetitionSize:
    """Compute the size of all rules of an EBNF grammar in the GBNF dialect."""
    return _size(text, _read_grammar)


def _size(text: str, read: Callable[[str, int], tuple[int, int]]) -> RepetitionSize:
    """Compute the size of an expression. Groups and repetitions look alike in both notations.

    Args:
        read: reads what else begins at an index; returns the index after it, and how many items it is.
    """
    count = _Count()
    index = 0
    while index < len(text):
        char = text[index]
        if char == "(":
            count.open_group()
            index += 1
        elif char == ")":
            count.close_group()
            index += 1
        elif char in "*+":
            count.repeat(1, True)
            index += 1
        elif char == "{" and (counted := _counts(text, index + 1)) is not None:
            times, is_open, index = counted
            count.repeat(times, is_open)
        else:
            index, num_items = read(text, index)
            if num_items:
                count.add_items(num_items)
    return count.size


_PLAIN = re.compile(r"[^(){*+?|^$\\\[]+")
"""Characters of a regular expression that stand for themselves."""
_CLASS = re.compile(r"\[\^*+(?:\\.?|[^\\])?(?:\\.?|[^\]\\])*+\]?", re.DOTALL)
"""A class; a bracket at its beginning is a member. The closing bracket may be missing."""
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*+["\n]?', re.DOTALL)
_NAME = re.compile(r"[\w.-]+")
_SPACE = re.compile(r"\s+")


def _read_pattern(pattern: str, index: int) -> tuple[int, int]:
    """Read characters, a class or an escape of a regular expression; `?`, `|`, `^` and `$` are no items."""
    if plain := _PLAIN.match(pattern, index):
        return plain.end(), plain.end() - index
    char = pattern[index]
    if char in "?|^$":
        return index + 1, 0
    return _end_of_item(pattern, index, char), 1


def _read_grammar(text: str, index: int) -> tuple[int, int]:
    """Read a string, a class or a name of a grammar; comments, spaces and operators are no items."""
    char = text[index]
    if space := _SPACE.match(text, index):
        return space.end(), 0
    if name := _NAME.match(text, index):
        return name.end(), 1
    if char == "#":
        end = text.find("\n", index)
        return len(text) if end < 0 else end, 0
    if char == '"':
        string = _STRING.match(text, index)
        assert string is not None
        return string.end(), 1
    if char == "[":
        return _end_of_item(text, index, char), 1
    return index + 1, 0


class _Count:
    """Counter for the scanner: the sizes of the open groups, and of the item that a repetition would now repeat.

    Sizes are plain tuples here, and saturate where they are multiplied: the scanner runs over 128 KB.
    """

    def __init__(self) -> None:
        self._group: tuple[int, int, int] = NO_REPETITION
        """Size of the innermost open group without its last item."""
        self._last: tuple[int, int, int] = NO_REPETITION
        self._outer: list[tuple[tuple[int, int, int], tuple[int, int, int]]] = []
        """`_group` and `_last` of the groups around it, outermost first."""

    def add_items(self, number: int) -> None:
        """Add so many items, of which the last one can be repeated."""
        self._put(ONE_ITEM)
        if number > 1:
            items, written_out, unbounded = self._group
            self._group = items + number - 1, written_out + number - 1, unbounded

    def open_group(self) -> None:
        self._outer.append((self._group, self._last))
        self._group = self._last = NO_REPETITION

    def close_group(self) -> None:
        if self._outer:
            group = _added(self._group, self._last)
            self._group, self._last = self._outer.pop()
            self._put(group)
        else:  # malformed
            self._put(ONE_ITEM)

    def repeat(self, times: int, is_open: bool) -> None:
        self._last = repeated(self._last, times, is_open=is_open)

    @property
    def size(self) -> RepetitionSize:
        total = reduce(_added, chain.from_iterable(self._outer), _added(self._group, self._last))
        return sum_sizes([RepetitionSize(*total)])

    def _put(self, item: tuple[int, int, int]) -> None:
        self._group, self._last = _added(self._group, self._last), item


def _added(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _counts(text: str, start: int) -> tuple[int, bool, int] | None:
    """Parse `m}`, `m,}` or `m,n}`; return the larger bound, whether there is no upper bound, and the index after it.

    Returns None if this is not a repetition.
    """
    end = text.find("}", start, start + 64)
    bounds = [part.strip() for part in text[start:end].split(",")] if end >= 0 else []
    if not 1 <= len(bounds) <= 2 or not all(
        part == "" or (part.isascii() and part.isdigit()) for part in bounds
    ):
        return None
    is_open = len(bounds) == 2 and bounds[1] == ""
    if max(map(len, bounds)) > 9:
        return 1 << 30, is_open, end + 1
    return max(int(part or 0) for part in bounds), is_open, end + 1


def _end_of_item(pattern: str, index: int, char: str) -> int:
    """Return the end of the escape, class or character at `index`, which begins with `char`."""
    if char == "\\":
        return index + 2
    if char != "[":
        return index + 1
    found = _CLASS.match(pattern, index)
    assert found is not None
    return found.end()
