"""Tool parsers of families that write calls as JSON: alone, between marks or in lists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, ClassVar

from argosy_engine.parsers.parsed_output import (
    FUNCTION_NAME,
    OBJECT_START,
    ArgumentReader,
    CallOpening,
    JsonArguments,
    ParsedCall,
    is_text,
    opening_of,
)
from argosy_engine.parsers.scanners import EnclosingScanner, HeadScanner, Scanner, ValueScanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import (
    ToolParser,
    call_of,
    calls_of,
    json_arguments,
    json_value,
)
from argosy_engine.structured.structural_tag import NUMBER, ToolCallForm

_HERMES_CALL, _HERMES_END_CALL = "<tool_call>", "</tool_call>"
_HERMES_OPENING = re.compile(
    rf'<tool_call>\s{{0,16}}\{{\s{{0,16}}"name"\s?:\s?"(?P<name>{FUNCTION_NAME})"\s{{0,16}},\s{{0,16}}'
    rf'"arguments"\s?:\s{{0,16}}{OBJECT_START}'
)


class HermesToolParser(ToolParser):
    """Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    starts = (_HERMES_CALL,)
    other_markers = (_HERMES_END_CALL,)

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_HERMES_END_CALL)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_HERMES_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_HERMES_CALL, _HERMES_END_CALL), (("}",), (_HERMES_END_CALL,)))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        return self.parse_unclosed(text.removesuffix(_HERMES_END_CALL))

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        call = call_of(json_value(text[len(_HERMES_CALL) :]))
        return None if call is None else (call,)


_LIST_HEAD, _LIST_SPACE = re.compile(r"\s*(?P<list>\[)(?=\s*[{\]])"), re.compile(r"\s*\[?\s*")


