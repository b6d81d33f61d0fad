"""The fields of a stream's event that the router needs so that another replica can continue the stream."""

# Not compiled: msgspec reads its annotations, which extension modules do not keep.

from __future__ import annotations

import msgspec
from msgspec import Struct


class ChoiceDelta(Struct):
    """What an event adds to one choice."""

    index: int
    token_ids: list[int] | None = None
    """Present in every chunk of a stream that can be continued, unless a comment of the event has them."""
    finish_reason: str | None = None


class Usage(Struct):
    """Marks a chunk that reports the usage; `usage_scan` reads the counts."""


class Chunk(Struct):
    """The data of one event."""

    created: int
    choices: list[ChoiceDelta]
    usage: Usage | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
