"""ShortConv: what LFM2's short convolution computes between its projections, over the states of a step's requests.

Of the three parts of what is projected, b gates the convolution's input x and c its output. Of each request a layer
keeps the convolution's last inputs, in blocks (`attention.layer.StateLayer`).

Our CPU kernels compute a layer in one call, Triton's kernels in one launch, and one more where there are prompts. Plain
torch does what neither can.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from argosy_engine.attention.layer import StateLayer
from argosy_engine.attention.metadata import AttentionMetadata
from argosy_engine.attention.native_step import native_step
from argosy_engine.attention.params import ShortConvParams
from argosy_engine.layers.causal_conv import causal_conv, divided_step
from argosy_engine.native.library import DTYPES, Kernels, ShortConvStruct, kernels


class ShortConvWeights(NamedTuple):
    """Weights of one layer, as far as it is this rank's."""

    conv: torch.Tensor
    """float32 [kernel_size, num_channels], the newest token's factors last."""
    bias: torch.Tensor
    """float32 [num_channels]"""


class ShortConvKernel(Protocol):
    """Computes a layer."""

    def __call__(self, bcx: torch.Tensor, state: StateLayer, meta: AttentionMetadata) -> torch.Tensor:
        """See `ShortConv.__call__`."""
        ...


class ShortConv:
    """One layer between its projections.

    Args:
        params, weights: of this rank.
        dtype: of the activations.
        uses_triton: see `AttentionBackend`.
    """

    def __init__(
        self, params: ShortConvParams, weights: ShortConvWeights, dtype: torch.dtype, *, uses_triton: bool
    ) -> None:
        self.params = params
        self.state = StateLayer(params.state, dtype)
        self._kernel = _kernel(params, weights, dtype, uses_triton=uses_triton)

    def __call__(self, bcx: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Compute the layer, [T, num_channels], and the states after the step.

        Args:
            bcx: [T, 3 * num_channels], contiguous: b, c and x.
            meta: of the step.
        """
        return self._kernel(bcx, self.state, meta)


def _kernel(
    params: ShortConvParams, weights: ShortConvWeights, dtype: torch.dtype, *, uses_triton: bool
) -> ShortConvKernel:
    if uses_triton:
        return TritonShortConv(weights)
    native = kernels() if weights.conv.device.type == "cpu" and dtype in DTYPES else None
    if native is not None and params.num_channels % native.lanes == 0:
        return CpuShortConv(params, weights, native)
    return TorchShortConv(weights)


class CpuShortConv:
    """Our CPU kernels."""

    def __init__(self, params: ShortConvParams, weights: ShortConvWeights, loaded: Kernels) -> None:
        self._kernels = loaded
        self._kept_alive = [each.contiguous() for each in weights]
        conv, bias = (each.data_ptr() for each in self._kept_alive)
        self._layer = ShortConvStruct(
            conv=conv, bias=bias, channels=params.num_channels, kernel=params.kernel_size
        )

    def __call__(self, bcx: torch.Tensor, state: StateLayer, meta: AttentionMetadata) -> torch.Tensor:
        layer, (states,) = self._layer, state.states
        layer.states, layer.num_states, layer.block_size = states.data_ptr(), len(states), state.block_size
        return self._kernels.short_conv(layer, native_step(meta.of_group(state.group)), bcx)


class TritonShortConv:
    """Our Triton kernels. What they are launched with depends on the numbers of tokens and requests only."""

    def __init__(self, weights: ShortConvWeights) -> None:
        from argosy_engine.triton_kernels import short_conv

        self._weights = weights
        self._kernels = short_conv

    def __call__(self, bcx: torch.Tensor, state: StateLayer, meta: AttentionMetadata) -> torch.Tensor:
        meta, (states,) = meta.of_group(state.group), state.states
        requests, _ = divided_step(meta, len(bcx))
        return self._kernels.short_conv(
            bcx,
            self._weights.conv,
            self._weights.bias,
            states,
            requests,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            state.block_size,
        )


class TorchShortConv:
    """Plain torch, on any device. It waits for no device."""

    def __init__(self, weights: ShortConvWeights) -> None:
        self._weights = weights

    def __call__(self, bcx: torch.Tensor, state: StateLayer, meta: AttentionMetadata) -> torch.Tensor:
        (states,), (conv, bias) = state.states, self._weights
        b, c, x = bcx.chunk(3, dim=-1)
        mixed = causal_conv(b * x, conv, states, state.rows(meta), meta) + bias
        return (mixed * c).to(bcx.dtype)