class GraniteToolParser(ToolParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, in 3.1 after `<tool_call>`. The calls of a
    list are read when all of it is complete."""

    starts = ("<|tool_call|>", "<tool_call>")
    call_form = ToolCallForm(
        begin='{"name": {json_name}, "arguments": ', end="}", separator=", ", first="<|tool_call|>[", last="]"
    )

    def scanner(self, start: str) -> Scanner:
        return HeadScanner(_LIST_HEAD, _LIST_SPACE, ValueScanner())

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        start = next(start for start in self.starts if text.startswith(start))
        return calls_of(json_value(text[len(start) :]), ("arguments",))


class _MarkedListToolParser(ToolParser):
    """A list between two marks, whose brackets, and whose last mark, may be missing."""

    end: ClassVar[str]

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(self.end)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        return self.parse_unclosed(text.removesuffix(self.end))

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        body = text[len(self.starts[0]) :].strip()
        return self._calls(json_value(body if body.startswith("[") else f"[{body}]"))

    def _calls(self, values: Any) -> Sequence[ParsedCall] | None:
        return calls_of(values, ("arguments",))


class NemotronJsonToolParser(_MarkedListToolParser):
    """Nemotron Nano 2 and Llama Nemotron: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`."""

    starts = ("<TOOLCALL>",)
    end = "</TOOLCALL>"
    other_markers = (end,)
    call_form = GraniteToolParser.call_form._replace(first="<TOOLCALL>[", last="]</TOOLCALL>")


class CohereCommandToolParser(_MarkedListToolParser):
    """Command R7B, Command A and later: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters":
    {...}}, ...]<|END_ACTION|>`.

    The model numbers the calls of each answer from 0, which makes no id for a whole chat: calls get our ids, and the
    templates number them anew.
    """

    starts = ("<|START_ACTION|>",)
    end = "<|END_ACTION|>"
    other_markers = (end,)
    call_form = ToolCallForm(
        begin=f'{{"tool_call_id": "{NUMBER}", "tool_name": {{json_name}}, "parameters": ',
        end="}",
        separator=",\n    ",
        first="<|START_ACTION|>[\n    ",
        last="\n]<|END_ACTION|>",
    )

    def _calls(self, values: Any) -> Sequence[ParsedCall] | None:
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            return None
        return calls_of([{**value, "name": value.get("tool_name")} for value in values], ("parameters",))


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_OPENING = re.compile(
    r'(?:<\|python_tag\|>)?\s{0,16}\{\s{0,16}(?:"(?:type|id)"\s?:\s?"[\w.-]{0,64}"\s?,\s{0,16}){0,2}'
    rf'"name"\s?:\s?"(?P<name>{FUNCTION_NAME})"\s{{0,16}},\s{{0,16}}"(?:parameters|arguments)"\s?:\s{{0,16}}'
    rf"{OBJECT_START}"
)
_LLAMA_KEYS = "name|type|id|function|parameters|arguments"
_LLAMA_HEAD = re.compile(rf'\s*(?P<value>\{{)\s*"(?:{_LLAMA_KEYS})"')
_LLAMA_BEGUN_HEAD = re.compile(r'\s*(?:\{\s*(?:"\w*"?)?)?')
_LLAMA_AFTER_BRACE, _LLAMA_BEGUN_KEY = re.compile(r'(?P<value>\s*)"'), re.compile(r"\s*")
_LLAMA_AFTER_NAME, _LLAMA_BEGUN_NAME = re.compile(r'(?P<value>\s*):\s*"'), re.compile(r"\s*(?::\s*)?")


class Llama3JsonToolParser(ToolParser):
    """Llama 3 and 4: `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`, several separated by `; `.

    A call begins the content or follows another one; in the middle of prose it counts if it begins with the name.
    """

    starts = (_LLAMA_TAG, '{"name"')
    first_starts = ("{",)
    separators = ";,"
    call_form = ToolCallForm(begin='{"name": {json_name}, "parameters": ', end="}", separator="; ")

    def scanner(self, start: str) -> Scanner:
        value = ValueScanner()
        if start == _LLAMA_TAG:
            return HeadScanner(_LLAMA_HEAD, _LLAMA_BEGUN_HEAD, value)
        value.feed(start, 0)
        if start == "{":
            return HeadScanner(_LLAMA_AFTER_BRACE, _LLAMA_BEGUN_KEY, value)
        return HeadScanner(_LLAMA_AFTER_NAME, _LLAMA_BEGUN_NAME, value)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_LLAMA_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_LLAMA_TAG,), (("}",),))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        call = call_of(
            json_value(text.removeprefix(_LLAMA_TAG)), ("arguments", "parameters"), defaults_to_none=False
        )
        return None if call is None else (call,)


_MISTRAL_CALLS, _MISTRAL_ARGS, _MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MISTRAL_BEFORE_VALUE = re.compile(r"(?:(?!\[TOOL_CALLS\])[^{])*")
_MISTRAL_HEAD = re.compile(
    rf"\s*(?P<list>\[(?=\s*[{{\]])|\{{)|{_MISTRAL_BEFORE_VALUE.pattern}(?P<arguments>\{{)"
)
_MISTRAL_OPENING = re.compile(
    rf"\[TOOL_CALLS\]\s{{0,16}}(?P<name>{FUNCTION_NAME})\s{{0,16}}(?:\[CALL_ID\]\s?(?P<id>\w{{0,64}})\s?)?"
    rf"(?P<mark>\[ARGS\])?\s{{0,16}}{OBJECT_START}"
)
_MISTRAL_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MISTRAL_ID_CHARS = 9


class MistralToolParser(ToolParser):
    """Mistral: `[TOOL_CALLS]NAME[ARGS]{...}` for each call or, in older models, `[TOOL_CALLS][{"name": ...,
    "arguments": {...}}, ...]`. `[CALL_ID]` may stand between name and arguments, and `[ARGS]` may be missing.

    The templates accept only ids of nine letters and digits.
    """

    starts = (_MISTRAL_CALLS,)
    other_markers = (_MISTRAL_ARGS, _MISTRAL_CALL_ID)
    separators = ";,"
    call_form = ToolCallForm(begin=f"{_MISTRAL_CALLS}{{name}}{_MISTRAL_ARGS}", end="")

    def scanner(self, start: str) -> Scanner:
        return HeadScanner(_MISTRAL_HEAD, _MISTRAL_BEFORE_VALUE, ValueScanner())

    def opening(self, text: str) -> CallOpening | None:
        found = _MISTRAL_OPENING.match(text)
        if found is None or not self.is_function(found["name"], is_unknown_allowed=bool(found["mark"])):
            return None
        opening = opening_of(found)
        return opening if opening is None or _is_mistral_id(opening.id) else opening._replace(id="")

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_MISTRAL_CALLS,), ())

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        body = text[len(_MISTRAL_CALLS) :].strip()
        if body.startswith("["):
            return calls_of(json_value(body), ("arguments",))
        if body.startswith("{"):
            call = call_of(json_value(body))
            return None if call is None else (call,)
        head, brace, rest = body.partition("{")
        head, mark, between = head.partition(_MISTRAL_ARGS)
        name, _, call_id = head.partition(_MISTRAL_CALL_ID)
        name, call_id = name.strip(), call_id.strip()
        arguments = json_arguments(brace + rest)
        is_call = not between.strip() and self.is_function(name, is_unknown_allowed=bool(mark))
        if arguments is None or not is_call:
            return None
        return (ParsedCall(name, arguments, call_id if _is_mistral_id(call_id) else ""),)

    def call_id(self, request_id: str, choice: int, number: int, call: ParsedCall) -> str:
        if call.id:
            return call.id
        digest = sha256(f"{request_id}:{choice}:{number}".encode()).digest()
        return "".join(
            _MISTRAL_ALPHABET[byte % len(_MISTRAL_ALPHABET)] for byte in digest[:_MISTRAL_ID_CHARS]
        )


def _is_mistral_id(text: str) -> bool:
    return len(text) == _MISTRAL_ID_CHARS and all(char in _MISTRAL_ALPHABET for char in text)


_KIMI_SECTION, _KIMI_END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END_CALL = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_KIMI_MAX_ID_CHARS = 256
_KIMI_OPENING = re.compile(
    rf"<\|tool_call_begin\|>\s{{0,16}}(?P<id>(?:functions\.)?(?P<name>{FUNCTION_NAME}):[0-9]{{1,9}})\s{{0,16}}"
    rf"<\|tool_call_argument_begin\|>\s{{0,16}}{OBJECT_START}"
)


class KimiK2ToolParser(ToolParser):
    """Kimi K2: calls `<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}<|tool_call_end|>`
    within `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`.

    What stands before the arguments is the call's id, by which the template refers to the call when it renders its
    result.
    """

    starts = (_KIMI_CALL,)
    section = (_KIMI_SECTION, _KIMI_END_SECTION)
    other_markers = (_KIMI_ARGUMENTS, _KIMI_END_CALL)
    call_form = ToolCallForm(
        begin=f"{_KIMI_CALL}functions.{{name}}:{{number}}{_KIMI_ARGUMENTS}",
        end=_KIMI_END_CALL,
        first=_KIMI_SECTION,
        last=_KIMI_END_SECTION,
    )

    def call_id(self, request_id: str, choice: int, number: int, call: ParsedCall) -> str:
        """Return the id that the model wrote, or one of its form: the template renders the name by the id alone."""
        return call.id or f"functions.{call.name}:{number}"

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_KIMI_END_CALL)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_KIMI_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_KIMI_CALL, _KIMI_END_CALL, _KIMI_END_SECTION), ((_KIMI_END_CALL,),))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        body = text.removesuffix(_KIMI_END_CALL)
        return self.parse_unclosed(body + "{}" if body.rstrip().endswith(_KIMI_ARGUMENTS) else body)

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        head, mark, body = text[len(_KIMI_CALL) :].partition(_KIMI_ARGUMENTS)
        call_id = head.strip()
        name, colon, number = call_id.rpartition(":")
        name = name.removeprefix("functions.")
        if not mark or not colon or not number.isdecimal() or not name or len(call_id) > _KIMI_MAX_ID_CHARS:
            return None
        arguments = json_arguments(body)
        return (ParsedCall(name, arguments, call_id),) if arguments is not None and is_text(call_id) else None


_SOLAR_SECTION, _SOLAR_END_SECTION = "<|tool_calls|>", "<|calls|>"
_SOLAR_CALL, _SOLAR_NAME, _SOLAR_ARGUMENTS = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"
_SOLAR_END_CALL = "<|tool_call:end|>"
_SOLAR_ID = r"[A-Za-z0-9_-]{0,64}"
_SOLAR_HEAD = re.compile(
    rf"<\|tool_call:begin\|>\s{{0,16}}(?P<id>{_SOLAR_ID})\s{{0,16}}<\|tool_call:name\|>\s{{0,16}}(?P<name>{FUNCTION_NAME})"
    r"\s{0,16}<\|tool_call:args\|>\s{0,16}"
)
_SOLAR_OPENING = re.compile(_SOLAR_HEAD.pattern + OBJECT_START)


class SolarOpenToolParser(ToolParser):
    """Solar Open: calls `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>` after
    `<|tool_calls|>`, in a message of their own. The token `<|calls|>` ends it, and the output.

    The id is one that the model makes up; the template writes it before the call's result.
    """

    starts = (_SOLAR_CALL,)
    section = (_SOLAR_SECTION, _SOLAR_END_SECTION)
    other_markers = (_SOLAR_NAME, _SOLAR_ARGUMENTS, _SOLAR_END_CALL)
    call_form = ToolCallForm(
        begin=f"{_SOLAR_CALL}{{number}}{_SOLAR_NAME}{{name}}{_SOLAR_ARGUMENTS}",
        end=_SOLAR_END_CALL,
        first=_SOLAR_SECTION,
        last=_SOLAR_END_SECTION,
    )

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_SOLAR_END_CALL)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_SOLAR_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments((_SOLAR_CALL, _SOLAR_END_CALL, _SOLAR_END_SECTION), ((_SOLAR_END_CALL,),))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        head = _SOLAR_HEAD.match(text)
        if head is None or not text.endswith(_SOLAR_END_CALL):
            return None
        arguments = json_arguments(text[head.end() : -len(_SOLAR_END_CALL)].strip() or "{}")
        return None if arguments is None else (ParsedCall(head["name"], arguments, head["id"]),)

    def parse_unclosed(self, text: str) -> Sequence[ParsedCall] | None:
        return self.parse(text + _SOLAR_END_CALL) if not text.rstrip().endswith(_SOLAR_ARGUMENTS) else None


_DEEPSEEK_SECTION, _DEEPSEEK_END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR, _DEEPSEEK_END_CALL = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_DEEPSEEK_BLOCK, _DEEPSEEK_END_BLOCK = "```json", "```"
_DEEPSEEK_OPENING = re.compile(
    rf"{_DEEPSEEK_CALL}[^<]{{0,64}}{_DEEPSEEK_SEPARATOR}\s{{0,16}}(?P<name>{FUNCTION_NAME})\s{{0,16}}```json\s{{0,16}}{OBJECT_START}"
)
_DEEPSEEK_BARE_OPENING = re.compile(
    rf"{_DEEPSEEK_CALL}\s{{0,16}}(?P<name>{FUNCTION_NAME})\s{{0,16}}{_DEEPSEEK_SEPARATOR}\s{{0,16}}{OBJECT_START}"
)
_DEEPSEEK_ENDS = (_DEEPSEEK_CALL, _DEEPSEEK_END_CALL, _DEEPSEEK_END_SECTION)


class DeepSeekV3ToolParser(ToolParser):
    """DeepSeek V3 and R1: calls of a type, a name and a JSON code block, in a section of special tokens."""

    starts = (_DEEPSEEK_CALL,)
    section = (_DEEPSEEK_SECTION, _DEEPSEEK_END_SECTION)
    other_markers = (_DEEPSEEK_SEPARATOR, _DEEPSEEK_END_CALL)
    call_form = ToolCallForm(
        begin=f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEPARATOR}{{name}}\n```json\n",
        end=f"\n```{_DEEPSEEK_END_CALL}",
        separator="\n",
        first=_DEEPSEEK_SECTION,
        last=_DEEPSEEK_END_SECTION,
    )

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_DEEPSEEK_END_CALL)

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_DEEPSEEK_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments(_DEEPSEEK_ENDS, ((_DEEPSEEK_END_BLOCK,), (_DEEPSEEK_END_CALL,)))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        _, mark, body = (
            text[len(_DEEPSEEK_CALL) :].removesuffix(_DEEPSEEK_END_CALL).partition(_DEEPSEEK_SEPARATOR)
        )
        name, block, arguments = body.partition(_DEEPSEEK_BLOCK)
        if not mark or not block:
            return None
        return _deepseek_call(name, arguments.rstrip().removesuffix(_DEEPSEEK_END_BLOCK))


class DeepSeekV31ToolParser(DeepSeekV3ToolParser):
    """DeepSeek V3.1: name and JSON, without type and code block."""

    call_form = ToolCallForm(
        begin=f"{_DEEPSEEK_CALL}{{name}}{_DEEPSEEK_SEPARATOR}",
        end=_DEEPSEEK_END_CALL,
        first=_DEEPSEEK_SECTION,
        last=_DEEPSEEK_END_SECTION,
    )

    def opening(self, text: str) -> CallOpening | None:
        return opening_of(_DEEPSEEK_BARE_OPENING.match(text))

    def argument_reader(self, opening: CallOpening) -> ArgumentReader:
        return JsonArguments(_DEEPSEEK_ENDS, ((_DEEPSEEK_END_CALL,),))

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        name, mark, arguments = (
            text[len(_DEEPSEEK_CALL) :].removesuffix(_DEEPSEEK_END_CALL).partition(_DEEPSEEK_SEPARATOR)
        )
        return _deepseek_call(name, arguments) if mark else None


def _deepseek_call(name: str, body: str) -> Sequence[ParsedCall] | None:
    name, arguments = name.strip(), json_arguments(body)
    return (ParsedCall(name, arguments),) if name and is_text(name) and arguments is not None else None
