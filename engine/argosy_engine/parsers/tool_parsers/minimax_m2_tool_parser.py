"""MiniMax M2: calls `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` within
`<minimax:tool_call>` and `</minimax:tool_call>`.

Values are plain text, read by the function's JSON schema. A call is read when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from argosy_engine.parsers.argument_readers import FUNCTION_NAME
from argosy_engine.parsers.arguments_text import arguments_text
from argosy_engine.parsers.parameter_types import ParameterTypes
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import EnclosingScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser
from argosy_engine.structured.structural_tag import ToolCallForm

_SECTION, _END_SECTION = "<minimax:tool_call>", "</minimax:tool_call>"
_CALL, _END_CALL = "<invoke name=", "</invoke>"
_PARAMETER, _END_PARAMETER = "<parameter name=", "</parameter>"
_HEAD = re.compile(rf'<invoke name="?(?P<name>{FUNCTION_NAME})"?>')
_KEY = re.compile(r'\s*<parameter name="?(?P<key>[^<>"]{1,256})"?>')


class MinimaxM2ToolParser(ToolParser):
    starts = (_CALL,)
    section = (_SECTION, _END_SECTION)
    other_markers: ClassVar[tuple[str, ...]] = (_END_CALL,)
    call_form = ToolCallForm(
        begin='<invoke name="{name}">\n',
        end="</invoke>\n",
        style="minimax_xml",
        first=f"{_SECTION}\n",
        last=_END_SECTION,
    )

    end_call: ClassVar[str] = _END_CALL
    parameter_marks: ClassVar[tuple[str, str]] = (_PARAMETER, _END_PARAMETER)
    head: ClassVar[re.Pattern[str]] = _HEAD
    key: ClassVar[re.Pattern[str]] = _KEY
    """What stands before a value, with the argument's name as group `key`."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._types = ParameterTypes(tools)

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(self.end_call, *self.parameter_marks)

    def value(self, function: str, found: re.Match[str], text: str) -> Any:
        """Return the value of an argument, of what stands before it and its text."""
        return self._types.value(function, found["key"], text.removeprefix("\n").removesuffix("\n"))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        head = self.head.match(text)
        if head is None or not text.endswith(self.end_call):
            return None
        end, position, end_mark = len(text) - len(self.end_call), head.end(), self.parameter_marks[1]
        arguments: dict[str, Any] = {}
        while (found := self.key.match(text, position, end)) is not None:
            value_end = text.find(end_mark, found.end(), end)
            if value_end < 0:
                return None
            value = self.value(head["name"], found, text[found.end() : value_end])
            arguments.setdefault(found["key"], value)
            position = value_end + len(end_mark)
        written = arguments_text(arguments)
        return None if text[position:end].strip() or written is None else (ParsedCall(head["name"], written),)
