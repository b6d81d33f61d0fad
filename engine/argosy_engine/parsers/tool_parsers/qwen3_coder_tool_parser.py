"""Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Some outputs lack `<tool_call>`. Values are plain text between newlines, read by the function's JSON schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from argosy_engine.parsers.argument_readers import (
    FUNCTION_NAME,
    ArgumentReader,
    CallOpening,
    ConvertedArguments,
    opening_of,
)
from argosy_engine.parsers.arguments_text import arguments_text, is_text
from argosy_engine.parsers.markers import Markers
from argosy_engine.parsers.parameter_types import ParameterTypes
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import EnclosingScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser
from argosy_engine.structured.structural_tag import ToolCallForm

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_SEED_CALL, _SEED_END_CALL = "<seed:tool_call>", "</seed:tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_MAX_KEY_CHARS = 256
_OPENING = re.compile(
    rf"(?:<(?:seed:)?tool_call>)?\s{{0,16}}<function=(?P<name>{FUNCTION_NAME})>\s{{0,16}}"
    rf"(?=<parameter=[^<>]{{1,{_MAX_KEY_CHARS}}}>)"
)
_ARGUMENT = re.compile(rf"\s{{0,16}}<parameter=(?P<key>[^<>]{{1,{_MAX_KEY_CHARS}}})>")
_MAX_FOLLOWING_CHARS = 80
_BEFORE_CALL = re.compile(
    r"</function>\s{0,16}(?:</(?:seed:)?tool_call>\s{0,16})?(?:<(?:seed:)?tool_call>|<function=)"
)
_AT_OUTPUT_END = re.compile(r"</function>\s*(?:</(?:seed:)?tool_call>\s*)?")
_MARKS = re.compile("|".join(map(re.escape, (_FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER))))


class Qwen3CoderToolParser(ToolParser):
    call_marks: ClassVar[tuple[str, str]] = (_CALL, _END_CALL)
    """Marks around calls."""
    starts = (_CALL, _FUNCTION)
    other_markers = (_END_CALL,)
    call_form = ToolCallForm(
        begin="<tool_call>\n<function={name}>\n",
        end="\n</function>\n</tool_call>",
        style="qwen_xml",
        separator="\n",
    )

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._types = ParameterTypes(tools)

    def scanner(self, start: str) -> Scanner:
        begin, end = self.call_marks
        return EnclosingScanner(end if start == begin else _END_FUNCTION, _PARAMETER, _END_PARAMETER)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return self._arguments(partial(self._convert, opening.name))

    def _arguments(self, convert: Callable[[str, str], Any]) -> QwenArguments:
        return QwenArguments(convert)

    def _convert(self, function: str, parameter: str, text: str) -> Any:
        return self._types.value(function, parameter, text.removeprefix("\n").removesuffix("\n"))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        return self.parse_unclosed(text.removesuffix(self.call_marks[1]))

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        """Read functions that are closed, with nothing but white space around them."""
        rest = text.removeprefix(self.call_marks[0])
        calls: list[ParsedCall] = []
        marks = list(_MARKS.finditer(rest))
        index, position = 0, 0
        while index < len(marks):
            last = next((i for i in range(index, len(marks)) if _ends_function(rest, marks, i)), None)
            call = None if last is None else self._function(rest, marks[index : last + 1])
            if call is None or last is None or rest[position : marks[index].start()].strip():
                return None
            calls.append(call)
            index, position = last + 1, marks[last].end()
        return None if rest[position:].strip() else calls or None

    def _function(self, text: str, marks: list[re.Match[str]]) -> ParsedCall | None:
        """Read the function between its first and last mark."""
        if marks[0].group() != _FUNCTION:
            return None
        name_end = text.find(">", marks[0].end(), marks[1].start())
        name = text[marks[0].end() : name_end].strip()
        if name_end < 0 or not name or not is_text(name):
            return None
        marks = [mark for mark in marks[:-1] if mark.group() != _END_FUNCTION] + marks[-1:]
        arguments: dict[str, Any] = {}
        for number, mark in enumerate(marks[1:], 1):
            if mark.group() != _PARAMETER:
                continue
            # A value ends at its end mark or, where that is missing, at the next parameter or the function's end.
            end = marks[number + 1].start()
            key_end = text.find(">", mark.end(), end)
            if key_end < 0:
                return None
            key = text[mark.end() : key_end].strip()
            value = text[key_end + 1 : end].removeprefix("\n").removesuffix("\n")
            if key not in arguments:
                arguments[key] = self._types.value(name, key, value)
        written = arguments_text(arguments)
        return None if written is None else ParsedCall(name, written)


class QwenArguments(ConvertedArguments):
    """Reads parameters.

    A value ends at its end mark or, where that is missing, at the next parameter, or at a function's end that another
    call or the output's end follows.
    """

    argument = _ARGUMENT
    max_head_chars = _MAX_KEY_CHARS + 64
    end = _END_FUNCTION
    closing = ((_END_CALL,),)
    starts = (_CALL, _FUNCTION)
    value_marks = Markers((_END_PARAMETER, _PARAMETER, _END_FUNCTION))

    def may_go_on(self, head: str) -> bool:
        if _END_FUNCTION.startswith(head) or _PARAMETER.startswith(head):
            return True
        return head.startswith(_PARAMETER) and not set("<>") & set(head[len(_PARAMETER) :])

    def value_end(self, text: str, position: int, is_last: bool) -> tuple[int, int | None]:
        while (found := self.value_marks.search(text, position)) is not None:
            start, position = found.span()
            if found.group() == _END_PARAMETER:
                return start, position
            following = text[start : start + _MAX_FOLLOWING_CHARS]
            is_short = len(following) < _MAX_FOLLOWING_CHARS
            is_output_end = is_last and is_short and _AT_OUTPUT_END.fullmatch(following)
            if found.group() == _PARAMETER or _BEFORE_CALL.match(following) or is_output_end:
                return start, start
            if is_short and not is_last:
                return start, None
        return len(text) - (0 if is_last else self.value_marks.overlap(text, position)), None


def _ends_function(text: str, marks: Sequence[re.Match[str]], index: int) -> bool:
    """Whether a mark ends a function, as it does at the end of the call or before the next function. Elsewhere the same
    text belongs to a value."""
    is_last = index + 1 == len(marks)
    if marks[index].group() != _END_FUNCTION or not (is_last or marks[index + 1].group() == _FUNCTION):
        return False
    end = len(text) if is_last else marks[index + 1].start()
    return not text[marks[index].end() : end].strip()


class SeedOssToolParser(Qwen3CoderToolParser):
    """Seed-OSS: the same between `<seed:tool_call>` and `</seed:tool_call>`."""

    call_marks = (_SEED_CALL, _SEED_END_CALL)
    starts = (_SEED_CALL, _FUNCTION)
    other_markers = (_SEED_END_CALL,)
    call_form = ToolCallForm(
        begin=f"{_SEED_CALL}\n<function={{name}}>\n",
        end=f"\n</function>\n{_SEED_END_CALL}",
        style="qwen_xml",
        separator="\n",
    )

    def _arguments(self, convert: Callable[[str, str], Any]) -> QwenArguments:
        return _SeedArguments(convert)


class _SeedArguments(QwenArguments):
    closing = ((_SEED_END_CALL,),)
    starts = (_SEED_CALL, _FUNCTION)
