"""Llama 3.2, ToolACE and Llama 4: a list of Python calls, `[f(a=1), g(b="x")]`, with which the content begins.

Where a call is required, the list holds JSON objects, `[{"name": ..., "parameters": {...}}]`, which a grammar can
enforce; the parser reads both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from argosy_engine.parsers.arguments_text import arguments_text
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.python_literals import NotLiteral, read_calls
from argosy_engine.parsers.scanners import HeadScanner, Scanner, ValueScanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, calls_of, json_value
from argosy_engine.structured.structural_tag import ToolCallForm

_HEAD, _BEGUN_HEAD = re.compile(r"(?P<value>\s*)(?:[^\W\d][\w.]*\s*\(|\{)"), re.compile(r"\s*[\w.]*\s*")


class PythonicToolParser(ToolParser):
    first_starts = ("[",)
    call_form = ToolCallForm(
        begin='{"name": {json_name}, "parameters": ', end="}", separator=", ", first="[", last="]"
    )

    def scanner(self, start: str) -> Scanner:
        value = ValueScanner("'")
        value.feed(start, 0)
        return HeadScanner(_HEAD, _BEGUN_HEAD, value)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        if text.lstrip()[1:].lstrip().startswith("{"):
            return calls_of(json_value(text), ("arguments", "parameters"))
        try:
            found = read_calls(text)
        except NotLiteral:
            return None
        calls = []
        for name, values in found:
            arguments = arguments_text(values)
            if arguments is None:
                return None
            calls.append(ParsedCall(name, arguments))
        return calls or None


class Llama4PythonicToolParser(PythonicToolParser):
    """The list may stand between `<|python_start|>` and `<|python_end|>`."""

    section = ("<|python_start|>", "<|python_end|>")
