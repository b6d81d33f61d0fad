"""DeepSeek V3 and R1: calls of a type, a name and a JSON code block, in a section of special tokens."""

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

SECTION, END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_BLOCK, _END_BLOCK = "```json", "```"
_OPENING = re.compile(
    rf"{CALL}[^<]{{0,64}}{SEPARATOR}\s{{0,16}}(?P<name>{FUNCTION_NAME})\s{{0,16}}```json\s{{0,16}}{OBJECT_START}"
)
_BARE_OPENING = re.compile(
    rf"{CALL}\s{{0,16}}(?P<name>{FUNCTION_NAME})\s{{0,16}}{SEPARATOR}\s{{0,16}}{OBJECT_START}"
)
_ENDS = (CALL, END_CALL, END_SECTION)


class DeepSeekV3ToolParser(ToolParser):
    starts = (CALL,)
    section = (SECTION, END_SECTION)
    other_markers = (SEPARATOR, END_CALL)
    call_form = ToolCallForm(
        begin=f"{CALL}function{SEPARATOR}{{name}}\n```json\n",
        end=f"\n```{END_CALL}",
        separator="\n",
        first=SECTION,
        last=END_SECTION,
    )

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(END_CALL)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments(_ENDS, ((_END_BLOCK,), (END_CALL,)))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        _, mark, body = text[len(CALL) :].removesuffix(END_CALL).partition(SEPARATOR)
        name, block, arguments = body.partition(_BLOCK)
        if not mark or not block:
            return None
        return _call(name, arguments.rstrip().removesuffix(_END_BLOCK))


class DeepSeekV31ToolParser(DeepSeekV3ToolParser):
    """DeepSeek V3.1: name and JSON, without type and code block."""

    call_form = ToolCallForm(
        begin=f"{CALL}{{name}}{SEPARATOR}", end=END_CALL, first=SECTION, last=END_SECTION
    )

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_BARE_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments(_ENDS, ((END_CALL,),))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        name, mark, arguments = text[len(CALL) :].removesuffix(END_CALL).partition(SEPARATOR)
        return _call(name, arguments) if mark else None


def _call(name: str, body: str) -> Sequence[ParsedCall] | None:
    name, arguments = name.strip(), json_arguments(body)
    return (ParsedCall(name, arguments),) if name and is_text(name) and arguments is not None else None
