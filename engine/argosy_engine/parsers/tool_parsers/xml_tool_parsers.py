"""Tool parsers of families that write a call's arguments between marks, one by one.

Values are plain text, read by the function's JSON schema (`ParameterTypes`), except where a form says what they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from argosy_engine.parsers.parsed_output import (
    FUNCTION_NAME,
    ArgumentReader,
    CallOpening,
    ConvertedArguments,
    ParsedCall,
    arguments_text,
    is_text,
    opening_of,
)
from argosy_engine.parsers.scanners import EnclosingScanner, Markers, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser
from argosy_engine.structured.structural_tag import ToolCallForm

_MINIMAX_SECTION, _MINIMAX_END_SECTION = "<minimax:tool_call>", "</minimax:tool_call>"
_MINIMAX_CALL, _MINIMAX_END_CALL = "<invoke name=", "</invoke>"
_MINIMAX_PARAMETER, _MINIMAX_END_PARAMETER = "<parameter name=", "</parameter>"
_MINIMAX_HEAD = re.compile(rf'<invoke name="?(?P<name>{FUNCTION_NAME})"?>')
_MINIMAX_KEY = re.compile(r'\s*<parameter name="?(?P<key>[^<>"]{1,256})"?>')


class MinimaxM2ToolParser(ToolParser):
    """MiniMax M2: calls `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` within
    `<minimax:tool_call>` and `</minimax:tool_call>`. A call is read when it is complete."""

    starts = (_MINIMAX_CALL,)
    section = (_MINIMAX_SECTION, _MINIMAX_END_SECTION)
    other_markers: ClassVar[tuple[str, ...]] = (_MINIMAX_END_CALL,)
    call_form = ToolCallForm(
        begin='<invoke name="{name}">\n',
        end="</invoke>\n",
        style="minimax_xml",
        first=f"{_MINIMAX_SECTION}\n",
        last=_MINIMAX_END_SECTION,
    )

    end_call: ClassVar[str] = _MINIMAX_END_CALL
    parameter_marks: ClassVar[tuple[str, str]] = (_MINIMAX_PARAMETER, _MINIMAX_END_PARAMETER)
    head: ClassVar[re.Pattern[str]] = _MINIMAX_HEAD
    key: ClassVar[re.Pattern[str]] = _MINIMAX_KEY
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


DSML = "｜DSML｜"
"""A token of its own, within the marks."""


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


_QWEN_CALL, _QWEN_END_CALL = "<tool_call>", "</tool_call>"
_SEED_CALL, _SEED_END_CALL = "<seed:tool_call>", "</seed:tool_call>"
_QWEN_FUNCTION, _QWEN_END_FUNCTION = "<function=", "</function>"
_QWEN_PARAMETER, _QWEN_END_PARAMETER = "<parameter=", "</parameter>"
_QWEN_MAX_KEY_CHARS = 256
_QWEN_OPENING = re.compile(
    rf"(?:<(?:seed:)?tool_call>)?\s{{0,16}}<function=(?P<name>{FUNCTION_NAME})>\s{{0,16}}"
    rf"(?=<parameter=[^<>]{{1,{_QWEN_MAX_KEY_CHARS}}}>)"
)
_QWEN_ARGUMENT = re.compile(rf"\s{{0,16}}<parameter=(?P<key>[^<>]{{1,{_QWEN_MAX_KEY_CHARS}}})>")
_QWEN_MAX_FOLLOWING_CHARS = 80
_QWEN_BEFORE_CALL = re.compile(
    r"</function>\s{0,16}(?:</(?:seed:)?tool_call>\s{0,16})?(?:<(?:seed:)?tool_call>|<function=)"
)
_QWEN_AT_OUTPUT_END = re.compile(r"</function>\s*(?:</(?:seed:)?tool_call>\s*)?")
_QWEN_MARKS = re.compile(
    "|".join(map(re.escape, (_QWEN_FUNCTION, _QWEN_END_FUNCTION, _QWEN_PARAMETER, _QWEN_END_PARAMETER)))
)


class Qwen3CoderToolParser(ToolParser):
    """Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    Some outputs lack `<tool_call>`. Values stand between newlines.
    """

    call_marks: ClassVar[tuple[str, str]] = (_QWEN_CALL, _QWEN_END_CALL)
    """Marks around calls."""
    starts = (_QWEN_CALL, _QWEN_FUNCTION)
    other_markers = (_QWEN_END_CALL,)
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
        return EnclosingScanner(
            end if start == begin else _QWEN_END_FUNCTION, _QWEN_PARAMETER, _QWEN_END_PARAMETER
        )

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_QWEN_OPENING.match(text))

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
        marks = list(_QWEN_MARKS.finditer(rest))
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
        if marks[0].group() != _QWEN_FUNCTION:
            return None
        name_end = text.find(">", marks[0].end(), marks[1].start())
        name = text[marks[0].end() : name_end].strip()
        if name_end < 0 or not name or not is_text(name):
            return None
        marks = [mark for mark in marks[:-1] if mark.group() != _QWEN_END_FUNCTION] + marks[-1:]
        arguments: dict[str, Any] = {}
        for number, mark in enumerate(marks[1:], 1):
            if mark.group() != _QWEN_PARAMETER:
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

    argument = _QWEN_ARGUMENT
    max_head_chars = _QWEN_MAX_KEY_CHARS + 64
    end = _QWEN_END_FUNCTION
    closing = ((_QWEN_END_CALL,),)
    starts = (_QWEN_CALL, _QWEN_FUNCTION)
    value_marks = Markers((_QWEN_END_PARAMETER, _QWEN_PARAMETER, _QWEN_END_FUNCTION))

    def may_go_on(self, head: str) -> bool:
        if _QWEN_END_FUNCTION.startswith(head) or _QWEN_PARAMETER.startswith(head):
            return True
        return head.startswith(_QWEN_PARAMETER) and not set("<>") & set(head[len(_QWEN_PARAMETER) :])

    def value_end(self, text: str, position: int, is_last: bool) -> tuple[int, int | None]:
        while (found := self.value_marks.search(text, position)) is not None:
            start, position = found.span()
            if found.group() == _QWEN_END_PARAMETER:
                return start, position
            following = text[start : start + _QWEN_MAX_FOLLOWING_CHARS]
            is_short = len(following) < _QWEN_MAX_FOLLOWING_CHARS
            is_output_end = is_last and is_short and _QWEN_AT_OUTPUT_END.fullmatch(following)
            if found.group() == _QWEN_PARAMETER or _QWEN_BEFORE_CALL.match(following) or is_output_end:
                return start, start
            if is_short and not is_last:
                return start, None
        return len(text) - (0 if is_last else self.value_marks.overlap(text, position)), None


def _ends_function(text: str, marks: Sequence[re.Match[str]], index: int) -> bool:
    """Whether a mark ends a function, as it does at the end of the call or before the next function. Elsewhere the same
    text belongs to a value."""
    is_last = index + 1 == len(marks)
    if marks[index].group() != _QWEN_END_FUNCTION or not (
        is_last or marks[index + 1].group() == _QWEN_FUNCTION
    ):
        return False
    end = len(text) if is_last else marks[index + 1].start()
    return not text[marks[index].end() : end].strip()


class SeedOssToolParser(Qwen3CoderToolParser):
    """Seed-OSS: the same between `<seed:tool_call>` and `</seed:tool_call>`."""

    call_marks = (_SEED_CALL, _SEED_END_CALL)
    starts = (_SEED_CALL, _QWEN_FUNCTION)
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
    starts = (_SEED_CALL, _QWEN_FUNCTION)


_GLM_CALL, _GLM_END_CALL = "<tool_call>", "</tool_call>"
_GLM_KEY, _GLM_END_KEY = "<arg_key>", "</arg_key>"
_GLM_VALUE, _GLM_END_VALUE = "<arg_value>", "</arg_value>"
_GLM_MAX_KEY_CHARS = 256
_HY_NAME_END = "<tool_sep>"
_GLM_OPENING = re.compile(
    rf"<tool_call>\s{{0,16}}(?P<name>{FUNCTION_NAME})(?:{_HY_NAME_END})?\s{{0,16}}"
    rf"(?=<arg_key>[^<]{{1,{_GLM_MAX_KEY_CHARS}}}</arg_key>\s{{0,16}}<arg_value>)"
)
_GLM_ARGUMENT = re.compile(
    rf"\s{{0,16}}<arg_key>(?P<key>[^<]{{1,{_GLM_MAX_KEY_CHARS}}})</arg_key>\s{{0,16}}<arg_value>"
)


class Glm45ToolParser(ToolParser):
    """GLM-4.5 to GLM-4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    starts = (_GLM_CALL,)
    other_markers: ClassVar[tuple[str, ...]] = (
        *(_GLM_END_CALL, _GLM_KEY, _GLM_END_KEY, _GLM_VALUE, _GLM_END_VALUE),
    )
    call_form = ToolCallForm(
        begin="<tool_call>{name}\n", end="\n</tool_call>", style="glm_xml", separator="\n"
    )

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._types = ParameterTypes(tools)

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_GLM_END_CALL, _GLM_VALUE, _GLM_END_VALUE)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_GLM_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return GlmArguments(partial(self._types.value, opening.name))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        if not text.endswith(_GLM_END_CALL):
            return None  # more parameters, or the rest of the name, may be missing
        body = text[len(_GLM_CALL) : -len(_GLM_END_CALL)]
        first = body.find(_GLM_KEY)
        name = (body if first < 0 else body[:first]).strip().removesuffix(_HY_NAME_END)
        if not self.is_function(name, is_unknown_allowed=first >= 0):
            return None
        arguments: dict[str, Any] = {}
        position = first if first >= 0 else len(body)
        while (begin := _skip_space(body, position)) < len(body):
            if not body.startswith(_GLM_KEY, begin):
                return None
            key_end = body.find(_GLM_END_KEY, begin)
            value_begin = _skip_space(body, key_end + len(_GLM_END_KEY)) if key_end >= 0 else -1
            if key_end < 0 or not body.startswith(_GLM_VALUE, value_begin):
                return None
            value_end = body.find(_GLM_END_VALUE, value_begin)
            if value_end < 0:
                return None
            key = body[begin + len(_GLM_KEY) : key_end].strip()
            if key not in arguments:
                arguments[key] = self._types.value(name, key, body[value_begin + len(_GLM_VALUE) : value_end])
            position = value_end + len(_GLM_END_VALUE)
        written = arguments_text(arguments)
        return None if written is None else (ParsedCall(name, written),)


