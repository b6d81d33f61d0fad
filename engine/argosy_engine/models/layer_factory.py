"""LayerFactory: makes a model's layers from its weights. What depends on the device is decided here, not in models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from argosy_engine.attention.backend import AttentionBackend, AttentionWeights, DecoderParts, FusedDecoder
from argosy_engine.attention.layer import Attention
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.rotary import RotaryEmbedding
from argosy_engine.models.experts import Experts, ExpertsSpec, SeparateExperts, TritonExperts
from argosy_engine.models.layer_kernels import LayerKernels, TorchLayerKernels
from argosy_engine.models.layers import RMSNorm
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
        self._kernels = _layer_kernels(backend)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor in the engine's dtype, on its device."""
        return self.weights.take(name, *shape)

    def linear(
        self, parts: Mapping[str, int], in_features: int, *, bias: bool = False, is_transposed: bool = False
    ) -> Linear:
        """Make one projection, or several fused along their outputs. Arguments: `LinearSpec`."""
        spec = LinearSpec(parts, in_features, bias, is_transposed)
        return Linear(self._method.load(self.weights, spec))

    def gated_linear(
        self, gate: str, up: str, inner: int, in_features: int, *, bias: bool, activation: str = "silu"
    ) -> GatedLinear:
        """Make two projections to `inner` features, fused with activation(gate) * up.

        Args:
            activation: a name of `LayerKernels.gated_activations`.
        """
        spec = LinearSpec({gate: inner, up: inner}, in_features, bias)
        return GatedLinear(
            self._method.load_gated(self.weights, spec, self._kernels.gated_activations[activation])
        )

    def experts(self, spec: ExpertsSpec) -> Experts:
        """Make the experts of one layer, whose activation is silu."""
        if self._backend.uses_triton:
            return TritonExperts(spec, self._method.load_experts(self.weights, spec))
        return SeparateExperts(spec, [self._expert(spec, index) for index in range(spec.num_experts)])

    def _expert(self, spec: ExpertsSpec, index: int) -> tuple[GatedLinear, Linear]:
        gate, up, down = (spec.projection(index, name) for name in ("gate", "up", "down"))
        return (
            self.gated_linear(gate, up, spec.inner, spec.hidden, bias=False),
            self.linear({down: spec.hidden}, spec.inner),
        )

    def rms_norm(self, name: str, size: int, eps: float, *, adds_one: bool = False) -> RMSNorm:
        """Make an RMSNorm with the weight NAME.weight.

        Args:
            adds_one: multiply by 1 + weight, in float32.
        """
        weight = self.take(name + ".weight", size)
        if adds_one:
            weight = weight.to(torch.float32, copy=True).add_(1.0)
        return RMSNorm(weight, eps, self.dtype, self._kernels)

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
        *,
        prefix: str,
    ) -> Attention:
        """Make one layer's attention, with the scales of an FP8 KV cache.

        Args:
            prefix: of the attention's tensors in the checkpoint, which may have such scales.
        """
        if self._backend.kv_cache_dtype is torch.float8_e4m3fn:
            weights = weights._replace(
                k_scale=self._kv_scale(prefix, "k"), v_scale=self._kv_scale(prefix, "v")
            )
        return Attention(params, self._backend, weights)

    def _kv_scale(self, prefix: str, name: str) -> torch.Tensor:
        """Return the scale of keys or values, float32 [1]; 1 if the checkpoint has none."""
        # compressed-tensors, ModelOpt, and what compressed-tensors wrote in 2024
        names = [
            f"{prefix}{name}_scale",
            f"{prefix}{name}_proj.{name}_scale",
            f"{prefix}{name}_proj.output_scale",
        ]
        found = self.weights.find_scale(names)
        return torch.ones(1, device=self.device) if found is None else found

    def fuse_decoder(self, layers: Sequence[DecoderParts]) -> FusedDecoder | None:
        """Return a faster way to run all layers of a decoder; None: run them one by one."""
        return self._backend.fuse_decoder(layers)


def _layer_kernels(backend: AttentionBackend) -> LayerKernels:
    if not backend.uses_triton:
        return TorchLayerKernels()
    from argosy_engine.models.triton_layer_kernels import TritonLayerKernels

    return TritonLayerKernels()
