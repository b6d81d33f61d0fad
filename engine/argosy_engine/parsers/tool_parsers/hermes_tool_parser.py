"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

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
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, call_of, json_value

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_OPENING = re.compile(
    rf'<tool_call>\s{{0,16}}\{{\s{{0,16}}"name"\s?:\s?"(?P<name>{FUNCTION_NAME})"\s{{0,16}},\s{{0,16}}'
    rf'"arguments"\s?:\s{{0,16}}{OBJECT_START}'
)


class HermesToolParser(ToolParser):
    starts = (_CALL,)
    other_markers = (_END_CALL,)

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_END_CALL)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_CALL, _END_CALL), (("}",), (_END_CALL,)))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        return self.parse_unclosed(text.removesuffix(_END_CALL))

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        call = call_of(json_value(text[len(_CALL) :]))
        return None if call is None else (call,)