class HyV3ToolParser(Glm45ToolParser):
    """Hy3 preview: `<tool_call>NAME<tool_sep>`, then as GLM-4.5, within `<tool_calls>` and `</tool_calls>`."""

    section = ("<tool_calls>", "</tool_calls>")
    other_markers = (*Glm45ToolParser.other_markers, _HY_NAME_END)
    call_form = ToolCallForm(
        begin=f"<tool_call>{{name}}{_HY_NAME_END}\n",
        end="\n</tool_call>",
        style="glm_xml",
        separator="\n",
        first="<tool_calls>\n",
        last="\n</tool_calls>",
    )


class GlmArguments(ConvertedArguments):
    """Reads keys and values."""

    argument = _GLM_ARGUMENT
    max_head_chars = _GLM_MAX_KEY_CHARS + 64
    end = _GLM_END_CALL
    starts = (_GLM_CALL,)
    value_marks = Markers((_GLM_END_VALUE,))

    def may_go_on(self, head: str) -> bool:
        if _GLM_END_CALL.startswith(head) or _GLM_KEY.startswith(head):
            return True
        key, mark, rest = head.removeprefix(_GLM_KEY).partition(_GLM_END_KEY)
        if not head.startswith(_GLM_KEY):
            return False
        if mark:
            return "<" not in key and _GLM_VALUE.startswith(rest.lstrip())
        name, _, begun = key.partition("<")
        return bool(name) and _GLM_END_KEY.startswith(f"<{begun}")

    def value_end(self, text: str, position: int, is_last: bool) -> tuple[int, int | None]:
        end = text.find(_GLM_END_VALUE, position)
        if end >= 0:
            return end, end + len(_GLM_END_VALUE)
        return len(text) - self.value_marks.overlap(text, position), None


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


