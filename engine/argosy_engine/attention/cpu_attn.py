"""Paged attention with our CPU kernels: one call for a step's prompts and decodes, without gathering the cache.

The kernels use their own layout inside a block (src/step.h), so a layer's cache must be written and read by the same
backend. The shape and size of `kv_cache` are the same as for other backends.
"""

from __future__ import annotations

from typing import Any

import torch

from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.native_step import NativeStep
from argosy_engine.native.library import DTYPES, AttentionLayerStruct, Kernels, StepStruct, kernels

_MAX_HEAD_DIM = 256
_MAX_GROUP = 48
"""Query heads per KV head that the kernels support: the rows of a tile."""


class CpuAttention:
    """One layer's norm of q and k heads, rotary embedding, KV write and attention, on the fused q, k, v projection.

    Args:
        cosines, sines: float32 [positions, rotary_dim / 2]; None: no rotary embedding.
        q_norm, k_norm: weights [head_dim] of RMSNorm over each head, or None.
        scale, sliding_window, logit_softcap: as in TorchAttention.
    """

    def __init__(
        self,
        kernels: Kernels,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        cosines: torch.Tensor | None = None,
        sines: torch.Tensor | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        scale: float | None = None,
        sliding_window: int | None = None,
        logit_softcap: float | None = None,
    ) -> None:
        self._kernels = kernels
        self._kept_alive = (cosines, sines, q_norm, k_norm)
        cosines_at, sines_at, q_norm_at, k_norm_at = (
            None if tensor is None else tensor.data_ptr() for tensor in self._kept_alive
        )
        self.layer = AttentionLayerStruct(
            q_norm=q_norm_at,
            k_norm=k_norm_at,
            cosines=cosines_at,
            sines=sines_at,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=0 if cosines is None else cosines.shape[1] * 2,
            window=sliding_window or 0,
            scale=head_dim**-0.5 if scale is None else scale,
            softcap=logit_softcap or 0.0,
            eps=eps,
        )

    @classmethod
    def create(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        **options: Any,
    ) -> CpuAttention | None:
        """Create the backend, or return None if the kernels do not support the device, dtype or shapes."""
        if device.type != "cpu" or dtype not in DTYPES:
            return None
        if head_dim > _MAX_HEAD_DIM or num_heads // num_kv_heads > _MAX_GROUP:
            return None
        loaded = kernels()
        if loaded is None or head_dim % loaded.lanes:
            return None
        return cls(loaded, num_heads, num_kv_heads, head_dim, **options)

    def serves(self, kv_cache: torch.Tensor) -> bool:
        """Whether the kernels support a cache [..., block_size, num_kv_heads, head_dim]: its block size must be a
        multiple of `lanes`."""
        return kv_cache.shape[-3] % self._kernels.lanes == 0

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Write keys and values to the cache and compute attention, [T, num_heads * head_dim].

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], contiguous; changed in place.
            kv_cache: this layer's, [2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        self.bind(kv_cache)
        layer, step = self.layer, native_step(meta)
        self._kernels.rotate_and_write(layer, step, qkv)
        return self._kernels.attention(layer, step, qkv)

    def bind(self, kv_cache: torch.Tensor) -> None:
        """Point `layer` to this cache."""
        layer, address = self.layer, kv_cache.data_ptr()
        if address != layer.k_cache:
            _, layer.num_blocks, layer.block_size, _, _ = kv_cache.shape
            layer.k_cache = address
            layer.v_cache = address + kv_cache.stride(0) * kv_cache.itemsize


def native_step(meta: AttentionMetadata) -> StepStruct:
    """Return a step's metadata in the kernels' form, created on the first call and shared by all layers."""
    if meta.native_step is None:
        meta.native_step = NativeStep(meta.seq_lens, meta.query_lens, meta.slot_mapping, meta.block_tables)
    return meta.native_step.struct
