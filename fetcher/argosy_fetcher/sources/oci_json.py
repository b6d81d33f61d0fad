"""JSON documents of registries, token servers and auth files: decoded against a type, whatever their bytes are.

Owns the ways in which decoding fails. Invariant: the error's text names places and types, never values.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class MalformedDocument(ValueError):
    """The bytes are no JSON, or not of the type."""


def decode_document(content: bytes, kind: type[T]) -> T:
    """Decode JSON.

    Raises:
        MalformedDocument: with the reason.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedDocument(str(error)) from None
    except RecursionError:
        raise MalformedDocument("nested too deeply") from None
