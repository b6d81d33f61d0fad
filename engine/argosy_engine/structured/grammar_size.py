"""Size limits of regular expressions and EBNF grammars, measured with their repetitions written out.

The time in which XGrammar builds automata grows much faster than the text: `.{1,1000}` takes 18 s with a vocabulary of
100k tokens, and adjacent repetitions without an upper bound (`a*a*a*...`) multiply the states that each step follows.
The sizes are computed by a hand-written scanner in linear time; XGrammar rejects malformed text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from argosy_engine.errors import InvalidRequest

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


def repeated(size: RepetitionSize, times: int, *, is_open: bool) -> RepetitionSize:
    """Return the size of an item repeated up to `times` times, or, if open, without an upper bound."""
    times = max(times, 1)
    return RepetitionSize(
        size.num_items,
        min(size.written_out * times, _CAP),
        min(size.unbounded * times + is_open, _CAP),
    )


def check_pattern(pattern: object) -> None:
    """Check the `pattern` of a JSON schema.

    Raises:
        InvalidRequest: it is not a string, too long, or too large with repetitions written out.
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


def check_regex_size(size: RepetitionSize) -> None:
    """Check the size of a regular expression for an output or a part of it.

    Raises:
        InvalidRequest: it has too many repetitions.
    """
    _check(size, MAX_REPETITION, MAX_UNBOUNDED)


def check_grammar_size(size: RepetitionSize) -> None:
    """Check the size of an EBNF grammar. Raises as `check_regex_size` does."""
    _check(size, MAX_GRAMMAR_REPETITION, MAX_GRAMMAR_UNBOUNDED)


def check_tag_size(size: RepetitionSize) -> None:
    """Check the size of all parts of a structural tag together. Raises as `check_regex_size` does."""
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


def _size(text: str, read: Callable[[str, int], tuple[int, bool]]) -> RepetitionSize:
    """Compute the size of an expression. Groups and repetitions look alike in both notations.

    Args:
        read: reads what else begins at an index; returns the index after it, and whether it is an item.
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
            index, is_item = read(text, index)
            if is_item:
                count.add_item()
    return count.size


def _read_pattern(pattern: str, index: int) -> tuple[int, bool]:
    """Read a character, a class or an escape of a regular expression; `?`, `|`, `^` and `$` are no items."""
    char = pattern[index]
    if char in "?|^$":
        return index + 1, False
    return _end_of_item(pattern, index + 1, char), True


def _read_grammar(text: str, index: int) -> tuple[int, bool]:
    """Read a string, a class or a name of a grammar; comments, spaces and operators are no items."""
    char = text[index]
    index += 1
    if char == "#":
        end = text.find("\n", index)
        return len(text) if end < 0 else end, False
    if char == '"':
        while index < len(text) and text[index] not in '"\n':
            index += 2 if text[index] == "\\" else 1
        return index + 1, True
    if char == "[":
        return _end_of_item(text, index, char), True
    if char.isalnum() or char in "_-.":
        while index < len(text) and (text[index].isalnum() or text[index] in "_-."):
            index += 1
        return index, True
    return index, False


class _Count:
    """Counter for the scanner: the sizes of the open groups, and of the item that a repetition would now repeat."""

    def __init__(self) -> None:
        self._groups = [NO_REPETITION]
        """Sizes of the open groups without their last item, outermost first."""
        self._lasts = [NO_REPETITION]
        """Sizes of the groups' last items."""

    def add_item(self) -> None:
        self._put(ONE_ITEM)

    def open_group(self) -> None:
        self._groups.append(NO_REPETITION)
        self._lasts.append(NO_REPETITION)

    def close_group(self) -> None:
        if len(self._groups) > 1:
            self._put(sum_sizes((self._groups.pop(), self._lasts.pop())))
        else:  # malformed
            self.add_item()

    def repeat(self, times: int, is_open: bool) -> None:
        self._lasts[-1] = repeated(self._lasts[-1], times, is_open=is_open)

    @property
    def size(self) -> RepetitionSize:
        return sum_sizes((*self._groups, *self._lasts))

    def _put(self, item: RepetitionSize) -> None:
        self._groups[-1] = sum_sizes((self._groups[-1], self._lasts[-1]))
        self._lasts[-1] = item


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
    """Return the end of the escape, class or character that begins with `char`; `index` is the index after `char`."""
    if char == "\\":
        return index + 1
    if char != "[":
        return index
    first = True
    while index < len(pattern) and (pattern[index] != "]" or first):
        first = first and pattern[index] == "^"
        index += 2 if pattern[index] == "\\" else 1
    return index + 1
