"""Llama 3.2, ToolACE and Llama 4: a list of Python calls, `[f(a=1), g(b="x")]`, with which the content begins; LFM2:
such a list between marks; OLMo 3: such calls in lines between marks.

Where a call is required, the list holds JSON objects, `[{"name": ..., "parameters": {...}}]`, which a grammar can
enforce; the parser reads both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from argosy_engine.parsers.arguments_text import arguments_text
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.python_literals import NotLiteral, PythonCall, read_call_lines, read_calls
from argosy_engine.parsers.scanners import HeadScanner, MarkerScanner, Scanner, ValueScanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, calls_of, json_value
from argosy_engine.structured.structural_tag import ToolCallForm

_CALLS, _END_CALLS = "<function_calls>", "</function_calls>"
_HEAD, _BEGUN_HEAD = re.compile(r"(?P<value>\s*)(?:[^\W\d][\w.]*\s*\(|\{)"), re.compile(r"\s*[\w.]*\s*")


class PythonicToolParser(ToolParser):
    first_starts: ClassVar[tuple[str, ...]] = ("[",)
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
        return self._calls(text, read_calls)

    def _calls(self, text: str, read: Callable[[str], list[PythonCall]]) -> Sequence[ParsedCall] | None:
        try:
            found = read(text)
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


class Lfm2ToolParser(PythonicToolParser):
    """LFM2 and LFM2.5: the list stands between `<|tool_call_start|>` and `<|tool_call_end|>`."""

    section = ("<|tool_call_start|>", "<|tool_call_end|>")
    needs_section = True
    call_form = PythonicToolParser.call_form._replace(first=f"{section[0]}[", last=f"]{section[1]}")


class Olmo3ToolParser(PythonicToolParser):
    """Calls in lines between `<function_calls>` and `</function_calls>`."""

    first_starts = ()
    starts = (_CALLS,)
    other_markers = (_END_CALLS,)
    call_form = PythonicToolParser.call_form._replace(first=f"{_CALLS}[", last=f"]{_END_CALLS}")

    def scanner(self, start: str) -> Scanner:
        return MarkerScanner(_END_CALLS)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        body = text.removeprefix(_CALLS).removesuffix(_END_CALLS).strip()
        return super().parse(body) if body.startswith("[") else self._calls(body, read_call_lines)
