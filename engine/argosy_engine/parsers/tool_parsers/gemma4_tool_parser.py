"""Gemma 4: `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`.

Keys are bare, strings stand between two marks `<|"|>` without escapes, and other values are as in JSON. A call is read
when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from argosy_engine.parsers.argument_readers import FUNCTION_NAME
from argosy_engine.parsers.arguments_text import arguments_text
from argosy_engine.parsers.parsed_output import ParsedCall
from argosy_engine.parsers.scanners import EnclosingScanner, Scanner
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser
from argosy_engine.structured.structural_tag import ToolCallForm

MAX_DEPTH = 64
_CALL, _END_CALL, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(rf"<\|tool_call>\s{{0,16}}call:(?P<name>{FUNCTION_NAME})\s{{0,16}}(?={{)")
_SPACE = re.compile(r"\s*")
_KEY = re.compile(
    r'(?:<\|"\|>(?P<marked>[^<>]{1,256})<\|"\|>|"(?P<quoted>[^"\\]{1,256})"|(?P<bare>[^\s{}\[\]:,"<>]{1,256}))\s*:'
)
_NUMBER = re.compile(r"-?\d{1,400}(?P<rest>\.\d{1,400})?(?P<exponent>[eE][+-]?\d{1,3})?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


class Gemma4ToolParser(ToolParser):
    starts = (_CALL,)
    other_markers = (_END_CALL, _QUOTE)
    call_form = ToolCallForm(begin=f"{_CALL}call:{{name}}", end=_END_CALL, style="gemma")

    def scanner(self, start: str) -> Scanner:
        return EnclosingScanner(_END_CALL, _QUOTE, _QUOTE)

    def parse(self, text: str) -> Sequence[ParsedCall] | None:
        head = _HEAD.match(text)
        if head is None or not text.endswith(_END_CALL):
            return None
        try:
            value, end = _value(text, head.end(), 0)
        except ValueError:
            return None
        written = arguments_text(value)
        if written is None or text[end:].strip() != _END_CALL:
            return None
        return (ParsedCall(head["name"], written),)


def _value(text: str, position: int, depth: int) -> tuple[Any, int]:
    """Read a value; return it, and the offset after it.

    Raises:
        ValueError: there is none, or it is nested too deeply.
    """
    position = _skip(text, position)
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith("{", position):
        return _items(text, position + 1, "}", depth)
    if text.startswith("[", position):
        return _items(text, position + 1, "]", depth)
    for quote in (_QUOTE, '"'):  # JSON's quotes are not Gemma's, but some outputs have them
        if text.startswith(quote, position):
            begin = position + len(quote)
            return text[begin : (end := text.index(quote, begin))], end + len(quote)
    if (number := _NUMBER.match(text, position)) is not None:
        is_float = number["rest"] or number["exponent"]
        return float(number.group()) if is_float else int(number.group()), number.end()
    word = _WORD.match(text, position)
    if word is None or word.group() not in _WORDS:
        raise ValueError("not a value")
    return _WORDS[word.group()], word.end()


def _items(text: str, position: int, closing: str, depth: int) -> tuple[Any, int]:
    """Read the rest of an object, or of a list."""
    found: dict[str, Any] = {}
    values: list[Any] = []
    while not text.startswith(closing, position := _skip(text, position)):
        if found or values:
            if not text.startswith(",", position):
                raise ValueError("values without a comma")
            position = _skip(text, position + 1)
        if closing == "]":
            value, position = _value(text, position, depth + 1)
            values.append(value)
            continue
        key = _KEY.match(text, position)
        if key is None:
            raise ValueError("no key")
        found[key[key.lastgroup or 0]], position = _value(text, key.end(), depth + 1)
    return (values if closing == "]" else found), position + 1


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return position if found is None else found.end()
