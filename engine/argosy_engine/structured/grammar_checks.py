"""Checks of regular expressions and EBNF grammars, and of a JSON value's size, before XGrammar gets them.

The time in which XGrammar builds automata grows much faster than the text: `.{1,1000}` takes 18 s with a vocabulary of
100k tokens, and adjacent repetitions without an upper bound (`a*a*a*...`) multiply the states that each step follows.
So sizes are measured with repetitions written out, by a hand-written scanner in linear time.

XGrammar skips lookaheads, flags and anchors in the middle of an expression, and takes unknown escapes for plain
letters, each with a mere warning in the log: the output would look constrained but not match. Those are refused here.
What it rejects itself is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

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
    """Check the size of an EBNF grammar, or of all parts of a structural tag together.

    Raises:
        InvalidRequest: it has too many repetitions.
    """
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


_TOKEN = re.compile(
    r"""
      (?P<items> [^\\\[()|^$*+?{]+ | \\. | \[\^*+(?:\\.?|[^\\])?(?:\\.?|[^\]\\])*+\]? )
    | (?P<open> \( (?: \? (?: [:=!>] | <[=!] | P?<[^>]*> | [^):]*:? ) )? )
    | (?P<close> \) )
    | (?P<alternative> \| )
    | (?P<start> \^ )
    | (?P<end> \$ )
    | (?P<repetition> [*+?] | \{[0-9,\ ]*\} )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPED_LETTER = re.compile(r"\\(?:([A-Za-z])|.)", re.DOTALL)
_KNOWN_LETTERS = frozenset("abBcdDefknpPrsStuvwWx")


class _Level(NamedTuple):
    """A group, or the whole pattern."""

    can_start: bool
    """Whether an anchor at the beginning of its alternatives stands at the beginning of the text."""
    one_ended: bool
    """Whether one of its earlier alternatives ends with the end of the text."""


def check_syntax(pattern: str) -> None:
    """Reject what would not be enforced, in linear time.

    Raises:
        InvalidRequest: the pattern has a lookahead, a flag, an anchor that is neither at the beginning nor at the end,
            or an escaped letter without a meaning.
    """
    can_start, has_ended = True, False
    """Whether the text begins here, and whether an anchor says that it has ended."""
    levels = [_Level(True, False)]
    for token in _TOKEN.finditer(pattern):
        text = token.group()
        match token.lastgroup:
            case "open":
                _check_group(text)
                if has_ended:
                    raise _in_the_middle("$")
                levels.append(_Level(can_start, False))
            case "close" if len(levels) > 1:
                can_start, has_ended = False, levels.pop().one_ended or has_ended
            case "alternative":
                level = levels.pop()
                levels.append(_Level(level.can_start, level.one_ended or has_ended))
                can_start, has_ended = level.can_start, False
            case "start" if not can_start:
                raise _in_the_middle("^")
            case "end":
                has_ended = True
            case "items" | "other":
                if has_ended:
                    raise _in_the_middle("$")
                can_start = False
                _check_letters(text)


def _in_the_middle(anchor: str) -> InvalidRequest:
    return InvalidRequest(f"has {anchor} in the middle, which cannot be enforced")


def _check_group(text: str) -> None:
    if text in ("(?=", "(?!"):
        raise InvalidRequest("has a lookahead, which cannot be enforced")
    if text.startswith("(?") and text[2:3] not in (":", "<", ">", "P"):
        raise InvalidRequest(f"has {text[:16]!r}, which cannot be enforced: flags are not supported")


def _check_letters(text: str) -> None:
    for letter in _ESCAPED_LETTER.findall(text) if "\\" in text else ():
        if letter and letter not in _KNOWN_LETTERS:
            raise InvalidRequest(
                f"has \\{letter}, which stands for nothing; a pattern must match the whole text in any case"
            )


_LARK_RULE = re.compile(
    r"^[ \t]*+(?:%(?:import|ignore|declare)\b|[?!]{0,2}[A-Za-z_]\w*+(?:\.-?\d++)?[ \t]*+:)", re.MULTILINE
)
"""The beginning of a line that defines a rule or a terminal in Lark's notation, or is a directive."""


def check_notation(grammar: str) -> None:
    """Tell Lark's notation from the GBNF dialect of EBNF, the only one that is compiled.

    Raises:
        InvalidRequest: the grammar is written in Lark's notation.
    """
    if "::=" not in grammar and _LARK_RULE.search(grammar):
        raise InvalidRequest(
            'looks like Lark\'s notation (`start: "a" | "b"`), which is not supported; write EBNF in the GBNF dialect: '
            '`root ::= "a" | "b"`'
        )


def least_json_size(value: Any, limit: int) -> int:
    """Return a lower bound of the characters that `json.dumps` writes for a value, found without writing them.

    The time is bounded by `limit`: once the bound exceeds it, the rest of the value is not looked at.
    """
    size, stack = 0, [value]
    while stack and size <= limit:
        item = stack.pop()
        if isinstance(item, str):
            size += len(item) + 2
        elif isinstance(item, dict):
            size += max(4 * len(item), 2)  # braces, and the separators after names and between items
            if size <= limit:
                stack.extend(item)
                stack.extend(item.values())
        elif isinstance(item, list | tuple):
            size += max(2 * len(item), 2)
            if size <= limit:
                stack.extend(item)
        else:
            size += 1
    return size
