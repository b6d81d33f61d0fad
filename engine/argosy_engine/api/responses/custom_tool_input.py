"""CustomToolInput: the text that a model gives a custom tool, read from a function's arguments while it writes them.

The function has one argument, `input`, a text (`response_tools`). So its characters are those of a JSON string, which
is read piece by piece. A model may write something else: then the text comes when the call has ended.

Invariant: the text is the pieces joined, however the arguments were cut, and it can be encoded as UTF-8.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from argosy_protocol.response_tools import CUSTOM_ARGUMENT

_HEAD: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_ARGUMENT}"\s*:\s*"')
_BEGINNING: Final = f'{{"{CUSTOM_ARGUMENT}":'
_PLAIN: Final = re.compile(r'[^"\\]+')
_ESCAPES: Final = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
}  # fmt: skip
_CODE: Final = re.compile(r"[0-9a-fA-F]{4}")
_HALF: Final = re.compile("[\ud800-\udfff]")
_MAX_HEAD: Final = 256
"""Characters before the text; more are read when the call has ended."""
_REPLACEMENT: Final = "\ufffd"
"""In place of half a surrogate pair."""


class CustomToolInput:
    """The input of one call."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._pending = ""
        """What is not read yet: the head, or the beginning of an escape."""
        self._state = "head"
        self._high: str | None = None
        """The first half of a surrogate pair."""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def feed(self, arguments: str) -> str:
        """Return what more of the arguments adds to the text."""
        if self._state == "over":
            return ""
        self._pending += arguments
        if self._state != "text":
            self._arguments.append(arguments)
        if self._state == "head":
            self._read_head()
        return self._kept(self._read_text()) if self._state == "text" else ""

    def end(self) -> str:
        """Return what the text ends with, once there are no more arguments."""
        if self._state == "text":
            rest = self._half()  # an escape that was cut off is no part of it
        elif self._state == "over":
            rest = ""
        else:
            rest = _text_of("".join(self._arguments))
        self._state = "over"
        return self._kept(rest)

    def _kept(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _read_head(self) -> None:
        head = _HEAD.match(self._pending)
        if head is not None:
            self._state, self._pending = "text", self._pending[head.end() :]
            self._arguments.clear()
        elif len(self._pending) > _MAX_HEAD:
            self._state, self._pending = "unread", ""

    def _read_text(self) -> str:
        """Read the text as far as it is certain; what follows its end is ignored."""
        given, at, made = self._pending, 0, []
        while at < len(given):
            plain = _PLAIN.match(given, at)
            if plain is not None:
                made.append(self._half() + _encodable(plain[0]))
                at = plain.end()
            elif given[at] == '"':
                made.append(self._half())
                self._state, at = "over", len(given)
            else:
                length = 6 if given.startswith("u", at + 1) else 2
                if len(given) < at + length and not _is_no_code(given[at + 2 :], length):
                    break
                at += self._read_escape(given, at, made)
        self._pending = given[at:]
        return "".join(made)

    def _read_escape(self, given: str, at: int, made: list[str]) -> int:
        """Read an escape, and return its length; one that JSON does not have stands for itself."""
        code = _CODE.match(given, at + 2) if given[at + 1] == "u" else None
        if code is None:
            sign = given[at + 1]
            made.append(self._half() + _ESCAPES.get(sign, f"\\{sign}"))
            return 2
        sign = chr(int(code[0], 16))
        if "\ud800" <= sign <= "\udbff":
            made.append(self._half())
            self._high = sign
        elif "\udc00" <= sign <= "\udfff":
            high, self._high = self._high, None
            pair = None if high is None else (high + sign).encode("utf-16", "surrogatepass").decode("utf-16")
            made.append(pair or _REPLACEMENT)
        else:
            made.append(self._half() + sign)
        return 6

    def _half(self) -> str:
        """Return what stands for a first half that no second one follows."""
        high, self._high = self._high, None
        return "" if high is None else _REPLACEMENT


def _is_no_code(rest: str, length: int) -> bool:
    """Whether the characters of an escape that is not whole yet cannot be those of a code."""
    return length == 6 and re.fullmatch(r"[0-9a-fA-F]*", rest) is None


def _encodable(text: str) -> str:
    return _HALF.sub(_REPLACEMENT, text)


def _text_of(arguments: str) -> str:
    """Return the input that arguments of any form give: the argument `input`, else the only text, else all of it; none
    if they were cut off before the text."""
    if len(arguments) <= _MAX_HEAD and _BEGINNING.startswith("".join(arguments.split())):
        return ""
    try:
        given: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return _encodable(arguments)
    if isinstance(given, dict):
        if isinstance(given.get(CUSTOM_ARGUMENT), str):
            given = given[CUSTOM_ARGUMENT]
        elif len(given) == 1 and isinstance(only := next(iter(given.values())), str):
            given = only
    return _encodable(given if isinstance(given, str) else arguments)
