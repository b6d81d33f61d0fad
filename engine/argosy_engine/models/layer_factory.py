"""LayerFactory: makes a model's layers from its weights. What depends on the device is decided here, not in models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from argosy_engine.attention.backend import AttentionBackend, AttentionWeights, DecoderParts, FusedDecoder
from argosy_engine.attention.layer import Attention
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.models.linear import GatedLinear, Linear, LinearSpec
from argosy_engine.models.linear_method import LinearMethod, UnquantizedLinearMethod
from argosy_engine.models.rope import inverse_frequencies
from argosy_engine.models.rope_config import RopeParameters
from argosy_engine.models.weights import Weights


class LayerFactory:
    """Makes the layers of one model.

    Args:
        weights: source of the tensors; a model's constructor takes each exactly once.
        backend: computes the model's attention.
        max_positions: length of position tables that are computed rather than loaded.
        linear_method: loads and computes the model's linear layers.
    """

    def __init__(
        self,
        weights: Weights,
        backend: AttentionBackend,
        max_positions: int,
        linear_method: LinearMethod | None = None,
    ) -> None:
        self.weights = weights
        self.dtype, self.device = weights.dtype, weights.device
        self.max_positions = max_positions
        self._backend = backend
        self._method = linear_method or UnquantizedLinearMethod()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor in the engine's dtype, on its device."""
        return self.weights.take(name, *shape)

    def linear(
        self, parts: Mapping[str, int], in_features: int, *, bias: bool = False, is_transposed: bool = False
    ) -> Linear:
        """Make one projection, or several fused along their outputs. Arguments: `LinearSpec`."""
        spec = LinearSpec(parts, in_features, bias, is_transposed)
        return Linear(self._method.load(self.weights, spec))

    def gated_linear(self, gate: str, up: str, inner: int, in_features: int, *, bias: bool) -> GatedLinear:
        """Make two projections to `inner` features, fused with silu(gate) * up."""
        spec = LinearSpec({gate: inner, up: inner}, in_features, bias)
        return GatedLinear(self._method.load_gated(self.weights, spec))

    def output_head(self, embedding: torch.Tensor, *, is_tied: bool) -> Linear:
        """Make the projection to the vocabulary: `lm_head` or, if it is tied, the embedding [vocab_size, in] itself."""
        if is_tied:
            return Linear(self._method.tie(embedding))
        vocab_size, in_features = embedding.shape
        return self.linear({"lm_head": vocab_size}, in_features)

    def rotary(self, rope: RopeParameters, head_dim: int) -> RotaryEmbedding:
        """Make the tables of a rotary embedding, which layers share."""
        frequencies = inverse_frequencies(rope, head_dim)
        return RotaryEmbedding(
            frequencies, self.max_positions, self.dtype, self.device, rope.attention_scaling
        )

    def attention(
        self,
        params: AttentionParams,
        weights: AttentionWeights = AttentionWeights(),  # noqa: B008 (immutable)
    ) -> Attention:
        """Make one layer's attention."""
        return Attention(params, self._backend, weights)

    def fuse_decoder(self, layers: Sequence[DecoderParts]) -> FusedDecoder | None:
        """Return a faster way to run all layers of a decoder; None: run them one by one."""
        return self._backend.fuse_decoder(layers)
