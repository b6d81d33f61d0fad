"""Syntax of regular expressions that XGrammar accepts but does not enforce.

It skips lookaheads, flags and anchors in the middle of an expression, and takes unknown escapes for plain letters, each
with a mere warning in the log: the output would look constrained but not match. What it rejects itself is not checked
here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from argosy_engine.errors import InvalidRequest

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
