"""Attention: one layer's attention, the same module in every model. It knows its constants and its KV cache; a backend
computes. LatentAttention: the same of multi-head latent attention. StateLayer: what a layer keeps that has a state per
request instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from argosy_engine.attention.backend import AttentionBackend, AttentionWeights
from argosy_engine.attention.kv_cache_spec import KVCacheSpec, RecurrentStateSpec
from argosy_engine.attention.latent import LatentAttentionImpl, LatentWeights
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams, LatentAttentionParams, StateParams
from argosy_engine.quantized_rows import Activations


class Attention:
    """Norm of q and k heads, rotary embedding, KV cache write and attention of one layer."""

    def __init__(
        self,
        params: AttentionParams,
        backend: AttentionBackend,
        weights: AttentionWeights = AttentionWeights(),  # noqa: B008 (immutable)
    ) -> None:
        self.params = params
        self.kv_cache_dtype = backend.kv_cache_dtype
        self.impl = backend.attention(params, weights)
        self.kv_cache: torch.Tensor
        """[2, num_blocks, block_size, num_kv_heads, head_dim], once it is bound. Blocks may be strided if layers of the
        model differ in KV heads or their size."""
        self.group = 0
        """Index of its KV cache group."""

    def bind(self, kv_cache: torch.Tensor, group: int = 0) -> None:
        """Let the layer keep keys and values in this cache, whose slots are those of this KV cache group."""
        self.kv_cache, self.group = kv_cache, group

    def __call__(self, qkv: torch.Tensor, meta: AttentionMetadata) -> Activations:
        """Write keys and values to the cache and compute attention, [T, num_heads * head_dim].

        The result may be quantised, if the output projection wants it so.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], contiguous; may be changed in place.
            meta: of the step.
        """
        return self.impl(qkv, self.kv_cache, meta.of_group(self.group))

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return what the layer keeps in a block of `block_size` tokens."""
        return self.params.kv_cache_spec(block_size, self.kv_cache_dtype.itemsize)

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of the layer's KV cache, [2, num_blocks, block_size, num_kv_heads, head_dim]."""
        return 2, num_blocks, block_size, self.params.num_kv_heads, self.params.head_dim


class LatentAttention:
    """Norm of the latents, rotary embedding, cache write and attention of one layer."""

    def __init__(
        self, params: LatentAttentionParams, backend: AttentionBackend, weights: LatentWeights
    ) -> None:
        self.params = params
        self.kv_cache_dtype = backend.kv_cache_dtype
        impl = backend.latent_attention(params, weights)
        assert impl is not None, "select_backend found that the backend computes latent attention"
        self.impl: LatentAttentionImpl = impl
        self.kv_cache: torch.Tensor
        """[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], once it is bound."""
        self.group = 0
        """Index of its KV cache group."""

    def bind(self, kv_cache: torch.Tensor, group: int = 0) -> None:
        """Let the layer keep latents in this cache, whose slots are those of this KV cache group."""
        self.kv_cache, self.group = kv_cache, group

    def __call__(self, q: torch.Tensor, compressed: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Write the latents and rotated keys to the cache and compute attention, [T, num_heads * v_head_dim].

        Args:
            q: [T, num_heads * (qk_nope_head_dim + qk_rope_head_dim)], contiguous; may be changed in place.
            compressed: [T, kv_lora_rank + qk_rope_head_dim], latents before their norm and keys before the rotation;
                rows may be strided.
            meta: of the step.
        """
        return self.impl(q, compressed, self.kv_cache, meta.of_group(self.group))

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return what the layer keeps in a block of `block_size` tokens."""
        return self.params.kv_cache_spec(block_size, self.kv_cache_dtype.itemsize)

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of the layer's cache, [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]."""
        return num_blocks, block_size, self.params.cached_dim


AttentionLayer = Attention | LatentAttention
"""A layer that keeps something of every token."""


class StateRows(NamedTuple):
    """Where the states of a step's R requests are."""

    sources: torch.Tensor
    """int64 [R]: blocks of the states before the step; of requests that begin, any."""
    targets: torch.Tensor
    """int64 [R]: blocks of the states after it."""
    begins: torch.Tensor
    """bool [R]: whether a request has no state yet."""


class StateLayer:
    """The states of one layer, each in a block of the state pool."""

    def __init__(self, params: StateParams, dtype: torch.dtype) -> None:
        self.params = params
        self._dtype = dtype
        self.states: list[torch.Tensor] = []
        """Each [num_states, *shape], once they are bound."""
        self.block_size = 1
        self.group = 0
        """Index of its KV cache group."""

    @property
    def tensors(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes, of one request, and dtypes."""
        return [
            (tensor.shape, torch.float32 if tensor.dtype == "float32" else self._dtype)
            for tensor in self.params.tensors
        ]

    def kv_cache_spec(self) -> RecurrentStateSpec:
        return self.params.kv_cache_spec(self._dtype.itemsize)

    def bind(self, states: Sequence[torch.Tensor], block_size: int, group: int = 0) -> None:
        """Let the layer keep states in these tensors, [num_states, *shape], in the blocks of this KV cache group."""
        self.states, self.block_size, self.group = list(states), block_size, group

    def rows(self, meta: AttentionMetadata) -> StateRows:
        """Return where the states of a step's requests are, which all layers of a group share."""
        meta = meta.of_group(self.group)
        found: StateRows | None = meta.shared.get(StateRows)
        if found is None:
            lens = meta.seq_lens_cpu.astype(np.int64)
            computed = lens - np.diff(meta.query_start_loc_cpu)
            rows = np.arange(len(lens))
            entries = [np.maximum(ends - 1, 0) // self.block_size for ends in (computed, lens)]
            device = meta.block_table.device
            row, *places, begins = (
                torch.from_numpy(each).to(device) for each in (rows, *entries, computed == 0)
            )
            sources, targets = (meta.block_table[row, each].long() for each in places)
            found = meta.shared[StateRows] = StateRows(sources, targets, begins)
        return found

    def load(self, blocks: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of states, each [len(blocks), *shape]."""
        return [states.index_select(0, blocks) for states in self.states]

    def store(self, blocks: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Write states, each [len(blocks), *shape]."""
        for own, new in zip(self.states, states, strict=True):
            own.index_copy_(0, blocks, new.to(own.dtype))
