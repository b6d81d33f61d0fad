"""JSON bodies, and how many values one may have: what it costs to decode grows with them, hardly with bytes.

Owns: the bound, a count that costs a few milliseconds for the largest body and nothing for ordinary ones, and what
clients are told of a body that cannot be read.
Must not know: what the values mean.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from argosy_engine.protocol.errors import BadRequest, PayloadTooLarge

_Body = TypeVar("_Body")

MAX_VALUES = 1 << 20
"""A prompt of a million token ids. Ten million empty lists fit into the largest body and take seconds to decode, which
a thread would not help: the decoder keeps the interpreter's lock."""


def decode_body(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    """
    Raises:
        BadRequest: not JSON, nested too deeply, wrong types or out of bounds; `param` names the field.
        PayloadTooLarge: it has too many values.
    """
    check_values(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        raise BadRequest(message, param=path.partition("$.")[2].rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body is not valid JSON: {str(error)[:200]}") from None
    except RecursionError:
        raise BadRequest("request body is nested too deeply") from None


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
