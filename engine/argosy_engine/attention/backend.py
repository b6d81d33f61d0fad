"""AttentionBackend: what an implementation of attention provides. The registry of backends: `selector`.

A backend owns everything between the projection to q, k and v and the output projection: the norm of q and k heads, the
rotary embedding, the layout of keys and values inside a block of the KV cache, the write to it, and attention itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from argosy_engine.attention.latent import LatentAttentionImpl, LatentWeights
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.params import AttentionParams, LatentAttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.quantized_rows import Activations, RowQuantization

if TYPE_CHECKING:
    from argosy_engine.native.library import PackedLinear


class AttentionImpl(Protocol):
    """One layer's attention by one backend."""

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> Activations:
        """See `layer.Attention.__call__`."""
        ...


class AttentionWeights(NamedTuple):
    """What one layer's attention has besides its constants."""

    rotary: RotaryEmbedding | None = None
    """Tables of the rotary embedding; None: q and k are not rotated."""
    q_norm: torch.Tensor | None = None
    """Weight [head_dim] of an RMSNorm over each query head before the rotation, in float32 or in the model's dtype; see
    `torch_rms_norm`. None: no norm."""
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
    output_quantization: RowQuantization | None = None
    """How the output projection wants its inputs. A backend may leave the quantisation to it."""


class AttentionBackend(Protocol):
    """Makes the attention of layers, all of one dtype."""

    kv_cache_dtype: torch.dtype
    """Of keys and values in the cache."""
    uses_triton: bool
    """Whether our Triton kernels compute it. Then they compute the model's other layers, too."""

    def attention(self, params: AttentionParams, weights: AttentionWeights) -> AttentionImpl:
        """Make one layer's attention."""
        ...

    def latent_attention(
        self, params: LatentAttentionParams, weights: LatentWeights
    ) -> LatentAttentionImpl | None:
        """Make one layer's latent attention, or return None if the backend has none."""
        ...

    def fuse_decoder(self, layers: Sequence[DecoderParts]) -> FusedDecoder | None:
        """Return a faster way to run all layers of a decoder, or None if the backend has none for these layers."""
        ...


class FusedDecoder(Protocol):
    """All layers of a decoder in one call."""

    def __call__(self, x: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Turn embeddings x [T, hidden_size] into hidden states before the final norm, in place; returns x."""
        ...


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
    """A layer's attention (`layer.Attention`), as far as `fuse_decoder` looks at it."""

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
