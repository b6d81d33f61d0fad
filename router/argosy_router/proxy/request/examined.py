"""What the router knows of a request's body once it has been read, without its content.

Must not know: services, accounts, how a body is read.
"""

# Not compiled: msgspec reads its annotations, which extension modules do not keep.

from __future__ import annotations

import msgspec

from argosy_protocol.openai import StreamOptions


class Examined(msgspec.Struct, kw_only=True):
    """Facts of one request. Named tuples are plain ones here: compiled, they have no annotations for msgspec."""

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
    outputs: tuple[int, int | None, float]
    """`token_estimate.Outputs`."""
    shape: tuple[int, bool, bool, bool] | None
    """`stream_shape.StreamShape` of a stream that another replica can continue; else None."""
    is_cut: bool
    """Whether the engine may cut tokens off the prompt."""
    tool_choice: str | None
    """What takes the place of `tool_choice`, if engines of other makes do not know what the client sent; else None."""
    tools: bytes
    """What takes the place of `tools` then, as JSON."""
