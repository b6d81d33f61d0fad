"""Attention, the module that every model uses for a layer; the AttentionBackend that computes it; what both are given
of a step. StateLayer: what a layer keeps that has a state per request instead. The registry of backends: `selector`.

A backend owns everything between the projection to q, k and v and the output projection: the norm of q and k heads, the
rotary embedding, the layout of keys and values inside a block of the KV cache, the write to it, and attention itself.
It is one module, imported only if it is chosen. Metadata is built once per step and KV cache group; its names and
dtypes are vLLM's.

Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): a token's key of head h is W_UK[h] c beside its
rotated key, and its value is W_UV[h] c, where c is the token's latent: the norm of what `kv_a_proj_with_mqa` makes of
it. Only c and the rotated key are kept. Attention takes one of two forms that give the same result:

- absorbed: q^T (W_UK c) is (W_UK^T q)^T c, so queries are brought to the latents, all heads attend to the same vectors,
  and W_UV is applied to what comes out. For decodes, which read as little memory as there is to read.
- expanded: keys and values of every head are computed, and it is attention as usual. For prompts, in which it takes
  fewer operations (`LatentAttentionParams.expands`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from argosy_engine.attention.kv_cache_spec import KVCacheSpec, RecurrentStateSpec
from argosy_engine.attention.params import AttentionParams, LatentAttentionParams, LayerParams, StateParams
from argosy_engine.quantized_rows import Activations, RowQuantization

if TYPE_CHECKING:
    from argosy_engine.native.library import PackedLinear


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """Metadata of a batch flattened to T tokens of R requests, decodes (one new token) first."""

    num_decodes: int
    query_start_loc: torch.Tensor
    """int32 [R + 1]: index of each request's first token, and T."""
    seq_lens: torch.Tensor
    """int32 [R]: each request's number of tokens after this step."""
    positions: torch.Tensor
    """int64 [T]: each token's row in the rotary tables (`ModelInputs.positions`)."""
    slot_mapping: torch.Tensor
    """int64 [T]: where each token's key and value go, block * block_size + offset."""
    block_table: torch.Tensor
    """int32 [R, max_blocks]: each request's blocks, in token order."""
    query_start_loc_cpu: NDArray[np.int32]
    """`query_start_loc` on the host; on a CPU the same memory."""
    seq_lens_cpu: NDArray[np.int32]
    """`seq_lens` on the host; on a CPU the same memory."""
    key_ends: torch.Tensor | None = None
    """int32 [T]: position after the last key that each token attends to, where tokens of an image attend to all of it;
    None: all attend to themselves and those before. `selector.BIDIRECTIONAL_BACKENDS` honour it."""
    groups: tuple[AttentionMetadata, ...] = ()
    """Metadata of each KV cache group, if there are several. They differ only in slots and block tables. Empty
    otherwise."""
    shared: dict[Any, Any] = field(default_factory=dict)
    """What a backend has derived from this metadata, for the layers after the first."""
    query_len_bound: int | None = None
    """Bounds the new tokens of a request in every step that a captured graph is replayed for. None: it is no graph of
    prompts, and the step itself tells."""

    @property
    def max_query_len(self) -> int:
        """The most new tokens of a request, or a bound on them; found once for all layers."""
        if self.query_len_bound is not None:
            return self.query_len_bound
        found: int | None = self.shared.get("max_query_len")
        if found is None:
            has_prompts = self.num_decodes < len(self.seq_lens_cpu)
            found = int(np.diff(self.query_start_loc_cpu).max()) if has_prompts else 1
            self.shared["max_query_len"] = found
        return found

    def forget(self) -> None:
        """Drop what has been derived: it is derived again, from what the tensors then hold."""
        for each in (self, *self.groups):
            each.shared.clear()

    def of_group(self, index: int) -> AttentionMetadata:
        """Return the metadata of a KV cache group, for its layers."""
        return self.groups[index] if self.groups else self


