"""Calls in the form of Python: Llama 3.2, ToolACE and Llama 4 write a list, `[f(a=1), g(b="x")]`, with which the
content begins; LFM2 such a list between marks; OLMo 3 such calls in lines between marks.

Where a call is required, the list holds JSON objects, `[{"name": ..., "parameters": {...}}]`, which a grammar can
enforce; the parser reads both. Nothing is evaluated or compiled (CVE-2025-9141): a recursive descent over tokens,
bounded in depth, linear in the text. JSON's `true`, `false` and `null` count as Python's constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from argosy_engine.parsers.parsed_output import ParsedCall, arguments_text
from argosy_engine.parsers.scanners import HeadScanner, MarkerScanner, Scanner, ValueScanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser, calls_of, json_value
from argosy_engine.structured.structural_tag import ToolCallForm

_CALLS, _END_CALLS = "<function_calls>", "</function_calls>"
_HEAD, _BEGUN_HEAD = re.compile(r"(?P<value>\s*)(?:[^\W\d][\w.]*\s*\(|\{)"), re.compile(r"\s*[\w.]*\s*")


class PythonicToolParser(ToolParser):
    first_starts: ClassVar[tuple[str, ...]] = ("[",)
    call_form = ToolCallForm(
        begin='{"name": {json_name}, "parameters": ', end="}", separator=", ", first="[", last="]"
    )

    def scanner(self, start: str) -> Scanner:
        value = ValueScanner("'")
        value.feed(start, 0)
        return HeadScanner(_HEAD, _BEGUN_HEAD, value)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        if text.lstrip()[1:].lstrip().startswith("{"):
            return calls_of(json_value(text), ("arguments", "parameters"))
        return self._calls(text, read_calls)

    def _calls(self, text: str, read: Callable[[str], list[PythonCall]]) -> Sequence[ParsedCall] | None:
        try:
            found = read(text)
        except NotLiteral:
            return None
        calls = []
        for name, values in found:
            arguments = arguments_text(values)
            if arguments is None:
                return None
            calls.append(ParsedCall(name, arguments))
        return calls or None


class Llama4PythonicToolParser(PythonicToolParser):
    """The list may stand between `<|python_start|>` and `<|python_end|>`."""

    section = ("<|python_start|>", "<|python_end|>")


class Lfm2ToolParser(PythonicToolParser):
    """LFM2 and LFM2.5: the list stands between `<|tool_call_start|>` and `<|tool_call_end|>`."""

    section = ("<|tool_call_start|>", "<|tool_call_end|>")
    needs_section = True
    call_form = PythonicToolParser.call_form._replace(first=f"{section[0]}[", last=f"]{section[1]}")


class Olmo3ToolParser(PythonicToolParser):
    """Calls in lines between `<function_calls>` and `</function_calls>`."""

    first_starts = ()
    starts = (_CALLS,)
    other_markers = (_END_CALLS,)
    call_form = PythonicToolParser.call_form._replace(first=f"{_CALLS}[", last=f"]{_END_CALLS}")

    def scanner(self, start: str) -> Scanner:
        return MarkerScanner(_END_CALLS)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        body = text.removeprefix(_CALLS).removesuffix(_END_CALLS).strip()
        return super().parse(body) if body.startswith("[") else self._calls(body, read_call_lines)


MAX_DEPTH = 64
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[^\W\d][\w.]*)
    |(?P<number>[+-]?(?:\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?))
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<mark>[\[\](){},:=]))""",
    re.VERBOSE | re.DOTALL,
)
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(\n)|(.))", re.DOTALL
)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
_MAX_NUMBER_CHARS = 400


class PythonCall(NamedTuple):
    """A call of a function by name, with keyword arguments."""

    name: str
    arguments: dict[str, Any]


class NotLiteral(ValueError):
    """The text is not of this form."""


def read_calls(text: str) -> list[PythonCall]:
    """Read a list of calls.

    Raises:
        NotLiteral: the text is anything else, or nested too deeply.
    """
    reader = _Reader(text)
    reader.take("[")
    calls = []
    while not reader.skip("]"):
        calls.append(reader.call())
        if not reader.skip(","):
            reader.take("]")
            break
    reader.finish()
    return calls


def read_call_lines(text: str) -> list[PythonCall]:
    """Read calls that only white space separates.

    Raises:
        NotLiteral: the text is anything else, or nested too deeply.
    """
    reader = _Reader(text)
    calls = []
    while not reader.is_finished:
        calls.append(reader.call())
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._kind = self._word = ""
        self._advance()

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._position)
        if match is None:
            if self._text[self._position :].strip():
                raise NotLiteral
            self._kind, self._word = "end", ""
            return
        self._position = match.end()
        self._kind = match.lastgroup or ""
        self._word = match.group(self._kind)

    def skip(self, mark: str) -> bool:
        """Consume a mark if it comes next."""
        if self._kind != "mark" or self._word != mark:
            return False
        self._advance()
        return True

    def take(self, mark: str) -> None:
        if not self.skip(mark):
            raise NotLiteral

    @property
    def is_finished(self) -> bool:
        return self._kind == "end"

    def finish(self) -> None:
        if not self.is_finished:
            raise NotLiteral

    def call(self) -> PythonCall:
        name = self._name()
        self.take("(")
        arguments: dict[str, Any] = {}
        while not self.skip(")"):
            key = self._name()
            self.take("=")
            arguments[key] = self._value(0)
            if not self.skip(","):
                self.take(")")
                break
        return PythonCall(name, arguments)

    def _name(self) -> str:
        if self._kind != "name":
            raise NotLiteral
        name = self._word
        self._advance()
        return name

    def _value(self, depth: int) -> Any:
        kind, word = self._kind, self._word
        if depth > MAX_DEPTH or kind == "end":
            raise NotLiteral
        self._advance()
        match kind:
            case "name":
                if word not in _CONSTANTS:
                    raise NotLiteral
                return _CONSTANTS[word]
            case "number":
                return _number(word)
            case "string":
                parts = [_unescaped(word[1:-1])]
                while self._kind == "string":  # adjacent strings are one
                    parts.append(_unescaped(self._word[1:-1]))
                    self._advance()
                return "".join(parts)
        if word not in _CLOSING:
            raise NotLiteral
        return self._dict(depth) if word == "{" else self._items(_CLOSING[word], depth)

    def _items(self, closing: str, depth: int) -> Any:
        items, num_commas = [], 0
        while not self.skip(closing):
            items.append(self._value(depth + 1))
            if not self.skip(","):
                self.take(closing)
                break
            num_commas += 1
        is_parenthesised = closing == ")" and len(items) == 1 and not num_commas
        return items[0] if is_parenthesised else items

    def _dict(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not self.skip("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str | int | float | None):
                raise NotLiteral
            self.take(":")
            items[key if isinstance(key, str) else str(key)] = self._value(depth + 1)
            if not self.skip(","):
                self.take("}")
                break
        return items


def _number(text: str) -> int | float:
    if len(text) > _MAX_NUMBER_CHARS:
        raise NotLiteral
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise NotLiteral


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_replacement, text) if "\\" in text else text


def _replacement(match: re.Match[str]) -> str:
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if (digits := match.group(group)) is not None:
            code = int(digits, base)
            if code > 0x10FFFF:
                raise NotLiteral
            return chr(code)
    if match.group(5) is not None:
        return ""
    return _ESCAPES.get(match.group(6), match.group())
