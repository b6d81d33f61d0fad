"""Lists of JSON objects after a mark: Granite 3, Cohere's Command R7B and later, Nemotron Nano 2.

The calls of a list are read when all of it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import EnclosingScanner, HeadScanner, Scanner, ValueScanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, calls_of, json_value
from argosy_engine.structured.structural_tag import NUMBER, ToolCallForm

_LIST_HEAD, _LIST_SPACE = re.compile(r"\s*(?P<list>\[)(?=\s*[{\]])"), re.compile(r"\s*\[?\s*")


class GraniteToolParser(ToolParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in 3.1 after `<tool_call>`."""

    starts = ("<|tool_call|>", "<tool_call>")
    call_form = ToolCallForm(
        begin='{"name": {json_name}, "arguments": ', end="}", separator=", ", first="<|tool_call|>[", last="]"
    )

    def scanner(self, start: str) -> Scanner:
        return HeadScanner(_LIST_HEAD, _LIST_SPACE, ValueScanner())

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        start = next(start for start in self.starts if text.startswith(start))
        return calls_of(json_value(text[len(start) :]), ("arguments",))


class _MarkedListToolParser(ToolParser):
    """A list between two marks, whose brackets, and whose last mark, may be missing."""

    end: ClassVar[str]

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(self.end)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        return self.parse_unclosed(text.removesuffix(self.end))

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        body = text[len(self.starts[0]) :].strip()
        return self._calls(json_value(body if body.startswith("[") else f"[{body}]"))

    def _calls(self, values: Any) -> Sequence[ParsedCall] | None:
        return calls_of(values, ("arguments",))


class NemotronJsonToolParser(_MarkedListToolParser):
    """Nemotron Nano 2 and Llama Nemotron: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`."""

    starts = ("<TOOLCALL>",)
    end = "</TOOLCALL>"
    other_markers = (end,)
    call_form = GraniteToolParser.call_form._replace(first="<TOOLCALL>[", last="]</TOOLCALL>")


class CohereCommandToolParser(_MarkedListToolParser):
    """Command R7B, Command A and later: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters":
    {...}}, ...]<|END_ACTION|>`.

    The model numbers the calls of each answer from 0, which makes no id for a whole chat: calls get our ids, and the
    templates number them anew.
    """

    starts = ("<|START_ACTION|>",)
    end = "<|END_ACTION|>"
    other_markers = (end,)
    call_form = ToolCallForm(
        begin=f'{{"tool_call_id": "{NUMBER}", "tool_name": {{json_name}}, "parameters": ',
        end="}",
        separator=",\n    ",
        first="<|START_ACTION|>[\n    ",
        last="\n]<|END_ACTION|>",
    )

    def _calls(self, values: Any) -> Sequence[ParsedCall] | None:
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            return None
        return calls_of([{**value, "name": value.get("tool_name")} for value in values], ("parameters",))
