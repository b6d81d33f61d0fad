"""What msgspec decodes for compiled modules: the facts of a request's body, and the events of streams.

They are apart because msgspec reads annotations, which compiled classes do not keep.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from argosy_protocol.openai import StreamOptions

# Not compiled: msgspec reads its annotations, which extension modules do not keep.


class StreamShape(NamedTuple):
    """What a complete stream consists of."""

    choices: int
    has_usage: bool
    """Whether a last chunk reports the usage."""
    has_echo: bool = False
    """Whether choices begin with the prompt, perhaps in several chunks, of which only the last has token ids."""
    is_message: bool = False
    """Whether its events are those of Anthropic's API."""


class Outputs(NamedTuple):
    """What a request asks to generate."""

    sequences: int
    """Sequences generated in parallel."""
    limit: int | None
    """Tokens of each sequence at most; None if the request does not say."""
    beams_per_choice: float
    """Sequences computed for each that is returned: a beam search may be wider than its answer."""


class Examined(Struct, kw_only=True):
    """What the router knows of a request's body once it has been read, without its content."""

    model: str
    """As the client named it; empty for none."""
    request_id: str | None
    session: str
    """Session that the body declares; empty for none."""
    priority: int
    cache_salt: str | None
    stream: bool
    stream_options: StreamOptions | None
    stream_interval: int
    """Tokens of a sequence that an engine may keep back until an event has as many; 1 for none."""
    outputs: Outputs
    shape: StreamShape | None
    """Of a stream that another replica can continue; else None."""
    is_cut: bool
    """Whether the engine may cut tokens off the prompt."""
    tool_choice: str | None
    """What takes the place of `tool_choice`, if engines of other makes do not know what the client sent; else None."""
    tools: bytes
    """What takes the place of `tools` then, as JSON."""


class ChoiceDelta(Struct):
    """What an event adds to one choice."""

    index: int
    token_ids: list[int] | None = None
    """Present in every chunk of a stream that can be continued, unless a comment of the event has them."""
    finish_reason: str | None = None


class Usage(Struct):
    """Marks a chunk that reports the usage; `answer_tokens` reads the counts."""


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