_GEMMA_MAX_DEPTH = 64
_GEMMA_CALL, _GEMMA_END_CALL, _GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_GEMMA_HEAD = re.compile(rf"<\|tool_call>\s{{0,16}}call:(?P<name>{FUNCTION_NAME})\s{{0,16}}(?={{)")
_GEMMA_SPACE = re.compile(r"\s*")
_GEMMA_KEY = re.compile(
    r'(?:<\|"\|>(?P<marked>[^<>]{1,256})<\|"\|>|"(?P<quoted>[^"\\]{1,256})"|(?P<bare>[^\s{}\[\]:,"<>]{1,256}))\s*:'
)
_GEMMA_NUMBER = re.compile(r"-?\d{1,400}(?P<rest>\.\d{1,400})?(?P<exponent>[eE][+-]?\d{1,3})?")
_GEMMA_WORD = re.compile(r"[A-Za-z]+")
_GEMMA_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


class Gemma4ToolParser(ToolParser):
    """Gemma 4: `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`.

    Keys are bare, strings stand between two marks `<|"|>` without escapes, and other values are as in JSON. A call is
    read when it is complete.
    """

    starts = (_GEMMA_CALL,)
    other_markers = (_GEMMA_END_CALL, _GEMMA_QUOTE)
    call_form = ToolCallForm(begin=f"{_GEMMA_CALL}call:{{name}}", end=_GEMMA_END_CALL, style="gemma")

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_GEMMA_END_CALL, _GEMMA_QUOTE, _GEMMA_QUOTE)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        head = _GEMMA_HEAD.match(text)
        if head is None or not text.endswith(_GEMMA_END_CALL):
            return None
        try:
            value, end = _gemma_value(text, head.end(), 0)
        except ValueError:
            return None
        written = arguments_text(value)
        if written is None or text[end:].strip() != _GEMMA_END_CALL:
            return None
        return (ParsedCall(head["name"], written),)


