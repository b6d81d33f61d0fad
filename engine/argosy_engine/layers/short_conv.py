"""ShortConv: what LFM2's short convolution computes between its projections, over the states of a step's requests; and
the short causal convolution of all layers with states, in plain torch.

Of the three parts of what is projected, b gates the convolution's input x and c its output. Of each request a layer
keeps the convolution's last inputs, in blocks (`attention.backend.StateLayer`).

Our CPU kernels compute a layer in one call, Triton's kernels in one launch, and one more where there are prompts. Plain
torch does what neither can. Nothing waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from argosy_engine.attention.backend import AttentionMetadata, StateLayer, StateRows
from argosy_engine.attention.cpu_attn import native_step
from argosy_engine.attention.params import ShortConvParams
from argosy_engine.native.library import Kernels, ShortConvStruct, kernels_for


class ShortConvWeights(NamedTuple):
    """Weights of one layer, as far as it is this rank's."""

    conv: torch.Tensor
    """float32 [kernel_size, num_channels], the newest token's factors last."""
    bias: torch.Tensor
    """float32 [num_channels]"""


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
) -> TritonShortConv | CpuShortConv | TorchShortConv:
    if uses_triton:
        return TritonShortConv(weights)
    native = kernels_for(weights.conv.device, dtype)
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


def causal_conv(
    x: torch.Tensor,
    factors: torch.Tensor,
    conv_states: torch.Tensor,
    rows: StateRows,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """Convolve each channel over the tokens of its request, float32 [T, channels], and keep the last inputs.

    Args:
        x: [T, channels].
        factors: float32 [kernel_size, channels], the newest token's last.
        conv_states: [num_states, kernel_size - 1, channels] in x's dtype, the newest token last; changed.
        rows: blocks of the states of the step's requests.
        meta: of the step.
    """
    kernel_size, channels = factors.shape
    places = _places(meta, kernel_size)
    earlier = conv_states.index_select(0, rows.sources).masked_fill_(rows.begins[:, None, None], 0.0)
    inputs = x.new_empty(len(x) + earlier.shape[0] * earlier.shape[1], channels)
    inputs.index_copy_(0, places.states, earlier.flatten(0, 1))
    inputs.index_copy_(0, places.tokens, x)
    conv_states.index_copy_(0, rows.targets, inputs[places.kept].view_as(earlier))
    summed = torch.zeros(len(x), channels, device=x.device)
    for tap, of_tap in enumerate(factors):
        summed += inputs[places.tokens + (tap + 1 - kernel_size)] * of_tap
    return summed


def divided_step(
    meta: AttentionMetadata, num_tokens: int, chunk_size: int | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `short_conv.requests_of_tokens` and `short_conv.chunks_of_prompts` of a step, which layers share.
    Both are None in steps of decodes, which CUDA graphs repeat.

    Args:
        num_tokens: of the step, with padding.
        chunk_size: tokens of a chunk; None: there are no chunks.
    """
    if num_tokens == len(meta.seq_lens):
        return None, None
    found: tuple[torch.Tensor, torch.Tensor | None] | None = meta.shared.get((divided_step, chunk_size))
    if found is None:
        from argosy_engine.triton_kernels.short_conv import chunks_of_prompts, requests_of_tokens

        starts, chunks = meta.query_start_loc, None
        if chunk_size is not None:
            rows = chunks_of_prompts(meta.query_start_loc_cpu, meta.num_decodes, chunk_size)
            chunks = torch.from_numpy(rows).to(starts.device, non_blocking=True)
        found = meta.shared[divided_step, chunk_size] = requests_of_tokens(starts, num_tokens), chunks
    return found


class _Places(NamedTuple):
    """Rows of the inputs of a step's convolutions: of each request those that it has kept, then those of its tokens."""

    tokens: torch.Tensor
    """int64 [T]"""
    states: torch.Tensor
    """int64 [R * (kernel_size - 1)]: of what was kept before the step."""
    kept: torch.Tensor
    """The same: of what is kept after it."""


def _places(meta: AttentionMetadata, kernel_size: int) -> _Places:
    """Return the rows for a step, which layers share."""
    found: _Places | None = meta.shared.get((_Places, kernel_size))
    if found is None:
        starts = meta.query_start_loc_cpu.astype(np.int64)
        count, earlier = len(starts) - 1, kernel_size - 1
        requests = np.arange(count)
        tokens = np.arange(starts[-1]) + np.repeat((requests + 1) * earlier, np.diff(starts))
        firsts = (
            (each + requests * earlier)[:, None] + np.arange(earlier) for each in (starts[:-1], starts[1:])
        )
        device = meta.block_table.device
        found = _Places(*(torch.from_numpy(each.reshape(-1)).to(device) for each in (tokens, *firsts)))
        meta.shared[_Places, kernel_size] = found
    return found
