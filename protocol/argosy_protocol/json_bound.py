"""Bounds on JSON from clients: how deeply it nests and how many values it has.

Depth bounds the stack of whatever walks a decoded value, which is all recursive; the number of values bounds the time
and memory of decoding, which the number of bytes hardly does.

Owns: the bounds, checks that take microseconds on ordinary bodies and are linear on any other, and what clients are
told of a body that cannot be read.
Must not know: what the values mean.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from argosy_protocol.errors import BadRequest, PayloadTooLarge

_Body = TypeVar("_Body")

MAX_DEPTH = 128
"""Levels of lists and objects; serde_json, and with it every router and gateway written in Rust, has the same. A tool's
schema takes three levels per level of its arguments. Python's stack has 1000 frames, and `copy.deepcopy`, for one,
takes three per level."""

_ONLY_NULL = "Expected `null`, "
"""How a message about a field begins that takes no value (`openai.InternalFields`)."""

_NAMED_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `([^`]{1,128})`")
"""msgspec's messages whose path is that of the object around the field."""

MAX_VALUES = 1 << 20
"""A prompt of a million token ids. Ten million empty lists fit into the largest body and take seconds to decode, which
a thread would not help: the decoder keeps the interpreter's lock."""

_SIGNS = bytes({ord("["): 1, ord("{"): 1, ord("]"): 255, ord("}"): 255}.get(byte, 0) for byte in range(256))
_OTHERS = bytes(byte for byte in range(256) if not _SIGNS[byte])
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{\]}]', re.DOTALL)
_MAX_SEARCHED_TOKENS = 10_000
"""How far into a body the field that is nested too deeply is looked for: some milliseconds."""


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """
    Raises:
        BadRequest: not JSON, nested too deeply, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    check_values(body)
    if is_too_deep(body):
        raise BadRequest(
            f"the request is nested too deeply: more than {MAX_DEPTH} levels", param=_field_of_depth(body)
        )
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, param = message_and_field(error)
        if message.startswith(_ONLY_NULL):
            message = f"{param} is internal to engines and refused from clients"
        raise BadRequest(message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body is not valid JSON: {str(error)[:200]}") from None
    except RecursionError:  # called with hardly any stack left
        raise BadRequest("request body is nested too deeply") from None


def message_and_field(error: msgspec.ValidationError) -> tuple[str, str | None]:
    """What is wrong, and the path of the field at fault (`messages[0].role`), also where it is missing or unknown; None
    if it is not in a field."""
    message, _, path = str(error).partition(" - at ")
    field = path.partition("$.")[2].rstrip("`").partition("[...]")[0]  # [...]: some value of a mapping
    if name := _NAMED_FIELD.match(message):
        field = f"{field}.{name[1]}" if field else name[1]
    return message, field or None


def parse_text(text: str, param: str) -> Any:
    """The value of JSON that a field holds as text, under the same bounds.

    Raises:
        BadRequest: not JSON, or nested too deeply.
        PayloadTooLarge: it has too many values.
    """
    data = text.encode("utf-8", "surrogatepass")
    try:
        check_values(data)
        if is_too_deep(data):
            raise BadRequest(f"{param} is nested too deeply: more than {MAX_DEPTH} levels", param=param)
        return json.loads(text)
    except PayloadTooLarge as error:
        error.param = param
        raise
    except (ValueError, RecursionError):
        raise BadRequest(f"{param} is not valid JSON", param=param) from None


def is_too_deep(data: bytes) -> bool:
    """Whether lists and objects nest deeper than `MAX_DEPTH`, or would in what is not JSON if the rest closed them."""
    if _has_few_openings(data):
        return False
    # First as if brackets in strings were brackets, too: in prose and code they hardly nest.
    brackets = data.translate(_SIGNS, _OTHERS)
    if len(brackets) <= 2 * MAX_VALUES and _depth(brackets) <= MAX_DEPTH:
        return False
    return _depth(_without_strings(data).translate(_SIGNS, _OTHERS)) > MAX_DEPTH


def check_values(body: bytes) -> None:
    """
    Raises:
        PayloadTooLarge: there are more than `MAX_VALUES` values outside of strings.
    """
    if len(body) <= MAX_VALUES or _separators(body) <= MAX_VALUES:
        return  # prose; what looks like a separator inside a string is counted here, too
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 2 * MAX_VALUES or _separators(b"".join(bare.split(b'"')[::2])) > MAX_VALUES:
        raise PayloadTooLarge(f"the request has more than {MAX_VALUES} JSON values")


def _separators(text: bytes) -> int:
    """At least the number of values less one."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _without_strings(text: bytes) -> bytes:
    """What stands outside of strings."""
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(bare.split(b'"')[::2])


def _has_few_openings(data: bytes) -> bool:
    """Whether there are at most `MAX_DEPTH` brackets that open, in strings or not."""
    find, room = data.find, MAX_DEPTH
    for opening in (b"{", b"["):
        at = -1
        while (at := find(opening, at + 1)) >= 0:
            if not room:
                return False
            room -= 1
    return True


def _depth(signs: bytes) -> int:
    """The highest sum of a prefix of signed bytes."""
    return max(accumulate(memoryview(signs).cast("b")), default=0)


def _field_of_depth(body: bytes) -> str | None:
    """The field of a body in which it becomes too deep, None where that is far in."""
    depth, field, last = 0, None, b""
    for number, match in enumerate(_TOKEN.finditer(body)):
        token = match[0]
        if token in (b"[", b"{"):
            if depth == 1:
                field = last
            depth += 1
            if depth > MAX_DEPTH:
                return field.decode("utf-8", "replace")[1:65].rstrip('"') if field else None
        elif token in (b"]", b"}"):
            depth -= 1
        elif depth == 1:
            last = token
        if number > _MAX_SEARCHED_TOKENS:
            return None
    return None
