"""Kimi K2: calls `<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>` within
`<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`.

What stands before the arguments is the call's id, by which the template refers to the call when it renders its result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from argosy_engine.parsers.argument_readers import (
    FUNCTION_NAME,
    OBJECT_START,
    ArgumentReader,
    CallOpening,
    JsonArguments,
    opening_of,
)
from argosy_engine.parsers.arguments_text import is_text
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import EnclosingScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, json_arguments
from argosy_engine.structured.structural_tag import ToolCallForm

_SECTION, _END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MAX_ID_CHARS = 256
_OPENING = re.compile(
    rf"<\|tool_call_begin\|>\s{{0,16}}(?P<id>(?:functions\.)?(?P<name>{FUNCTION_NAME}):[0-9]{{1,9}})\s{{0,16}}"
    rf"<\|tool_call_argument_begin\|>\s{{0,16}}{OBJECT_START}"
)


class KimiK2ToolParser(ToolParser):
    starts = (_CALL,)
    section = (_SECTION, _END_SECTION)
    other_markers = (_ARGUMENTS, _END_CALL)
    call_form = ToolCallForm(
        begin=f"{_CALL}functions.{{name}}:{{number}}{_ARGUMENTS}",
        end=_END_CALL,
        first=_SECTION,
        last=_END_SECTION,
    )

    def call_id(self, request_id: str, choice: int, number: int, call: ParsedCall) -> str:
        """Return the id that the model wrote, or one of its form: the template renders the name by the id alone."""
        return call.id or f"functions.{call.name}:{number}"

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_END_CALL)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_CALL, _END_CALL, _END_SECTION), ((_END_CALL,),))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        body = text.removesuffix(_END_CALL)
        return self.parse_unclosed(body + "{}" if body.rstrip().endswith(_ARGUMENTS) else body)

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        head, mark, body = text[len(_CALL) :].partition(_ARGUMENTS)
        call_id = head.strip()
        name, colon, number = call_id.rpartition(":")
        name = name.removeprefix("functions.")
        if not mark or not colon or not number.isdecimal() or not name or len(call_id) > _MAX_ID_CHARS:
            return None
        arguments = json_arguments(body)
        return (ParsedCall(name, arguments, call_id),) if arguments is not None and is_text(call_id) else None
