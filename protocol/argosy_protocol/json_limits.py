"""JSON from outside: bounds, and what a decoder takes beyond the types.

A request body has bounds of its nesting depth and of its number of values, and its text is UTF-8 (`decode_body`). The
depth bounds the stack of code that walks a decoded value, all of which is recursive; the number of values bounds the
time and memory of decoding, which the number of bytes hardly does. Decoders into structs skip the names of unknown
fields unread, on which decoders into mappings fail later if they are not UTF-8. An error names the field at fault, and
shows its value if that is nobody's text.

Fields take null for their default (`NullDefaults`). Objects of a Kubernetes API server may nest deeper than any decoder
reads, since whoever writes one may set `metadata.managedFields`, where the server takes 10,000 levels; below
`CUT_DEPTH` they are cut, not refused, because one of them would end every list and watch that has it (`decode`).

Invariant: checks take microseconds on ordinary bodies, and linear time on any other.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Generator
from functools import cache, lru_cache
from itertools import accumulate
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.inspect import (
    ListType,
    LiteralType,
    Metadata,
    StructType,
    TypedDictType,
    UnionType,
    VarTupleType,
    type_info,
)

from argosy_protocol.errors import BadRequest, PayloadTooLarge

_Body = TypeVar("_Body")
_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Work that is done in steps, between which others may have their turn."""

MAX_MODEL_NAME: Final = 512
"""Characters, in requests and in what is stored of them."""
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


_MAX_SHOWN_CHARS = 64
_MAX_QUOTED_BODY_BYTES = 64 * 1024
"""Larger bodies are not decoded a second time for the sake of a message."""
ADVISED = "advised"
"""Key of a type's `Meta(extra=...)` with the values that messages name, in place of all that it takes."""
_MAX_SHOWN_ITEMS = 3
_PROMPTS = frozenset(("messages", "prompt", "input", "documents"))
"""Fields whose values may be anybody's text."""
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def shown_value(body: bytes, kind: Any, path: str) -> str:
    """Return the end of a message that quotes the value at `path`, or empty text if it cannot or should not be shown.

    Args:
        body: JSON that is no `kind`.
        kind: the type of the whole body.
        path: such as `stream_options.include_usage` or `stop[0]`. The path of a mapping means one of its items.
    """
    steps = [name or int(index) for name, index in _STEP.findall(path)]
    if len(body) > _MAX_QUOTED_BODY_BYTES or not steps or steps[0] in _PROMPTS:
        return ""
    try:
        value: Any = msgspec.json.decode(body)
        for step in steps:
            value = value[step]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, RecursionError):
        return ""
    if isinstance(value, dict) and len(steps) == 1:
        value = _items_at_fault(value, kind, steps[0])
    if isinstance(value, list | None):
        return ""
    text = json.dumps(value, ensure_ascii=False)
    return f"; it is {text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + '...'}"


@lru_cache(maxsize=256)
def allowed_values(kind: Any, path: str) -> tuple[str | int, ...]:
    """Return the values that the field at `path` may have, or those to advise (`ADVISED`), if its type lists them.

    Args:
        kind: the type of the whole body.
        path: as in `shown_value`.
    """
    kinds: list[Any] = [type_info(kind)]
    for name, _ in _STEP.findall(path):
        kinds = [inner for each in _members(kinds) for inner in _parts(each, name)]
    return tuple(value for each in _members(kinds) if isinstance(each, LiteralType) for value in each.values)


def _members(kinds: list[Any]) -> list[Any]:
    """Return the types with each union replaced by its members."""
    members: list[Any] = []
    for kind in kinds:
        inner = kind.type if isinstance(kind, Metadata) else kind
        if isinstance(kind, Metadata) and kind.extra and ADVISED in kind.extra:
            inner = LiteralType(kind.extra[ADVISED])
        members += _members(list(inner.types)) if isinstance(inner, UnionType) else [inner]
    return members


