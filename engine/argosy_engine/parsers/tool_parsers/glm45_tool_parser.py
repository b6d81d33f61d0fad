"""GLM-4.5 to GLM-4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

Values are plain text, read by the function's JSON schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from argosy_engine.parsers.argument_readers import (
    FUNCTION_NAME,
    ArgumentReader,
    CallOpening,
    ConvertedArguments,
    opening_of,
)
from argosy_engine.parsers.arguments_text import arguments_text
from argosy_engine.parsers.markers import Markers
from argosy_engine.parsers.parameter_types import ParameterTypes
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import EnclosingScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser
from argosy_engine.structured.structural_tag import ToolCallForm

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
_MAX_KEY_CHARS = 256
_OPENING = re.compile(
    rf"<tool_call>\s{{0,16}}(?P<name>{FUNCTION_NAME})\s{{0,16}}"
    rf"(?=<arg_key>[^<]{{1,{_MAX_KEY_CHARS}}}</arg_key>\s{{0,16}}<arg_value>)"
)
_ARGUMENT = re.compile(
    rf"\s{{0,16}}<arg_key>(?P<key>[^<]{{1,{_MAX_KEY_CHARS}}})</arg_key>\s{{0,16}}<arg_value>"
)


class Glm45ToolParser(ToolParser):
    starts = (_CALL,)
    other_markers = (_END_CALL, _KEY, _END_KEY, _VALUE, _END_VALUE)
    call_form = ToolCallForm(
        begin="<tool_call>{name}\n", end="\n</tool_call>", style="glm_xml", separator="\n"
    )

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._types = ParameterTypes(tools)

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_END_CALL, _VALUE, _END_VALUE)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return GlmArguments(partial(self._types.value, opening.name))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        if not text.endswith(_END_CALL):
            return None  # more parameters, or the rest of the name, may be missing
        body = text[len(_CALL) : -len(_END_CALL)]
        first = body.find(_KEY)
        name = (body if first < 0 else body[:first]).strip()
        if not self.is_function(name, is_unknown_allowed=first >= 0):
            return None
        arguments: dict[str, Any] = {}
        position = first if first >= 0 else len(body)
        while (begin := _skip_space(body, position)) < len(body):
            if not body.startswith(_KEY, begin):
                return None
            key_end = body.find(_END_KEY, begin)
            value_begin = _skip_space(body, key_end + len(_END_KEY)) if key_end >= 0 else -1
            if key_end < 0 or not body.startswith(_VALUE, value_begin):
                return None
            value_end = body.find(_END_VALUE, value_begin)
            if value_end < 0:
                return None
            key = body[begin + len(_KEY) : key_end].strip()
            if key not in arguments:
                arguments[key] = self._types.value(name, key, body[value_begin + len(_VALUE) : value_end])
            position = value_end + len(_END_VALUE)
        written = arguments_text(arguments)
        return None if written is None else (ParsedCall(name, written),)


class GlmArguments(ConvertedArguments):
    """Reads keys and values."""

    argument = _ARGUMENT
    max_head_chars = _MAX_KEY_CHARS + 64
    end = _END_CALL
    starts = (_CALL,)
    value_marks = Markers((_END_VALUE,))

    def may_go_on(self, head: str) -> bool:
        if _END_CALL.startswith(head) or _KEY.startswith(head):
            return True
        key, mark, rest = head.removeprefix(_KEY).partition(_END_KEY)
        if not head.startswith(_KEY):
            return False
        if mark:
            return "<" not in key and _VALUE.startswith(rest.lstrip())
        name, _, begun = key.partition("<")
        return bool(name) and _END_KEY.startswith(f"<{begun}")

    def value_end(self, text: str, position: int, is_last: bool) -> tuple[int, int | None]:
        end = text.find(_END_VALUE, position)
        if end >= 0:
            return end, end + len(_END_VALUE)
        return len(text) - self.value_marks.overlap(text, position), None


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
