"""KVCacheSpec: what a layer keeps in the KV cache, and the arithmetic of pages and blocks that follows from it: which
tokens are read, how many blocks a request holds, how layers share blocks. No torch; sizes are in bytes.

A layer's part of a block is a page. Layers with equal specs form groups. A block of the pool has the same size
whichever group uses it, and a request has one block table per group, so the i-th layers of all groups share one tensor,
or the layers of a group share a block if pages differ in size. A model with one kind of layer has one group. Layers
that keep a state per request are one group, the last, with a pool of its own. Design: vLLM, `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from msgspec import Struct


class CacheSpec(Struct, frozen=True):
    """What every kind of layer says of itself. It keeps something of each token, which all later tokens read."""

    page_bytes: int
    """Bytes of one block in one layer; of a layer with states, of one state."""
    is_state: ClassVar[bool] = False
    """Whether it keeps a state per request instead of something per token."""

    @property
    def reach(self) -> int | None:
        """Number of tokens that a token reads at most, itself included; None: all before it."""
        return None

    def first_read(self, position: int) -> int:
        """Return the first token that any token from `position` on reads."""
        return 0

    def num_skipped(self, num_computed_tokens: int, block_size: int) -> int:
        """Return how many leading blocks no token from position `num_computed_tokens` on reads."""
        return self.first_read(num_computed_tokens) // block_size

    def peak_blocks(self, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
        """Return the most blocks of keys and values that a request holds at once while it grows to `num_tokens`.

        Args:
            max_num_batched_tokens: token budget of a step.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.reach is None:
            return num_blocks
        # What a step's first token reads before itself plus the step's tokens, not aligned to block boundaries.
        return min(-(-(self.reach - 1 + max_num_batched_tokens) // block_size) + 1, num_blocks)


class FullAttentionSpec(CacheSpec, frozen=True, tag="full_attention"):
    """Keys and values of every token, or the latents that they are made of, kept until the request ends."""


class SlidingWindowSpec(CacheSpec, frozen=True, tag="sliding_window"):
    """Keys and values of the last `window` tokens, including the newest."""

    window: int

    @property
    def reach(self) -> int:
        return self.window

    def first_read(self, position: int) -> int:
        return max(position - self.window + 1, 0)


class ChunkedAttentionSpec(CacheSpec, frozen=True, tag="chunked_attention"):
    """Keys and values of the newest token's chunk, of `chunk_size` positions: none of them reads an earlier chunk."""

    chunk_size: int

    @property
    def reach(self) -> int:
        return self.chunk_size

    def first_read(self, position: int) -> int:
        return position // self.chunk_size * self.chunk_size


class RecurrentStateSpec(CacheSpec, frozen=True, tag="recurrent_state"):
    """A state that stands for all tokens of a request so far (Mamba, DeltaNet, convolutions); every step overwrites it.
    States are in blocks of a pool of their own, and take none of keys and values."""

    is_state: ClassVar[bool] = True

    def peak_blocks(self, num_tokens: int, block_size: int, max_num_batched_tokens: int) -> int:
        return 0


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec | ChunkedAttentionSpec | RecurrentStateSpec


class KVCacheGroup(Struct, frozen=True):
    """Layers that share a block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, or of the states of a request, over the group's layers."""
        return self.spec.page_bytes * len(self.layers)


def group_layers(specs: Iterable[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Split layers into groups of equal spec, so that a block takes about the same number of bytes in each.

    If all pages have one size, all groups have as many layers as the rarest spec, except for remainders. A page that
    is half as large counts half. Full attention comes first, because its prefix hits bound those of the other groups.
    States come last, in one group, whose spec is that of the largest.
    """
    kinds: dict[KVCacheSpec, list[int]] = {}
    states: dict[int, KVCacheSpec] = {}
    for layer, spec in enumerate(specs):
        if spec.is_state:
            states[layer] = spec
        else:
            kinds.setdefault(spec, []).append(layer)
    group_bytes = min((len(layers) * spec.page_bytes for spec, layers in kinds.items()), default=0)
    groups = []
    for spec, layers in sorted(kinds.items(), key=lambda item: item[0].reach is not None):
        size = max(group_bytes // spec.page_bytes, 1)
        groups += [
            KVCacheGroup(spec, tuple(layers[start : start + size])) for start in range(0, len(layers), size)
        ]
    if states:
        largest = max(states.values(), key=lambda spec: spec.page_bytes)
        groups.append(KVCacheGroup(largest, tuple(states)))
    return tuple(groups)


def groups_of_layers(groups: Sequence[KVCacheGroup], own: Sequence[int]) -> tuple[KVCacheGroup, ...]:
    """Return the groups with the layers of one pipeline stage, which are numbered in their order.

    A block table is the same on every stage, so all have the same groups, some perhaps without a layer.
    """
    places = {layer: place for place, layer in enumerate(own)}
    return tuple(
        KVCacheGroup(group.spec, tuple(places[layer] for layer in group.layers if layer in places))
        for group in groups
    )


def has_states(groups: Sequence[KVCacheGroup]) -> bool:
    """Return whether any layer of the model keeps a state per request, on this pipeline stage or another."""
    return any(group.spec.is_state for group in groups)


def attention_groups(groups: Sequence[KVCacheGroup]) -> list[KVCacheGroup]:
    """Return the groups that keep keys and values."""
    return [group for group in groups if not group.spec.is_state]


def block_bytes(groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes of a block of the pool, which is large enough for any group but states; 0 if there is none."""
    return max((group.block_bytes for group in attention_groups(groups)), default=0)


def state_bytes(groups: Sequence[KVCacheGroup]) -> int:
    """Return the bytes of the states of one request in all layers; 0 if no layer keeps any."""
    return sum(group.block_bytes for group in groups if group.spec.is_state)
