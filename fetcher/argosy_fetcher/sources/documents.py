"""Documents: bodies and files that are read whole, such as lists of files, bounded and decoded against a type.

Owns bounds in size and time, and the ways in which decoding fails. Invariant: the text of a decoding error names places
and types, never values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from argosy_fetcher.errors import TransientError, UnsupportedModel

MAX_DOCUMENT_S: Final = 120.0
"""For all bytes of a document, so that a server cannot hold a fetch with single bytes."""

T = TypeVar("T")


class MalformedDocument(ValueError):
    """The bytes are no JSON, or not of the type."""


def read_bounded(
    chunks: Iterable[bytes], limit: int, what: str, clock: Callable[[], float] = time.monotonic
) -> bytes:
    """Return a body of at most `limit` bytes.

    Args:
        what: names the document in errors.

    Raises:
        UnsupportedModel: it is larger.
        TransientError: it does not arrive in time.
    """
    deadline = clock() + MAX_DOCUMENT_S
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > limit:
            raise UnsupportedModel(f"{what} has more than {limit} bytes, which is the limit")
        if clock() > deadline:
            raise TransientError(f"{what} took longer than {MAX_DOCUMENT_S:.0f} s")
    return bytes(content)


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