def _gemma_value(text: str, position: int, depth: int) -> tuple[Any, int]:
    """Read a value; return it, and the offset after it.

    Raises:
        ValueError: there is none, or it is nested too deeply.
    """
    position = _skip_gemma_space(text, position)
    if depth > _GEMMA_MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith("{", position):
        return _gemma_items(text, position + 1, "}", depth)
    if text.startswith("[", position):
        return _gemma_items(text, position + 1, "]", depth)
    for quote in (_GEMMA_QUOTE, '"'):  # JSON's quotes are not Gemma's, but some outputs have them
        if text.startswith(quote, position):
            begin = position + len(quote)
            return text[begin : (end := text.index(quote, begin))], end + len(quote)
    if (number := _GEMMA_NUMBER.match(text, position)) is not None:
        is_float = number["rest"] or number["exponent"]
        return float(number.group()) if is_float else int(number.group()), number.end()
    word = _GEMMA_WORD.match(text, position)
    if word is None or word.group() not in _GEMMA_WORDS:
        raise ValueError("not a value")
    return _GEMMA_WORDS[word.group()], word.end()


def _gemma_items(text: str, position: int, closing: str, depth: int) -> tuple[Any, int]:
    """Read the rest of an object, or of a list."""
    found: dict[str, Any] = {}
    values: list[Any] = []
    while not text.startswith(closing, position := _skip_gemma_space(text, position)):
        if found or values:
            if not text.startswith(",", position):
                raise ValueError("values without a comma")
            position = _skip_gemma_space(text, position + 1)
        if closing == "]":
            value, position = _gemma_value(text, position, depth + 1)
            values.append(value)
            continue
        key = _GEMMA_KEY.match(text, position)
        if key is None:
            raise ValueError("no key")
        found[key[key.lastgroup or 0]], position = _gemma_value(text, key.end(), depth + 1)
    return (values if closing == "]" else found), position + 1


def _skip_gemma_space(text: str, position: int) -> int:
    found = _GEMMA_SPACE.match(text, position)
    return position if found is None else found.end()


_ALIASES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str": "string",
    "dict": "object",
    "list": "array",
}
_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
_ELSEWHERE = ("const", "enum", "$ref", "anyOf", "oneOf", "allOf")
"""Keywords that tell the types of a schema without `type`."""
_KEYWORDS = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
_ANY = frozenset({"object", "array", "string"})
"""How the grammar of a required call reads the value of a schema that allows any: a number or word as a text."""
_MAX_STEPS = 200_000
"""Schemas, values and parts of references that are looked at for a request's parameters, because references multiply
them. The parameters after them are text, or what their own `type` says."""
_MAX_REFERENCE_CHARS = 1024
_MAX_NUMBER_CHARS = 400


class _Values(NamedTuple):
    """What the values of a parameter may be."""

    types: frozenset[str] = frozenset({"string"})
    texts: Mapping[str, str] = {}
    """For texts that the schema lists, with and without the white space around them, the text."""
    is_bare: bool = False
    """Whether white space around a text is no part of it."""
    max_chars: int | None = None
    """Length beyond which white space around a text is no part of it."""

    def read(self, text: str) -> Any:
        for written in (text, text.strip()):
            if written in self.texts:
                return self.texts[written]
        value = read_value(text, self.types)
        is_long = self.max_chars is not None and len(text) > self.max_chars
        return text.strip() if value is text and (self.is_bare or is_long) else value