def _parts(kind: Any, name: str) -> list[Any]:
    """Return the types of an object's field, or of a list's items if the name is empty."""
    if not name:
        return [kind.item_type] if isinstance(kind, ListType | VarTupleType) else []
    fields = kind.fields if isinstance(kind, StructType | TypedDictType) else ()
    return [field.type for field in fields if field.encode_name == name]


def _items_at_fault(mapping: dict[str, Any], kind: Any, field: Any) -> dict[str, Any] | None:
    """Return the first items that the field's type does not allow; None if it is not the fault of items."""
    kinds = {each.encode_name: each.type for each in msgspec.structs.fields(kind)}
    wrong: dict[str, Any] = {}
    for key, value in mapping.items():
        try:
            msgspec.convert({key: value}, kinds[field], str_keys=True)
        except msgspec.ValidationError:
            wrong[key] = value
            if len(wrong) == _MAX_SHOWN_ITEMS:
                break
    return wrong or None


if TYPE_CHECKING:
    Nullable = Annotated[_T, "nullable"]
else:

    class Nullable:
        """`Nullable[T]` is what decoders accept, T or null; type checkers read T, as `NullDefaults` keeps no null."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind | None


class NullDefaults(Struct):
    """Base of structs in which a field that is null gets its default, unless the default is null."""

    def __post_init__(self) -> None:
        defaults, values = _null_defaults(type(self))
        if None not in values(self):
            return
        for name, default in defaults:
            if getattr(self, name) is None:
                setattr(self, name, default)


@cache
def _null_defaults(
    struct: type[Struct],
) -> tuple[tuple[tuple[str, Any], ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the fields whose type has null, and whose default is another value, and what reads their values."""
    fields = msgspec.structs.fields(struct)
    defaults = tuple(
        (field.name, field.default)
        for field in fields
        if field.default not in (None, msgspec.NODEFAULT) and _takes_null(field.type)
    )
    if len(defaults) < 2:  # of one name attrgetter returns the value alone
        return defaults, lambda value: tuple(getattr(value, name) for name, _ in defaults)
    return defaults, attrgetter(*(name for name, _ in defaults))


def _takes_null(kind: Any) -> bool:
    return type(None) in getattr(kind, "__args__", ())


CUT_DEPTH: Final = 100
TOKENS_PER_STEP: Final = 8192
"""Brackets and strings of a step, which takes a millisecond or two: an object of 1.5 MB may have a million of them."""
_TEXT_TOKEN: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]')


def loads(text: str | bytes) -> Any:
    """Read a JSON text. In one that is too deep for the decoder, whatever is below CUT_DEPTH levels is null.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(cut(text if isinstance(text, str) else text.decode()))


def decode(decoder: msgspec.json.Decoder[_T], text: bytes | msgspec.Raw) -> _T:
    """`loads` with a decoder.

    Raises:
        msgspec.MsgspecError: it is no JSON, or not of this type.
    """
    try:
        return decoder.decode(text)
    except RecursionError:
        return decoder.decode(cut(bytes(text).decode()))


def cut(text: str) -> str:
    """The text with null in place of each object or list below CUT_DEPTH levels."""
    return done(cutting(text))


def cutting(text: str) -> Steps[str]:
    """Do what `cut` does in steps, for an event loop with other work: whoever may create pods sends as many as they
    like."""
    kept, start, depth = [], 0, 0
    for number, token in enumerate(_TEXT_TOKEN.finditer(text), 1):
        if number % TOKENS_PER_STEP == 0:
            yield
        sign = token[0]
        if sign in ("{", "["):
            if depth == CUT_DEPTH:
                kept.append(text[start : token.start()])
            depth += 1
        elif sign in ("}", "]"):
            depth -= 1
            if depth == CUT_DEPTH:
                kept.append("null")
                start = token.end()
    return "".join((*kept, text[start:])) if depth == 0 else ""
