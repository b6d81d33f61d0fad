"""What the router reads of an event of a stream it may have to continue."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class Choice(Struct):
    """What an event adds to one choice."""

    index: int
    token_ids: list[int]
    """Present in every chunk of a stream that can be resumed."""
    finish_reason: str | None = None


class Usage(Struct):
    """Its counts are read elsewhere."""


class Chunk(Struct):
    """The data of one event."""

    created: int
    choices: list[Choice]
    usage: Usage | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
