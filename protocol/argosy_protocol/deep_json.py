"""Reads JSON of a Kubernetes API server, however deep an object is.

What operator and routers read nests two dozen levels. But whoever writes an object may set `metadata.managedFields`, in
which the API server takes 10,000 levels, more than the decoders: one such object would end every list and watch that
has it. Owns what is left of it. Must not know kinds. Invariant: what nests no deeper than MAX_DEPTH is read as it is.
"""

# Not compiled: on no request's path.

from __future__ import annotations

import json
import re
from typing import Any, Final, TypeVar

import msgspec

from argosy_protocol.json_limits import Steps, done

T = TypeVar("T")
MAX_DEPTH: Final = 100
TOKENS_PER_STEP: Final = 8192
"""Brackets and strings of a step, which takes a millisecond or two: an object of 1.5 MB may have a million of them."""
_TOKEN: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]')


def loads(text: str | bytes) -> Any:
    """Read a JSON text. In one that is too deep for the decoder, whatever is below MAX_DEPTH levels is null.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(cut(text if isinstance(text, str) else text.decode()))


def decode(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw) -> T:
    """`loads` with a decoder.

    Raises:
        msgspec.MsgspecError: it is no JSON, or not of this type.
    """
    try:
        return decoder.decode(text)
    except RecursionError:
        return decoder.decode(cut(bytes(text).decode()))


def cut(text: str) -> str:
    """The text with null in place of each object or list below MAX_DEPTH levels."""
    return done(cutting(text))


def cutting(text: str) -> Steps[str]:
    """Do what `cut` does in steps, for an event loop with other work: whoever may create pods sends as many as they
    like."""
    kept, start, depth = [], 0, 0
    for number, token in enumerate(_TOKEN.finditer(text), 1):
        if number % TOKENS_PER_STEP == 0:
            yield
        sign = token[0]
        if sign in ("{", "["):
            if depth == MAX_DEPTH:
                kept.append(text[start : token.start()])
            depth += 1
        elif sign in ("}", "]"):
            depth -= 1
            if depth == MAX_DEPTH:
                kept.append("null")
                start = token.end()
    return "".join((*kept, text[start:])) if depth == 0 else ""
