"""Bounds on JSON from clients: nesting depth, number of values, and that the text is UTF-8.

The depth bounds the stack of code that walks a decoded value, all of which is recursive. The number of values bounds
the time and memory of decoding, which the number of bytes hardly does. Decoders into structs skip the names of unknown
fields unread, on which decoders into mappings fail later if they are not UTF-8.

Owns: the bounds; checks that take microseconds on ordinary bodies and linear time on any other; the errors for bodies
that cannot be decoded (`invalid_value` finds the value that they name).
Must not know: what the values mean.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator
from functools import cache
from itertools import accumulate
from types import NoneType
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from argosy_protocol.errors import BadRequest, PayloadTooLarge
from argosy_protocol.invalid_value import allowed_values, shown_value

_Body = TypeVar("_Body")
_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Work that is done in steps, between which others may have their turn."""

MAX_DEPTH = 128
"""Levels of lists and objects; the same as serde_json's limit, and so that of routers and gateways written in Rust. A
tool's schema takes three levels per level of its arguments. Python's stack has 1000 frames, and `copy.deepcopy`, for
one, takes three per level."""

_ONLY_NULL = "Expected `null`, "
"""Beginning of msgspec's message about a field that takes no value (`openai.InternalFields`)."""

_NO_MEMBER = "Invalid enum value "
"""Beginning of msgspec's message about a value that is not among those of a Literal; it quotes the value."""

_CONVERTIBLE = re.compile(
    r"Expected `(?:(?:bool|int|float)\b[^`]*`, got `str`|bool\b[^`]*`, got `int`|int\b[^`]*`, got `float`)"
)
"""Beginning of msgspec's message about a text where a boolean or a number is expected, a number for a boolean, or a
fraction for a whole number, which may be one (`2.0`, `1e3`)."""

_OUT_OF_BOUNDS = re.compile(r"Expected `(?:int|float)` ([<>]=?) ")
_CODES = {
    "<": "less_than",
    "<=": "less_than_equal",
    ">": "greater_than",
    ">=": "greater_than_equal",
}
"""Codes of errors by the bound that a number does not keep: pydantic's. They are in the texts too, as in vLLM's, since
OpenAI's client shows only those."""

_TRUNCATED = "Input data was truncated"
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")

_NAMED_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `([^`]{1,128})`")
"""msgspec's messages whose path is that of the object that contains the field."""

MAX_VALUES = 1 << 20
"""Enough for a prompt of a million token ids. Ten million empty lists fit into the largest body and take seconds to
decode; a thread would not help, since the decoder holds the GIL."""

_SIGNS = bytes({ord("["): 1, ord("{"): 1, ord("]"): 255, ord("}"): 255}.get(byte, 0) for byte in range(256))
_OTHERS = bytes(byte for byte in range(256) if not _SIGNS[byte])
_NO_QUOTES_OR_BRACKETS = _OTHERS.replace(b'"', b"")
_SPLIT_BYTES = 64 * 1024
"""Bytes of a body split at quotes at a time: a piece takes up to 40 bytes of memory for one of the body."""
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{\]}]', re.DOTALL)
"""A string or a bracket. The closing quote is optional, so that every quote where a search begins is a token: otherwise
an unterminated string is read to its end again from every quote in it."""
_UTF8_BYTES = 64 * 1024
"""Bytes decoded at a time to check them: the text takes up to four bytes of memory for one of the body."""
_MAX_SEARCHED_TOKENS = 10_000
_MAX_SEARCHED_BYTES = 1 << 20
"""How far into a body the search for the field that is nested too deeply goes: some milliseconds."""


def done(steps: Steps[_T]) -> _T:
    """Do all steps at once; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode a request body within the bounds.

    Raises:
        BadRequest: not JSON in UTF-8, nested too deeply, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    return done(decoding_body(decoder, body))


def decoding_body(decoder: msgspec.json.Decoder[_Body], body: bytes) -> Steps[_Body]:
    """`decode_body` in three steps: each takes 10 to 20 ms of a body of 24 MB."""
    check_values(body)
    yield
    if not is_utf8(body):
        raise BadRequest("request body is not valid JSON: its text must be UTF-8 throughout")
    if is_too_deep(body):
        raise BadRequest(
            f"the request is nested too deeply: more than {MAX_DEPTH} levels", param=_field_of_depth(body)
        )
    yield
    try:
        return _decoded(decoder, body)
    except msgspec.ValidationError as error:
        message, param = message_and_field(error)
        code = _CODES[bound[1]] if (bound := _OUT_OF_BOUNDS.match(message)) else None
        if message.startswith(_ONLY_NULL):
            message = f"{param} is internal to engines and refused from clients"
        elif param is not None and _NAMED_FIELD.match(message) is None:
            message = f"{param}: {message}{_explanation(message, body, decoder.type, param)}"
            message += f" ({code})" if code else ""
        raise BadRequest(message, param=param, code=code) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body is not valid JSON: {_fault(error, body)}") from None
    except RecursionError:  # called with little stack left
        raise BadRequest("request body is nested too deeply") from None


def _fault(error: Exception, body: bytes) -> str:
    """Say what is wrong with a body that is no JSON. A text that a client has cut within an emoji ends with one half of
    a surrogate pair; msgspec calls the body truncated if it ends soon after that."""
    told = str(error).removeprefix("JSON is malformed: ")[:200]
    is_cut_pair = told == _TRUNCATED and body.rstrip().endswith(b"}") and _HIGH_SURROGATE.search(body[-24:])
    if is_cut_pair or "surrogate" in told:
        place = "" if is_cut_pair else told[told.rfind(" (byte ") :]
        return f"a text has half of a surrogate pair (\\ud800 to \\udfff), as of a cut emoji{place}"
    return told


def _decoded(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """Decode a body. As in vLLM, a boolean or a number may be a text (`"n": "2"`), a boolean 0 or 1, and a whole number
    may have a fraction of zero (`"max_tokens": 2.0`), as languages without integers write it.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is no such body.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not _CONVERTIBLE.match(str(error)):
            raise
    kind: Any = decoder.type
    lenient, nulls = _lenient_decoders(kind)
    decoded: _Body = lenient.decode(body)
    nulls.decode(body)
    return decoded


@cache
def _lenient_decoders(kind: Any) -> tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]:
    """Return a decoder that converts such values, and one that refuses the text `null`, which the first one takes for a
    null, in fields that take nothing else."""
    fields = msgspec.structs.fields(kind) if isinstance(kind, type) and issubclass(kind, Struct) else ()
    names = [(field.encode_name, None, None) for field in fields if field.type in (None, NoneType)]
    return msgspec.json.Decoder(kind, strict=False), msgspec.json.Decoder(msgspec.defstruct("Nulls", names))


def _explanation(message: str, body: bytes, kind: Any, param: str) -> str:
    """Return the end of a message, which names the allowed values or quotes the one that was given."""
    if message.startswith(_NO_MEMBER) and (allowed := allowed_values(kind, param)):
        return f"; give one of {', '.join(str(value) for value in allowed)}"
    return shown_value(body, kind, param)


def message_and_field(error: msgspec.ValidationError) -> tuple[str, str | None]:
    """Split msgspec's error into its message and the path of the field at fault (`messages[0].role`), even if the field
    is missing or unknown; None if no field is at fault."""
    message, _, path = str(error).partition(" - at ")
    field = path.partition("$.")[2].rstrip("`").partition("[...]")[0]  # [...]: some value of a mapping
    if name := _NAMED_FIELD.match(message):
        field = f"{field}.{name[1]}" if field else name[1]
    return message, field or None