def metadata_of(
    step: Sequence[tuple[int, int, int]], tables: torch.Tensor, block_size: int, device: torch.device
) -> AttentionMetadata:
    """Make the metadata of a few requests, for what is computed before the engine serves.

    Args:
        step: of each request its row in the tables, and the first and end position of its tokens; decodes first.
        tables: int32 [rows, max_blocks], on the CPU.
    """
    rows = torch.tensor([row for row, start, end in step for _ in range(start, end)])
    positions = torch.cat([torch.arange(start, end) for _, start, end in step])
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
    starts = np.array([0, *itertools.accumulate(end - start for _, start, end in step)], np.int32)
    seq_lens = np.array([end for _, _, end in step], np.int32)
    return AttentionMetadata(
        num_decodes=sum(end - start == 1 for _, start, end in step),
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        block_table=tables[[row for row, _, _ in step]].to(device),
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
    )


class DeepstackFeatures(NamedTuple):
    """Features of I tokens of images for the D first layers."""

    rows: torch.Tensor
    """int64 [I]: the tokens' indices in the batch."""
    features: torch.Tensor
    """[D, I, hidden_size]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """A step's flattened batch of T tokens, as a model reads it."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]: rows of the rotary tables: the tokens' positions, except where their coordinates differ (M-RoPE)."""
    meta: AttentionMetadata
    hidden: torch.Tensor | None = None
    """[T, hidden_size], instead of the tokens' embeddings: what the previous stage of a pipeline has returned. May be
    changed in place. None: the model embeds the tokens."""
    deepstack: DeepstackFeatures | None = None
    """What is added to the outputs of the first layers (`VisionSpec.num_deepstack`)."""
    token_types: torch.Tensor | None = None
    """int64 [T]: 1 for tokens of a pair's second text, of encoders that tell them apart. None: all are 0."""


