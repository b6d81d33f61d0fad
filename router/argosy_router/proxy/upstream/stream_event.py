"""The fields of a stream's event that the router needs so that another replica can continue the stream."""

# Not compiled: msgspec reads its annotations, which extension modules do not keep.

from __future__ import annotations

from typing import Literal

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


BlockType = Literal["text", "thinking", "tool_use"]


class ContentBlock(Struct):
    type: BlockType


class BlockStart(Struct):
    """The data of an event `content_block_start` of Anthropic's API."""

    content_block: ContentBlock


decode_block_start = msgspec.json.Decoder(BlockStart).decode
