"""NativeDecoder: runs all layers of a Llama-style decoder in one call of the CPU kernels.

For a model of a few million parameters, calling the same kernels one by one from Python takes twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, pointer
from typing import Protocol

import torch

from argosy_engine.attention.backend import DecoderParts
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.native_step import native_step
from argosy_engine.native.allocation import allocate
from argosy_engine.native.library import AttentionLayerStruct, DecoderLayerStruct, Kernels, StepStruct


class KernelAttention(Protocol):
    """A layer's attention by the kernels."""

    layer: AttentionLayerStruct

    def bind(self, kv_cache: torch.Tensor) -> None: ...


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
        attention: Sequence[KernelAttention],
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
