"""How large a regular expression becomes when its counted repetitions are written out.

XGrammar turns a JSON string's `pattern` into one automaton, in time that grows faster than this size: `.{1,5000}` keeps
a core busy for a minute. A hand-written scanner in linear time; what is malformed beyond counting is left to XGrammar.
"""

from __future__ import annotations

from argosy_engine.errors import InvalidRequest

MAX_PATTERN_CHARS = 4096
MAX_PATTERN_SIZE = 1000
"""Characters to match once repetitions are written out; compiles in well under a second."""


def check_pattern(pattern: object) -> None:
    """
    Raises:
        InvalidRequest: not a string, too long, or too large when written out.
    """
    if not isinstance(pattern, str):
        raise InvalidRequest("must be a string")
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(f"is longer than {MAX_PATTERN_CHARS} characters")
    if expanded_size(pattern) > MAX_PATTERN_SIZE:
        raise InvalidRequest(
            f"is too large: its repetitions written out exceed {MAX_PATTERN_SIZE} characters"
        )


def expanded_size(pattern: str) -> int:
    """Single-character matches in the pattern after every `{m,n}` is written out; `*` and `+` count once."""
    groups = [0]
    last = 0
    """Size of the item that a quantifier at this point would repeat."""
    index = 0
    while index < len(pattern):
        char = pattern[index]
        index += 1
        if char == "(":
            groups.append(0)
            last = 0
        elif char == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif char == "{" and (counted := _counts(pattern, index)) is not None:
            times, index = counted
            groups[-1] += last * (max(times, 1) - 1)
            last *= max(times, 1)
        elif char in "*+?|^$":
            continue
        else:
            index = _end_of_item(pattern, index, char)
            last = 1
            groups[-1] += 1
    return sum(groups)


def _counts(pattern: str, start: int) -> tuple[int, int] | None:
    """The larger bound of `m}`, `m,}` or `m,n}` and the index behind it; None when this is no repetition."""
    end = pattern.find("}", start)
    bounds = pattern[start:end].split(",") if end >= 0 else []
    if not 1 <= len(bounds) <= 2 or not all(
        part == "" or (part.isascii() and part.isdigit()) for part in bounds
    ):
        return None
    if max(map(len, bounds)) > 9:
        return 1 << 30, end + 1
    return max(int(part or 0) for part in bounds), end + 1


def _end_of_item(pattern: str, index: int, char: str) -> int:
    """Where the escape, class or character that begins with `char` ends; `index` is behind `char`."""
    if char == "\\":
        return index + 1
    if char != "[":
        return index
    first = True
    while index < len(pattern) and (pattern[index] != "]" or first):
        first = first and pattern[index] == "^"
        index += 2 if pattern[index] == "\\" else 1
    return index + 1