def parse_text(text: str, param: str) -> Any:
    """Parse JSON that a field contains as text, within the same bounds.

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
    """Whether lists and objects nest deeper than `MAX_DEPTH`; in invalid JSON, whether the open brackets do."""
    if _has_few_openings(data):
        return False
    # First count brackets in strings, too, which is cheaper: in prose and code they hardly nest.
    brackets = data.translate(_SIGNS, _OTHERS)
    if len(brackets) <= 2 * MAX_VALUES and _depth(brackets) <= MAX_DEPTH:
        return False
    return _depth(_brackets_outside_of_strings(data).translate(_SIGNS)) > MAX_DEPTH


def is_utf8(data: bytes) -> bool:
    """Whether all of it is UTF-8: names and values, of known fields and of others."""
    if data.isascii():
        return True
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for start in range(0, len(data), _UTF8_BYTES):
            decode(data[start : start + _UTF8_BYTES])
        decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def check_values(body: bytes) -> None:
    """Check the number of values.

    Raises:
        PayloadTooLarge: there are more than `MAX_VALUES` values outside of strings.
    """
    if len(body) <= MAX_VALUES or _separators(body) <= MAX_VALUES:
        return  # few enough even when separators inside strings are counted
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 2 * MAX_VALUES or _separators(b"".join(bare.split(b'"')[::2])) > MAX_VALUES:
        raise PayloadTooLarge(f"the request has more than {MAX_VALUES} JSON values")


def _separators(text: bytes) -> int:
    """Upper bound of the number of values, less one."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _brackets_outside_of_strings(text: bytes) -> bytes:
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_QUOTES_OR_BRACKETS)
    bare = bare.replace(b'""', b"")  # an empty string, or nothing between two
    outside, is_inside = [], 0
    for start in range(0, len(bare), _SPLIT_BYTES):
        pieces = bare[start : start + _SPLIT_BYTES].split(b'"')
        outside.append(b"".join(pieces[is_inside::2]))
        is_inside ^= (len(pieces) - 1) & 1
    return b"".join(outside)


def _has_few_openings(data: bytes) -> bool:
    """Whether there are at most `MAX_DEPTH` opening brackets, in strings or not."""
    find, room = data.find, MAX_DEPTH
    for opening in (b"{", b"["):
        at = -1
        while (at := find(opening, at + 1)) >= 0:
            if not room:
                return False
            room -= 1
    return True


def _depth(signs: bytes) -> int:
    """The highest prefix sum of signed bytes."""
    return max(accumulate(memoryview(signs).cast("b")), default=0)


def _field_of_depth(body: bytes) -> str | None:
    """The top-level field in which a body becomes too deep; None if that is not found early in the body."""
    depth, field, last = 0, None, b""
    for number, match in enumerate(_TOKEN.finditer(body, 0, _MAX_SEARCHED_BYTES)):
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
