"""Backend `cpu`: our C++ kernels. One call attends for a step's prompts and decodes, without gathering the cache. One
runs all layers of a Llama-style decoder, because for a model of a few million parameters calling the kernels one by one
from Python takes twice as long.

The kernels use their own layout inside a block (src/step.h), so a layer's cache must be written and read by the same
backend. The shape and size of `kv_cache` are the same as for other backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, pointer

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionWeights,
    DecoderParts,
    rms_norm,
)
from argosy_engine.attention.params import AttentionParams
from argosy_engine.native.library import (
    AttentionLayerStruct,
    DecoderLayerStruct,
    Kernels,
    StepStruct,
    allocate,
    kernels,
)

MAX_SEGMENT_HEAD_DIM = 256
_SEGMENT_BLOCK = 128
"""Keys in a block of `attend_segments`: those of a tile."""
_WIDTHS = 16
"""Heads of the kernels have a multiple of so many elements."""


class CpuBackend(AttentionBackend):
    """Attention by the CPU kernels.

    Args:
        dtype: of the activations; the kernels must support it.
        loaded: kernels to use; default: those for this CPU, which must be available.
    """

    def __init__(self, dtype: torch.dtype, loaded: Kernels | None = None) -> None:
        found = loaded or kernels()
        assert found is not None, "select_backend found the kernels available"
        self.kv_cache_dtype = self._dtype = dtype
        self._kernels = found
        self._scratch = Scratch(dtype)

    def attention(self, params: AttentionParams, weights: AttentionWeights) -> CpuAttention:
        return CpuAttention(self._kernels, self._dtype, params, weights)

    def fuse_decoder(self, layers: Sequence[DecoderParts]) -> NativeDecoder | None:
        attention = [impl for layer in layers if isinstance(impl := layer.attention.impl, CpuAttention)]
        if len(attention) < len(layers) or not all(each.norms_in_kernel for each in attention):
            return None
        if not all(map(_has_kernels, layers)):
            return None
        return NativeDecoder(self._kernels, attention, layers, self._scratch)


def _has_kernels(layer: DecoderParts) -> bool:
    linears = layer.qkv, layer.output, layer.gate_up, layer.down
    return layer.input_norm.has_kernel and layer.post_norm.has_kernel and all(part.packed for part in linears)


class CpuAttention:
    """One layer's attention by the kernels."""

    def __init__(
        self,
        loaded: Kernels,
        dtype: torch.dtype,
        params: AttentionParams,
        weights: AttentionWeights,
    ) -> None:
        self._kernels = loaded
        self._params, self._eps = params, weights.eps
        norms = [(weights.q_norm, slice(0, params.num_heads))]
        norms.append((weights.k_norm, slice(params.num_heads, params.num_heads + params.num_kv_heads)))
        # The kernels read the norms' weights in the activations' dtype.
        self._torch_norms = [
            (norm, heads) for norm, heads in norms if norm is not None and norm.dtype is not dtype
        ]
        rotary = weights.rotary
        cosines, sines = (None, None) if rotary is None else (rotary.cosines, rotary.sines)
        in_kernel = [norm if norm is not None and norm.dtype is dtype else None for norm, _ in norms]
        self._kept_alive = (*in_kernel, cosines, sines, weights.sinks, weights.alibi_slopes)
        q_norm_at, k_norm_at, cosines_at, sines_at, sinks_at, slopes_at = (
            None if tensor is None else tensor.data_ptr() for tensor in self._kept_alive
        )
        self.layer = AttentionLayerStruct(
            q_norm=q_norm_at,
            k_norm=k_norm_at,
            cosines=cosines_at,
            sines=sines_at,
            sinks=sinks_at,
            alibi_slopes=slopes_at,
            num_heads=params.num_heads,
            num_kv_heads=params.num_kv_heads,
            head_dim=params.head_dim,
            rotary_dim=0 if cosines is None else cosines.shape[1] * 2,
            window=params.sliding_window or 0,
            chunk=params.chunk_size or 0,
            scale=params.scale,
            softcap=params.logit_softcap or 0.0,
            eps=weights.eps,
        )

    @property
    def norms_in_kernel(self) -> bool:
        """Whether the kernels compute the norms of heads, if there are any."""
        return not self._torch_norms

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        self.bind(kv_cache)
        if self._torch_norms:
            heads = qkv.view(len(qkv), -1, self._params.head_dim)
            for norm, chosen in self._torch_norms:
                heads[:, chosen] = rms_norm(heads[:, chosen], norm, self._eps)
        layer, step = self.layer, native_step(meta)
        self._kernels.rotate_and_write(layer, step, qkv)
        return self._kernels.attention(layer, step, qkv)

    def rotate_by(self, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Point `layer` to these tables, float32 [positions, rotary_dim / 2], contiguous, which the caller keeps."""
        layer = self.layer
        layer.cosines, layer.sines, layer.rotary_dim = (
            cosines.data_ptr(),
            sines.data_ptr(),
            2 * cosines.shape[1],
        )

    def bind(self, kv_cache: torch.Tensor) -> None:
        """Point `layer` to this cache."""
        layer, address = self.layer, kv_cache.data_ptr()
        if address != layer.k_cache:
            _, layer.num_blocks, layer.block_size, _, _ = kv_cache.shape
            layer.k_cache = address
            layer.v_cache = address + kv_cache.stride(0) * kv_cache.itemsize


class NativeStep:
    """Keeps the tensors alive that `struct` points to."""

    def __init__(self, meta: AttentionMetadata) -> None:
        tables = meta.block_table
        ends = meta.key_ends
        tensors = meta.positions, meta.slot_mapping, meta.query_start_loc, meta.seq_lens, tables
        self._kept_alive = (*tensors, ends)
        positions, slots, query_starts, seq_lens, block_tables = (tensor.data_ptr() for tensor in tensors)
        self.struct = StepStruct(
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_tables=block_tables,
            key_ends=None if ends is None else ends.data_ptr(),
            table_stride=tables.stride(0),
            num_tokens=len(meta.slot_mapping),
            num_requests=len(meta.seq_lens),
        )


def native_step(meta: AttentionMetadata) -> StepStruct:
    """Return a step's metadata in the kernels' form, created on the first call and shared by all layers."""
    step = meta.shared.get(NativeStep)
    if step is None:
        step = meta.shared[NativeStep] = NativeStep(meta)
    return step.struct


def attend_segments(
    loaded: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return attention of tokens to all tokens of their segment, [T, num_heads, head_dim]. Nothing is kept.

    It is the kernels' attention of prompts, whose tokens see each other to the end (`AttentionMetadata.key_ends`), over
    blocks that are forgotten. What a segment becomes does not depend on the others.

    Args:
        q: [T, num_heads, head_dim], of a dtype that the kernels have; head_dim is at most `MAX_SEGMENT_HEAD_DIM`.
        k: [T, num_kv_heads, head_dim], as v.
        starts: int [S + 1], rising from 0 to T: where segments begin, and where the last one ends.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    width = -(-head_dim // _WIDTHS) * _WIDTHS  # zeros behind a head add nothing to a product
    qkv = torch.cat((q, k, v), dim=1)
    if width > head_dim:
        qkv = F.pad(qkv, (0, width - head_dim))
    starts = starts.long()
    lens = starts.diff()
    blocks = (lens + _SEGMENT_BLOCK - 1) // _SEGMENT_BLOCK
    firsts, num_blocks = blocks.cumsum(0) - blocks, int(blocks.sum())
    places = torch.arange(num_tokens) - starts[:-1].repeat_interleave(lens)
    tables = (firsts[:, None] + torch.arange(int(blocks.max()))).clamp(max=num_blocks - 1).int()
    tensors = (
        places,
        firsts.repeat_interleave(lens) * _SEGMENT_BLOCK + places,
        starts.int(),
        lens.int(),
        tables,
        lens.repeat_interleave(lens).int(),
    )
    positions, slots, query_starts, seq_lens, block_tables, key_ends = (each.data_ptr() for each in tensors)
    step = StepStruct(
        positions=positions, slots=slots, query_starts=query_starts, seq_lens=seq_lens, block_tables=block_tables,
        key_ends=key_ends, table_stride=tables.stride(0), num_tokens=num_tokens, num_requests=len(lens),
    )  # fmt: skip
    cache = torch.empty((2, num_blocks, num_kv_heads, _SEGMENT_BLOCK, width), dtype=q.dtype)
    layer = AttentionLayerStruct(
        k_cache=cache[0].data_ptr(), v_cache=cache[1].data_ptr(), num_blocks=num_blocks, block_size=_SEGMENT_BLOCK,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=width, scale=scale,
    )  # fmt: skip
    flat = qkv.view(num_tokens, -1)
    loaded.rotate_and_write(layer, step, flat)
    return loaded.attention(layer, step, flat).view(num_tokens, num_heads, width)[..., :head_dim]


class Scratch:
    """Memory that kernel calls use one after another; it grows to what the largest of them needs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def of(self, wanted: int) -> torch.Tensor:
        """Return at least so many elements."""
        if len(self._memory) < wanted:
            self._memory = allocate((wanted,), self._memory.dtype)
        return self._memory


class NativeDecoder:
    """All layers of a decoder as one kernel call.

    Args:
        attention: of each layer.
        layers: every part has a kernel, and all layers are of the same widths and `eps`.
        scratch: of the layers' dtype.
    """

    def __init__(
        self,
        loaded: Kernels,
        attention: Sequence[CpuAttention],
        layers: Sequence[DecoderParts],
        scratch: Scratch,
    ) -> None:
        self._kernels = loaded
        self._attention = attention
        self._layers = layers
        self._eps = layers[0].input_norm.eps
        self._structs = (DecoderLayerStruct * len(layers))(
            *(_struct(each.layer, layer) for each, layer in zip(attention, layers, strict=True))
        )
        self._steps = (POINTER(StepStruct) * len(layers))()
        self._scratch = scratch

    def __call__(self, x: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        for index, (attention, layer) in enumerate(zip(self._attention, self._layers, strict=True)):
            attention.bind(layer.attention.kv_cache)
            self._steps[index] = pointer(native_step(meta.of_group(layer.attention.group)))
        scratch = self._scratch.of(self._kernels.decoder_scratch(self._structs[0], *x.shape))
        self._kernels.decoder(self._structs, self._steps, x, scratch, self._eps)
        return x


def _struct(attention: AttentionLayerStruct, layer: DecoderParts) -> DecoderLayerStruct:
    linears = layer.qkv, layer.output, layer.gate_up, layer.down
    qkv, output, gate_up, down = (part.packed.struct for part in linears if part.packed)
    return DecoderLayerStruct(
        layer.input_norm.weight.data_ptr(),
        layer.post_norm.weight.data_ptr(),
        pointer(attention),
        qkv,
        output,
        gate_up,
        down,
    )
