"""KVCacheSpec: what a layer keeps in one block of the KV cache. No torch; sizes in bytes.

Design: vLLM, `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from msgspec import Struct


class FullAttentionSpec(Struct, frozen=True, tag="full_attention"):
    """Keys and values of every token, kept until the request ends."""

    page_bytes: int
    """Bytes of one block in one layer."""


class SlidingWindowSpec(Struct, frozen=True, tag="sliding_window"):
    """Keys and values of the last `window` tokens, including the newest."""

    page_bytes: int
    window: int


class RecurrentStateSpec(Struct, frozen=True, tag="recurrent_state"):
    """One state per request, kept in one block and overwritten by every step. It cannot be shared between requests."""

    page_bytes: int


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec | RecurrentStateSpec
