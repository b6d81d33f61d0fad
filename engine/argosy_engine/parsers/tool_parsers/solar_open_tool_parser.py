"""Solar Open: calls `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>` after
`<|tool_calls|>`, in a message of their own. The token `<|calls|>` ends it, and the output.

The id is one that the model makes up; the template writes it before the call's result.
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
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import EnclosingScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, json_arguments
from argosy_engine.structured.structural_tag import ToolCallForm

_SECTION, _END_SECTION = "<|tool_calls|>", "<|calls|>"
_CALL, _NAME, _ARGUMENTS = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"
_END_CALL = "<|tool_call:end|>"
_ID = r"[A-Za-z0-9_-]{0,64}"
_HEAD = re.compile(
    rf"<\|tool_call:begin\|>\s{{0,16}}(?P<id>{_ID})\s{{0,16}}<\|tool_call:name\|>\s{{0,16}}(?P<name>{FUNCTION_NAME})"
    r"\s{0,16}<\|tool_call:args\|>\s{0,16}"
)
_OPENING = re.compile(_HEAD.pattern + OBJECT_START)


class SolarOpenToolParser(ToolParser):
    starts = (_CALL,)
    section = (_SECTION, _END_SECTION)
    other_markers = (_NAME, _ARGUMENTS, _END_CALL)
    call_form = ToolCallForm(
        begin=f"{_CALL}{{number}}{_NAME}{{name}}{_ARGUMENTS}",
        end=_END_CALL,
        first=_SECTION,
        last=_END_SECTION,
    )

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_END_CALL)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_CALL, _END_CALL, _END_SECTION), ((_END_CALL,),))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        head = _HEAD.match(text)
        if head is None or not text.endswith(_END_CALL):
            return None
        arguments = json_arguments(text[head.end() : -len(_END_CALL)].strip() or "{}")
        return None if arguments is None else (ParsedCall(head["name"], arguments, head["id"]),)

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        return self.parse(text + _END_CALL) if not text.rstrip().endswith(_ARGUMENTS) else None
