"""KVCacheSpec: what a layer keeps in one block of the KV cache. No torch; sizes in bytes.

Design: vLLM, `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from msgspec import Struct


class FullAttentionSpec(Struct, frozen=True, tag="full_attention"):
    """Keys and values of every token, or the latents that they are made of, kept until the request ends."""

    page_bytes: int
    """Bytes of one block in one layer."""


class SlidingWindowSpec(Struct, frozen=True, tag="sliding_window"):
    """Keys and values of the last `window` tokens, including the newest."""

    page_bytes: int
    window: int


class RecurrentStateSpec(Struct, frozen=True, tag="recurrent_state"):
    """A state that stands for all tokens of a request so far (Mamba, DeltaNet, convolutions); every step overwrites it.
    States are in blocks of a pool of their own."""

    page_bytes: int
    """Bytes of one state."""


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec | RecurrentStateSpec
