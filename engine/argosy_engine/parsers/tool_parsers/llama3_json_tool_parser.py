"""Llama 3 and 4: `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`, several separated by `; `.

A call begins the content or follows another one; in the middle of prose it counts if it begins with the name.
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
from argosy_engine.parsers.scanners import HeadScanner, Scanner, ValueScanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, call_of, json_value
from argosy_engine.structured.structural_tag import ToolCallForm

_TAG = "<|python_tag|>"
_OPENING = re.compile(
    r'(?:<\|python_tag\|>)?\s{0,16}\{\s{0,16}(?:"(?:type|id)"\s?:\s?"[\w.-]{0,64}"\s?,\s{0,16}){0,2}'
    rf'"name"\s?:\s?"(?P<name>{FUNCTION_NAME})"\s{{0,16}},\s{{0,16}}"(?:parameters|arguments)"\s?:\s{{0,16}}'
    rf"{OBJECT_START}"
)
_KEYS = "name|type|id|function|parameters|arguments"
_HEAD = re.compile(rf'\s*(?P<value>\{{)\s*"(?:{_KEYS})"')
_BEGUN_HEAD = re.compile(r'\s*(?:\{\s*(?:"\w*"?)?)?')
_AFTER_BRACE, _BEGUN_KEY = re.compile(r'(?P<value>\s*)"'), re.compile(r"\s*")
_AFTER_NAME, _BEGUN_NAME = re.compile(r'(?P<value>\s*):\s*"'), re.compile(r"\s*(?::\s*)?")


class Llama3JsonToolParser(ToolParser):
    starts = (_TAG, '{"name"')
    first_starts = ("{",)
    separators = ";,"
    call_form = ToolCallForm(begin='{"name": {json_name}, "parameters": ', end="}", separator="; ")

    def scanner(self, start: str) -> Scanner:
        value = ValueScanner()
        if start == _TAG:
            return HeadScanner(_HEAD, _BEGUN_HEAD, value)
        value.feed(start, 0)
        if start == "{":
            return HeadScanner(_AFTER_BRACE, _BEGUN_KEY, value)
        return HeadScanner(_AFTER_NAME, _BEGUN_NAME, value)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_TAG,), (("}",),))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        call = call_of(
            json_value(text.removeprefix(_TAG)), ("arguments", "parameters"), defaults_to_none=False
        )
        return None if call is None else (call,)
