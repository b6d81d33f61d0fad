"""KV cache groups: how layers share the block pool. No torch.

A layer's `KVCacheSpec` describes its part of a block, a page; sizes are in bytes. Layers with equal specs form groups.
A block of the pool has the same size whichever group uses it, and a request has one block table per group, so the i-th
layers of all groups share one tensor, or the layers of a group share a block if pages differ in size. A model with one
kind of layer has one group. Layers that keep a state per
request are one group, the last, with a pool of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from argosy_engine.attention.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)


class KVCacheGroup(Struct, frozen=True):
    """Layers that share a block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Split layers into groups of equal spec, so that a block takes about the same number of bytes in each.

    If all pages have one size, all groups have as many layers as the rarest spec, except for remainders. A page that
    is half as large counts half. Full attention comes first, because its prefix hits bound those of the other groups.
    States come last, in one group, whose spec is that of the largest.
    """
    kinds: dict[KVCacheSpec, list[int]] = {}
    states: dict[int, RecurrentStateSpec] = {}
    for layer, spec in enumerate(specs):
        if isinstance(spec, RecurrentStateSpec):
            states[layer] = spec
        else:
            kinds.setdefault(spec, []).append(layer)
    group_bytes = min((len(layers) * spec.page_bytes for spec, layers in kinds.items()), default=0)
    groups = []
    for spec, layers in sorted(kinds.items(), key=lambda item: not isinstance(item[0], FullAttentionSpec)):
        size = max(group_bytes // spec.page_bytes, 1)
        groups += [
            KVCacheGroup(spec, tuple(layers[start : start + size])) for start in range(0, len(layers), size)
        ]
    if states:
        largest = max(states.values(), key=lambda spec: spec.page_bytes)
        groups.append(KVCacheGroup(largest, tuple(states)))
    return tuple(groups)


def groups_of_layers(groups: Sequence[KVCacheGroup], own: range) -> tuple[KVCacheGroup, ...]:
    """Return the groups with the layers of one pipeline stage, counted from its first.

    A block table is the same on every stage, so all have the same groups, some perhaps without a layer.
    """
    return tuple(
        KVCacheGroup(group.spec, tuple(layer - own.start for layer in group.layers if layer in own))
        for group in groups
    )


def block_bytes(groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes of a block of the pool, which is large enough for any group but states; 0 if there is none."""
    return max((group.spec.page_bytes * len(group.layers) for group in attention_groups(groups)), default=0)


def state_bytes(groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes of the states of one request in all layers; 0 if no layer keeps any."""
    return sum(
        group.spec.page_bytes * len(group.layers)
        for group in groups
        if isinstance(group.spec, RecurrentStateSpec)
    )


def attention_groups(groups: Sequence[KVCacheGroup]) -> list[KVCacheGroup]:
    """Return the groups that keep keys and values."""
    return [group for group in groups if not isinstance(group.spec, RecurrentStateSpec)]


def peak_blocks(spec: KVCacheSpec, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
    """Return the most blocks of keys and values that a request holds at once in a group while it grows to
    `num_tokens`."""
    if isinstance(spec, RecurrentStateSpec):
        return 0
    if isinstance(spec, SlidingWindowSpec):
        # The window before a step's first token plus the step's tokens, not aligned to block boundaries.
        held = -(-(spec.window - 1 + max_num_batched_tokens) // block_size) + 1
        return min(held, -(-num_tokens // block_size))
    return -(-num_tokens // block_size)
