"""VisionSpec: the part of a wrapper's config that its encoder of images, and the place of their embeddings, depend on.
No torch."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class VisionSpec(Struct, frozen=True, kw_only=True):
    """How a model sees images."""

    fields: str
    """The wrapper's config.json with the overrides and without what describes quantised weights, as JSON."""
    image_token_id: Annotated[int, Meta(ge=0, le=1 << 24)]
    """The token whose embeddings the encoder's outputs replace."""
    mrope_section: Annotated[tuple[int, ...], Meta(max_length=3)] = ()
    """Of M-RoPE (arXiv 2409.12191), how many pairs of a head turn by frame, row and column; empty: it has
    RoPE."""
    is_mrope_interleaved: bool = False
    """Whether these pairs alternate (Qwen3-VL), instead of following each other."""
    num_deepstack: Annotated[int, Meta(ge=0, le=64)] = 0
    """Number of first layers whose outputs get features of the encoder's own layers added (DeepStack, arXiv
    2406.04334)."""
