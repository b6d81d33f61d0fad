"""NativeDecoder: runs all layers of a Llama-style decoder in one call of the CPU kernels.

For a model of a few million parameters, calling the same kernels one by one from Python takes twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, pointer

import torch

from argosy_engine.attention.cpu_attn import CpuAttention, native_step
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.models.layers import GatedLinear, Linear, RMSNorm
from argosy_engine.native.allocation import allocate
from argosy_engine.native.library import DecoderLayerStruct, StepStruct, kernels


class NativeLayer:
    """The parts of one layer: norm, attention with its projections, norm, gated MLP."""

    def __init__(
        self,
        input_norm: RMSNorm,
        qkv: Linear,
        attention: CpuAttention,
        output: Linear,
        post_norm: RMSNorm,
        gate_up: GatedLinear,
        down: Linear,
    ) -> None:
        self.attention = attention
        self.eps = input_norm.eps
        self.hidden_size, self.dtype = input_norm.weight.shape[0], input_norm.weight.dtype
        self._norms = input_norm, post_norm
        self._linears = qkv, output, gate_up, down

    @property
    def is_complete(self) -> bool:
        """Whether every part has a kernel."""
        return all(norm.has_kernel for norm in self._norms) and all(part.packed for part in self._linears)

    def struct(self) -> DecoderLayerStruct:
        qkv, output, gate_up, down = (part.packed.struct for part in self._linears if part.packed)
        input_norm, post_norm = (norm.weight.data_ptr() for norm in self._norms)
        return DecoderLayerStruct(
            input_norm, post_norm, pointer(self.attention.layer), qkv, output, gate_up, down
        )


class NativeDecoder:
    """All layers of a decoder as one kernel call.

    Args:
        layers: all of them complete (`is_complete`) and of the same widths.
    """

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        loaded = kernels()
        assert loaded is not None
        self._kernels = loaded
        self._layers = layers
        self._structs = (DecoderLayerStruct * len(layers))(*(layer.struct() for layer in layers))
        self._steps = (POINTER(StepStruct) * len(layers))()
        self._scratch = torch.empty(0, dtype=layers[0].dtype)

    def __call__(
        self, x: torch.Tensor, kv_cache: Sequence[torch.Tensor], meta: AttentionMetadata
    ) -> torch.Tensor:
        """Turn embeddings x [T, hidden_size] into hidden states before the final norm, in place; returns x."""
        for index, layer in enumerate(self._layers):
            layer.attention.bind(kv_cache[index])
            self._steps[index] = pointer(native_step(meta.of_layer(index)))
        wanted = self._kernels.decoder_scratch(self._structs[0], *x.shape)
        if len(self._scratch) < wanted:
            self._scratch = allocate((wanted,), x.dtype)
        self._kernels.decoder(self._structs, self._steps, x, self._scratch, self._layers[0].eps)
        return x
