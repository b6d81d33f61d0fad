"""KV cache specs and groups: what a layer keeps per token, and how layers share the block pool. No torch.

A `KVCacheSpec` describes one layer's part of a block; sizes are in bytes. Layers with equal specs form groups of equal
size. A block of the pool has the same size whichever group uses it, and a request has one block table per group, so the
i-th layers of all groups share one tensor. A model with one kind of layer has one group. Design: vLLM,
`v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from argosy_engine.errors import ConfigError
from argosy_engine.models.model_config import ModelConfig


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


class KVCacheGroup(Struct, frozen=True):
    """Layers that share a block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


def kv_cache_groups(config: ModelConfig, itemsize: int, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Group a model's layers.

    Args:
        itemsize: bytes per element of a key or value.
        block_size: tokens per block.
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
    """Split layers into groups of equal spec. All groups have as many layers as the rarest spec, except for remainders.

    Full attention comes first, because its prefix hits bound those of the other groups.

    Raises:
        ConfigError: attention layers differ in the bytes that they keep per token.
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
    """Return the bytes of a block of the pool, which is large enough for any group."""
    return max(group.spec.page_bytes * len(group.layers) for group in groups)


def peak_blocks(spec: KVCacheSpec, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Return the most blocks that a request holds at once in a group while it grows to `num_tokens`."""
    if isinstance(spec, RecurrentStateSpec):
        return 1
    if isinstance(spec, SlidingWindowSpec):
        # The window before a step's first token plus the step's tokens, not aligned to block boundaries.
        held = -(-(spec.window - 1 + max_num_batched_tokens) // block_size) + 1
        return min(held, -(-num_tokens // block_size))
    return -(-num_tokens // block_size)
