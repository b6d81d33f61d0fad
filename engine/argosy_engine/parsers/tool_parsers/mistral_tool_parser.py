"""Mistral: `[TOOL_CALLS]NAME[ARGS]{...}` for each call or, in older models, `[TOOL_CALLS][{"name": ..., "arguments":
{...}}, ...]`. `[CALL_ID]` may stand between name and arguments, and `[ARGS]` may be missing.

The templates accept only ids of nine letters and digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256

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
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import (
    ToolParser,
    call_of,
    calls_of,
    json_arguments,
    json_value,
)
from argosy_engine.structured.structural_tag import ToolCallForm

_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_BEFORE_VALUE = re.compile(r"(?:(?!\[TOOL_CALLS\])[^{])*")
_HEAD = re.compile(rf"\s*(?P<list>\[(?=\s*[{{\]])|\{{)|{_BEFORE_VALUE.pattern}(?P<arguments>\{{)")
_OPENING = re.compile(
    rf"\[TOOL_CALLS\]\s{{0,16}}(?P<name>{FUNCTION_NAME})\s{{0,16}}(?:\[CALL_ID\]\s?(?P<id>\w{{0,64}})\s?)?"
    rf"(?P<mark>\[ARGS\])?\s{{0,16}}{OBJECT_START}"
)
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ID_CHARS = 9


class MistralToolParser(ToolParser):
    starts = (_CALLS,)
    other_markers = (_ARGS, _CALL_ID)
    separators = ";,"
    call_form = ToolCallForm(begin=f"{_CALLS}{{name}}{_ARGS}", end="")

    def scanner(self, start: str) -> Scanner:
        return HeadScanner(_HEAD, _BEFORE_VALUE, ValueScanner())

    def opening(self, text: str) -> CallOpening | None:
        found = _OPENING.match(text)
        if found is None or not self.is_function(found["name"], is_unknown_allowed=bool(found["mark"])):
            return None
        opening = opening_of(found)
        return opening if opening is None or _is_id(opening.id) else opening._replace(id="")

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_CALLS,), ())

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        body = text[len(_CALLS) :].strip()
        if body.startswith("["):
            return calls_of(json_value(body), ("arguments",))
        if body.startswith("{"):
            call = call_of(json_value(body))
            return None if call is None else (call,)
        head, brace, rest = body.partition("{")
        head, mark, between = head.partition(_ARGS)
        name, _, call_id = head.partition(_CALL_ID)
        name, call_id = name.strip(), call_id.strip()
        arguments = json_arguments(brace + rest)
        is_call = not between.strip() and self.is_function(name, is_unknown_allowed=bool(mark))
        if arguments is None or not is_call:
            return None
        return (ParsedCall(name, arguments, call_id if _is_id(call_id) else ""),)

    def call_id(self, request_id: str, choice: int, number: int, call: ParsedCall) -> str:
        if call.id:
            return call.id
        digest = sha256(f"{request_id}:{choice}:{number}".encode()).digest()
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:_ID_CHARS])


def _is_id(text: str) -> bool:
    return len(text) == _ID_CHARS and all(char in _ALPHABET for char in text)
