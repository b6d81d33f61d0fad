"""What a layer keeps per token, and how layers share the block pool. No torch; sizes in bytes.

A `KVCacheSpec` describes one layer's part of a block. Layers of equal spec form groups of equal size; a block of the
pool holds the same bytes whichever group it is given to, and a request has one block table per group. The i-th layers
of all groups thus live in one tensor. A model of one kind of layer is one group. (vLLM, `v1/kv_cache_interface.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from argosy_engine.errors import ConfigError
from argosy_engine.models.config import ModelConfig


class FullAttentionSpec(Struct, frozen=True, tag="full_attention"):
    """Keys and values of every token, kept until the request ends."""

    page_bytes: int
    """of one block in one layer"""


class SlidingWindowSpec(Struct, frozen=True, tag="sliding_window"):
    """Keys and values of which only the last `window` tokens are read, the newest included."""

    page_bytes: int
    window: int


class RecurrentStateSpec(Struct, frozen=True, tag="recurrent_state"):
    """One state per request, replaced by every step; a block is its slot. Such a state knows no prefix to share."""

    page_bytes: int


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec | RecurrentStateSpec


class KVCacheGroup(Struct, frozen=True):
    """Layers that share a block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


def kv_cache_groups(config: ModelConfig, itemsize: int, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Groups of a model's layers.

    Args:
        itemsize: bytes of a key or value.
    """
    page_bytes = 2 * config.num_key_value_heads * config.head_dim * itemsize * block_size
    return group_layers(
        [
            FullAttentionSpec(page_bytes)
            if window is None or window >= config.max_position_embeddings
            else SlidingWindowSpec(page_bytes, window)
            for window in config.sliding_windows
        ]
    )


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Splits layers into groups of equal spec and (but for the last of a kind) equal size: that of the rarest kind.

    Full attention comes first: its prefix hits bound those of the other groups.

    Raises:
        ConfigError: attention layers differ in the bytes they keep per token.
    """
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    if len({spec.page_bytes for spec in kinds if not isinstance(spec, RecurrentStateSpec)}) > 1:
        raise ConfigError("attention layers that differ in KV heads or head size are not supported")
    size = min(len(layers) for layers in kinds.values())
    ordered = sorted(kinds.items(), key=lambda item: not isinstance(item[0], FullAttentionSpec))
    return tuple(
        KVCacheGroup(spec, tuple(layers[start : start + size]))
        for spec, layers in ordered
        for start in range(0, len(layers), size)
    )


def block_bytes(groups: Sequence[KVCacheGroup]) -> int:
    """Of a block of the pool: room for any group."""
    return max(group.spec.page_bytes * len(group.layers) for group in groups)


def peak_blocks(spec: KVCacheSpec, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Most blocks that one request of `num_tokens` holds in a group while it grows to them."""
    if isinstance(spec, RecurrentStateSpec):
        return 1
    if isinstance(spec, SlidingWindowSpec):
        # The window behind a step's first token and the step itself, neither of which starts at a block boundary.
        held = -(-(spec.window - 1 + max_num_batched_tokens) // block_size) + 1
        return min(held, -(-num_tokens // block_size))
    return -(-num_tokens // block_size)
