"""DeepSeek V3 and R1: calls of a type, a name and a JSON code block, in a section of special tokens; V3.1: of a name
and JSON; V3.2 and V4: of names and texts in DSML, an XML of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

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
from argosy_engine.parsers.tool_parsers.minimax_m2_tool_parser import MinimaxM2ToolParser
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
DSML = "｜DSML｜"
"""A token of its own, within the marks."""
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


def _dsml_calls(section: str) -> tuple[tuple[str, str], ToolCallForm]:
    """Return the marks around calls, and the form of calls, of a name of the section."""
    first, last = f"<{DSML}{section}>", f"</{DSML}{section}>"
    form = ToolCallForm(
        begin=f'<{DSML}invoke name="{{name}}">\n',
        end=f"</{DSML}invoke>\n",
        style="deepseek_xml",
        first=f"{first}\n",
        last=last,
    )
    return (first, last), form


class DeepSeekV32ToolParser(MinimaxM2ToolParser):
    """DeepSeek V3.2: `<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>` in `<｜DSML｜function_calls>`. A value is text as it stands, or JSON with `string="false"`."""

    starts = (f"<{DSML}invoke name=",)
    section, call_form = _dsml_calls("function_calls")
    end_call = f"</{DSML}invoke>"
    other_markers = (end_call, DSML)
    parameter_marks = (f"<{DSML}parameter name=", f"</{DSML}parameter>")
    head = re.compile(rf'<{DSML}invoke name="(?P<name>{FUNCTION_NAME})">')
    key = re.compile(
        rf'\s*<{DSML}parameter name="(?P<key>[^<>"]{{1,256}})"(?: string="(?P<string>true|false)")?>'
    )

    def value(self, function: str, found: re.Match[str], text: str) -> Any:
        if found["string"] == "true":
            return text
        if found["string"] is None:
            return super().value(function, found, text)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """DeepSeek V4: the same in `<｜DSML｜tool_calls>`."""

    section, call_form = _dsml_calls("tool_calls")


def _call(name: str, body: str) -> Sequence[ParsedCall] | None:
    name, arguments = name.strip(), json_arguments(body)
    return (ParsedCall(name, arguments),) if name and is_text(name) and arguments is not None else None