class ParameterTypes:
    """Values of arguments that a model writes as plain text, by the JSON schema of the function.

    As in vLLM the first type counts that the text can be read as, in the order null, integer, number, boolean, object,
    array, string; the text itself is the value if none fits. Texts of an `enum` or `const` come before all of these.
    The grammar of calls that `tool_choice` requires allows white space around values that a schema limits; it is
    removed here.

    Args:
        tools: tool definitions of the request.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._functions: dict[str, Any] = {}
        for tool in tools:
            if isinstance(described := tool.get("function"), Mapping):
                self._functions[str(described.get("name"))] = described.get("parameters")
        self._declared: dict[str, tuple[dict[str, list[Any]], list[Any]]] = {}
        """For each function that was called, the schemas of its parameters, and those of all others."""
        self._known: dict[tuple[str, str | None], _Values] = {}
        """For each parameter that was read; None stands for those that are not declared."""
        self._steps_left = _MAX_STEPS

    def value(self, function: str, parameter: str, text: str) -> Any:
        """Read the text of a function's argument."""
        if function not in self._functions:
            return text
        if function not in self._declared:
            self._declared[function] = self._read_function(self._functions[function])
        declared, others = self._declared[function]
        key = function, parameter if parameter in declared else None
        values = self._known.get(key)
        if values is None:
            schemas = declared.get(parameter, others)
            values = self._known[key] = self._read_schemas(self._functions[function], schemas)
        return values.read(text)

    def _read_function(self, root: Any) -> tuple[dict[str, list[Any]], list[Any]]:
        declared: dict[str, list[Any]] = {}
        others = []
        for schema in self._reachable(root, [root]):
            if isinstance(properties := schema.get("properties"), Mapping):
                for name, value in properties.items():
                    declared.setdefault(name, []).append(value)
            if (other := schema.get("additionalProperties")) is True or isinstance(other, Mapping):
                others.append(other)
        return declared, others

    def _read_schemas(self, root: Any, schemas: Sequence[Any]) -> _Values:
        types: set[str] = set()
        texts: dict[str, str] = {}
        is_bare, lengths = False, []
        for schema in self._reachable(root, schemas):
            types |= _own_types(schema)
            for listed in ([schema["const"]] if "const" in schema else [], _list(schema.get("enum"))):
                listed = listed[: self._steps_left]
                self._steps_left -= len(listed)
                types |= {_TYPE_NAMES.get(kind, "object") for kind in set(map(type, listed))}
                for text in listed:
                    if isinstance(text, str):
                        texts[text] = text
                        texts.setdefault(text.strip(), text)
            is_bare = is_bare or "pattern" in schema or "format" in schema
            if type(length := schema.get("maxLength")) is int:
                lengths.append(length)
        if True in schemas:
            types |= _ANY
        return _Values(frozenset(types) or _Values().types, texts, is_bare, max(lengths) if lengths else None)

    def _reachable(self, root: Any, schemas: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
        """Return the schemas, with those that they refer to and combine."""
        seen: set[int] = set()
        left = list(reversed(schemas))
        while left:
            schema = left.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            if self._steps_left <= 0:
                return
            self._steps_left -= 1
            for key in ("anyOf", "oneOf", "allOf"):
                left += reversed(_list(schema.get(key)))
            if isinstance(reference := schema.get("$ref"), str) and len(reference) <= _MAX_REFERENCE_CHARS:
                self._steps_left = max(0, self._steps_left - reference.count("/"))
                left.append(_resolved(root, reference))


def read_value(text: str, types: Collection[str]) -> Any:
    """Read a text as the first type that fits it; the text itself if none does."""
    bare = text.strip()
    if "null" in types and bare.lower() == "null":
        return None
    if len(bare) <= _MAX_NUMBER_CHARS:
        if "integer" in types and (number := _number(bare, int)) is not None:
            return number
        if "number" in types and (number := _number(bare, int, float)) is not None:
            return number
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    for kind, expected in (("object", dict), ("array", list)):
        if kind in types and isinstance(value := _json(bare), expected):
            return value
    return text


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, or that its keywords are about."""
    given = schema.get("type")
    found = {
        _ALIASES.get(name.lower(), name.lower()) for name in _list(given) or [given] if isinstance(name, str)
    }
    if found or any(key in schema for key in _ELSEWHERE):
        return found
    for kind, keywords in _KEYWORDS.items():
        if any(key in schema for key in keywords):
            return {kind}
    return set(_ANY)


def _resolved(root: Any, reference: str) -> Any:
    """Return what a reference within the schema leads to; None if it leads nowhere."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = root
    for part in filter(None, reference[2:].split("/")):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(text: str, *kinds: type[int] | type[float]) -> int | float | None:
    for kind in kinds:
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) and "_" not in text else None
    return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
