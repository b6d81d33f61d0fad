"""Notation of grammars: tells Lark's from the GBNF dialect of EBNF, the only one that is compiled."""

from __future__ import annotations

import re

from argosy_engine.errors import InvalidRequest

_LARK_RULE = re.compile(
    r"^[ \t]*+(?:%(?:import|ignore|declare)\b|[?!]{0,2}[A-Za-z_]\w*+(?:\.-?\d++)?[ \t]*+:)", re.MULTILINE
)
"""The beginning of a line that defines a rule or a terminal in Lark's notation, or is a directive."""


def check_notation(grammar: str) -> None:
    """
    Raises:
        InvalidRequest: the grammar is written in Lark's notation.
    """
    if "::=" not in grammar and _LARK_RULE.search(grammar):
        raise InvalidRequest(
            'looks like Lark\'s notation (`start: "a" | "b"`), which is not supported; write EBNF in the GBNF dialect: '
            '`root ::= "a" | "b"`'
        )