class RotaryEmbedding:
    """Rotary position embedding that rotates halves, the layout of Llama checkpoints.

    Args:
        inv_freq: float32 on the CPU, of at most head_dim / 2 pairs, see `layers.embedding.inverse_frequencies`; the
            pairs after them are not rotated.

        axes: which of a token's three coordinates turns each pair (M-RoPE); None: all are turned by its position.
        num_own_rows: rows at the end of the tables for tokens whose coordinates differ (`write_rows`).

    The tables are always computed on the CPU. Weights are planned on the meta device, and torch's arithmetic there
    first imports torch's compiler, which takes longer than the rest of a small model's load.
    """

    def __init__(
        self,
        inv_freq: torch.Tensor,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        attention_scaling: float = 1.0,
        head_dim: int | None = None,
        *,
        axes: Sequence[int] | None = None,
        num_own_rows: int = 0,
    ) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        cosines, sines = angles.cos() * attention_scaling, angles.sin() * attention_scaling
        num_rows, fixed = max_positions + num_own_rows, 0
        if head_dim is not None:
            fixed = head_dim // 2 - len(inv_freq)
        if num_own_rows or fixed:
            cosines = F.pad(cosines, (0, fixed, 0, num_own_rows), value=1.0)
            sines = F.pad(sines, (0, fixed, 0, num_own_rows))
        assert cosines.shape == sines.shape == (num_rows, len(inv_freq) + fixed)
        self._dtype = dtype
        self._inv_freq, self._scaling, self._axes = inv_freq, attention_scaling, axes
        self.first_own_row = max_positions
        self.cosines = cosines.to(device)
        """float32 [max_positions + num_own_rows, head_dim / 2]"""
        self.sines = sines.to(device)

    def write_rows(self, coordinates: NDArray[np.int64]) -> None:
        """Write the rotations of tokens with these coordinates, int64 [3, N], to the rows from `first_own_row` on.
        Steps after this one read them there."""
        axes = [0] * len(self._inv_freq) if self._axes is None else list(self._axes)
        angles = torch.from_numpy(coordinates[axes].T.astype(np.float32)) * self._inv_freq
        rows = slice(self.first_own_row, self.first_own_row + coordinates.shape[1])
        for table, values in ((self.cosines, angles.cos()), (self.sines, angles.sin())):
            table[rows, : len(self._inv_freq)] = (values * self._scaling).to(table.device)

    def select(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin for positions [T], each [T, 1, head_dim]. Called once per step for all layers."""
        cos, sin = self.cosines[positions].to(self._dtype), self.sines[positions].to(self._dtype)
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((sin, sin), dim=-1).unsqueeze(1)

    @staticmethod
    def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads, head_dim]."""
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + rotated * sin


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / rms(x) * weight over the last dimension, in float32 (arXiv 1910.07467); the result has x's dtype.

    A weight in float32 is applied before the result is rounded to x's dtype (Gemma), another one after it (Llama).
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype is torch.float32:
        return (wide * weight).to(x.dtype)
    return wide.to(x.dtype) * weight


class AttentionImpl(Protocol):
    """One layer's attention by one backend."""

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> Activations:
        """See `Attention.__call__`."""
        ...


class LatentAttentionImpl(Protocol):
    """One layer's latent attention by one backend."""

    def __call__(
        self, q: torch.Tensor, compressed: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        """See `LatentAttention.__call__`."""
        ...


class AttentionWeights(NamedTuple):
    """What one layer's attention has besides its constants."""

    rotary: RotaryEmbedding | None = None
    """Tables of the rotary embedding; None: q and k are not rotated."""
    q_norm: torch.Tensor | None = None
    """Weight [head_dim] of an RMSNorm over each query head before the rotation, in float32 or in the model's dtype; see
    `rms_norm`. None: no norm."""
    k_norm: torch.Tensor | None = None
    """The same for the key heads."""
    eps: float = 0.0
    """Of these norms."""
    k_scale: torch.Tensor | None = None
    """float32 [1]: an FP8 KV cache stores key / k_scale. None: the cache has the model's dtype."""
    v_scale: torch.Tensor | None = None
    """The same for the values."""
    sinks: torch.Tensor | None = None
    """float32 [num_heads]: a score per head that takes its share of the probabilities and has no value. None: there are
    none."""
    alibi_slopes: torch.Tensor | None = None
    """float32 [num_heads]: what a head's scaled score falls by for each position between query and key. None: it does
    not."""
    output_quantization: RowQuantization | None = None
    """How the output projection wants its inputs. A backend may leave the quantisation to it."""


class LatentWeights(NamedTuple):
    """What one layer's latent attention has besides its constants."""

    rotary: RotaryEmbedding
    """Tables of `qk_rope_head_dim` elements."""
    norm: torch.Tensor
    """Weight [kv_lora_rank] of the RMSNorm of latents."""
    eps: float
    """Of this norm."""
    key_up: torch.Tensor
    """[num_heads, kv_lora_rank, qk_nope_head_dim], contiguous: W_UK of each head, transposed."""
    value_up: torch.Tensor
    """[num_heads, v_head_dim, kv_lora_rank], contiguous: W_UV of each head."""

    @classmethod
    def of_kv_b(
        cls,
        kv_b: torch.Tensor,
        qk_nope_head_dim: int,
        rotary: RotaryEmbedding,
        norm: torch.Tensor,
        eps: float,
    ) -> LatentWeights:
        """Make them of the weight of `kv_b_proj`, [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]."""
        keys, values = kv_b[:, :qk_nope_head_dim], kv_b[:, qk_nope_head_dim:]
        return cls(rotary, norm, eps, keys.transpose(1, 2).contiguous(), values.contiguous())


_FEW_ROWS = 3
"""Up to as many rows, W x^T in float32 takes a CPU half as long as x W^T."""


def multiply_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T of each head, [T, num_heads, out], any strides with contiguous heads.

    Args:
        x: [T, num_heads, in], with contiguous heads.
        weight: [num_heads, out, in].
    """
    if len(x) <= _FEW_ROWS and x.dtype is torch.float32 and x.device.type == "cpu":
        return torch.bmm(weight, x.permute(1, 2, 0)).permute(2, 0, 1).contiguous()
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


class AttentionBackend(ABC):
    """Makes the attention of layers, all of one dtype."""

    kv_cache_dtype: torch.dtype
    """Of keys and values in the cache."""
    uses_triton: ClassVar[bool] = False
    """Whether our Triton kernels compute it. Then they compute the model's other layers, too."""

    @abstractmethod
    def attention(self, params: AttentionParams, weights: AttentionWeights) -> AttentionImpl:
        """Make one layer's attention."""

    def latent_attention(
        self, params: LatentAttentionParams, weights: LatentWeights
    ) -> LatentAttentionImpl | None:
        """Make one layer's latent attention, or return None if the backend has none."""
        return None

    def fuse_decoder(self, layers: Sequence[DecoderParts]) -> FusedDecoder | None:
        """Return a faster way to run all layers of a decoder, or None if the backend has none for these layers."""
        return None


class AttentionLayer:
    """A layer that keeps something of every token in the KV cache.

    Attributes:
        kv_cache: in the shape that the params say (`kv_cache_shape`), once it is bound.
        group: index of its KV cache group.
    """

    params: LayerParams
    kv_cache: torch.Tensor
    group = 0

    def __init__(self, kv_cache_dtype: torch.dtype) -> None:
        self.kv_cache_dtype = kv_cache_dtype

    def bind(self, kv_cache: torch.Tensor, group: int = 0) -> None:
        """Let the layer use this cache, whose slots are those of this KV cache group."""
        self.kv_cache, self.group = kv_cache, group

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return what the layer keeps in a block of `block_size` tokens."""
        return self.params.kv_cache_spec(block_size, self.kv_cache_dtype.itemsize)

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of the layer's cache, of `kv_cache_dtype`."""
        return self.params.kv_cache_shape(num_blocks, block_size)


class Attention(AttentionLayer):
    """Norm of q and k heads, rotary embedding, KV cache write and attention of one layer."""

    def __init__(
        self,
        params: AttentionParams,
        backend: AttentionBackend,
        weights: AttentionWeights = AttentionWeights(),  # noqa: B008 (immutable)
    ) -> None:
        super().__init__(backend.kv_cache_dtype)
        self.params: AttentionParams = params
        self.impl = backend.attention(params, weights)

    def __call__(self, qkv: torch.Tensor, meta: AttentionMetadata) -> Activations:
        """Write keys and values to the cache and compute attention, [T, num_heads * head_dim].

        The result may be quantised, if the output projection wants it so.

        Args:
            qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], contiguous; may be changed in place.
            meta: of the step.
        """
        return self.impl(qkv, self.kv_cache, meta.of_group(self.group))


class LatentAttention(AttentionLayer):
    """Norm of the latents, rotary embedding, cache write and attention of one layer."""

    def __init__(
        self, params: LatentAttentionParams, backend: AttentionBackend, weights: LatentWeights
    ) -> None:
        super().__init__(backend.kv_cache_dtype)
        self.params: LatentAttentionParams = params
        impl = backend.latent_attention(params, weights)
        assert impl is not None, "select_backend found that the backend computes latent attention"
        self.impl: LatentAttentionImpl = impl

    def __call__(self, q: torch.Tensor, compressed: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Write the latents and rotated keys to the cache and compute attention, [T, num_heads * v_head_dim].

        Args:
            q: [T, num_heads * (qk_nope_head_dim + qk_rope_head_dim)], contiguous; may be changed in place.
            compressed: [T, kv_lora_rank + qk_rope_head_dim], latents before their norm and keys before the rotation;
                rows may be strided.
            meta: of the step.
        """
        return self.impl(q, compressed, self.kv_cache, meta.of_group(self.group))


class DecoderNorm(Protocol):
    """An RMSNorm, as far as `fuse_decoder` looks at it."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...

    @property
    def has_kernel(self) -> bool: ...


class DecoderLinear(Protocol):
    """A linear or gated linear layer, as far as `fuse_decoder` looks at it."""

    @property
    def packed(self) -> PackedLinear | None:
        """The weight in the layout of the CPU kernels, if they compute this layer."""
        ...


class DecoderAttention(Protocol):
    """A layer's attention, as far as `fuse_decoder` looks at it."""

    @property
    def impl(self) -> AttentionImpl: ...

    @property
    def kv_cache(self) -> torch.Tensor: ...

    @property
    def group(self) -> int: ...


class DecoderParts(NamedTuple):
    """The parts of one Llama-style layer: norm, attention with its projections, norm, gated MLP."""

    input_norm: DecoderNorm
    qkv: DecoderLinear
    attention: DecoderAttention
    output: DecoderLinear
    post_norm: DecoderNorm
    gate_up: DecoderLinear
    down: DecoderLinear


class FusedDecoder(Protocol):
    """All layers of a decoder in one call."""

    def __call__(self, x: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Turn embeddings x [T, hidden_size] into hidden states before the final norm, in place; returns x."""
        ...


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
