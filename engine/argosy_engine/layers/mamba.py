"""Mamba: what a Mamba-2 layer computes between its projections, over the states of a step's requests.

x, B and C go through a short causal convolution and silu; each head applies the selective state space (arXiv
2405.21060), whose step size per token decays its state and scales what is added to it; D passes x by, z gates, and an
RMSNorm of each group ends or precedes that. Of each request a layer keeps the convolution's last inputs and
the heads' states, in blocks (`attention.backend.StateLayer`).

Our CPU kernels compute a layer in one call, Triton's kernels in three launches, and three more where there are prompts.
Plain torch does what neither can: decodes together, the tokens of other requests in chunks, each of which is a few
products. Where ranks share a group, all of them leave the norm until its squares are added up (`GroupMeans`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import AttentionMetadata, StateLayer
from argosy_engine.attention.cpu_attn import native_step
from argosy_engine.attention.params import MambaParams
from argosy_engine.distributed.parallel_state import Communicator
from argosy_engine.layers.short_conv import causal_conv, divided_step
from argosy_engine.native.library import Kernels, MambaStruct, kernels_for

_CHUNK = 64
"""Tokens that torch computes at a time."""


class MambaWeights(NamedTuple):
    """Weights of one layer, as far as it is this rank's."""

    conv: torch.Tensor
    """float32 [kernel_size, num_channels], the newest token's factors last."""
    conv_bias: torch.Tensor
    """float32 [num_channels]"""
    rates: torch.Tensor
    """float32 [num_heads], exp(A_log)."""
    dt_bias: torch.Tensor
    """float32 [num_heads]"""
    skip: torch.Tensor
    """float32 [num_heads], D."""
    norm: torch.Tensor
    """float32 [num_values]; ones if there is no norm."""
    eps: float
    """Of the norm."""


class GroupMeans:
    """Adds up what the ranks that share a group contribute to its mean square: one number per token and group is
    exchanged, where vLLM's `Mixer2RMSNormGated` gathers the outputs of all heads if there are several groups.

    Args:
        communicator: of all tensor-parallel ranks.
        num_groups: of the whole layer, which divides their number.
    """

    def __init__(self, communicator: Communicator, num_groups: int) -> None:
        self._communicator, self._num_groups = communicator, num_groups
        self._group = communicator.rank // (communicator.size // num_groups)

    def __call__(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the mean square of this rank's group.

        Args:
            squares: float32 [T], of this rank's heads, divided by the number of elements of the group. May be changed.
        """
        if self._num_groups == 1:
            return self._communicator.all_reduce(squares)
        width = -(-len(squares) // 4) * 4  # rows begin at multiples of 16 bytes, as what Triton compiles for
        groups = squares.new_zeros(self._num_groups, width)
        groups[self._group, : len(squares)] = squares
        return self._communicator.all_reduce(groups)[self._group, : len(squares)]


SumSquares = Callable[[torch.Tensor], torch.Tensor]
"""What `GroupMeans` does."""


class Mamba:
    """One layer between its projections.

    Args:
        params, weights: of this rank.
        dtype: of the activations.
        group_means: of the norm's groups; None: no other rank has heads of them.
        uses_triton: see `AttentionBackend`.
    """

    def __init__(
        self,
        params: MambaParams,
        weights: MambaWeights,
        dtype: torch.dtype,
        group_means: SumSquares | None = None,
        *,
        uses_triton: bool,
    ) -> None:
        self.params = params
        self.state = StateLayer(params.state, dtype)
        self._kernel = _kernel(params, weights, dtype, group_means, uses_triton=uses_triton)

    def __call__(self, zxbcdt: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Compute the layer, [T, num_values], and the states after the step.

        Args:
            zxbcdt: [T, num_inputs], contiguous: z and x of all heads, B and C of all groups, and what the heads' step
                sizes are made of.
            meta: of the step.
        """
        return self._kernel(zxbcdt, self.state, meta)


def _kernel(
    params: MambaParams,
    weights: MambaWeights,
    dtype: torch.dtype,
    group_means: SumSquares | None,
    *,
    uses_triton: bool,
) -> TritonMamba | CpuMamba | TorchMamba:
    if uses_triton:
        return TritonMamba(params, weights, group_means)
    native = kernels_for(weights.conv.device, dtype)
    if native is not None and params.head_dim % native.lanes == params.state_size % native.lanes == 0:
        return CpuMamba(params, weights, native, group_means)
    return TorchMamba(params, weights, group_means)


_NORM_ORDERS = {None: 0, "after_gate": 1, "before_gate": 2}
"""`Mamba.norm_order` of mamba.h."""


class CpuMamba:
    """Our CPU kernels."""

    def __init__(
        self,
        params: MambaParams,
        weights: MambaWeights,
        loaded: Kernels,
        group_means: SumSquares | None = None,
    ) -> None:
        self._kernels, self._group_means = loaded, group_means
        self._kept_alive = [each.contiguous() for each in weights[:6]]
        conv, conv_bias, rates, dt_bias, skip, norm = (each.data_ptr() for each in self._kept_alive)
        self._layer = MambaStruct(
            conv=conv,
            conv_bias=conv_bias,
            rates=rates,
            dt_bias=dt_bias,
            skip=skip,
            norm=norm,
            heads=params.num_heads,
            head_dim=params.head_dim,
            groups=params.num_groups,
            state_size=params.state_size,
            kernel=params.kernel_size,
            norm_order=_NORM_ORDERS[params.norm],
            norm_ranks=params.group_ranks,
            eps=weights.eps,
        )

    def __call__(self, zxbcdt: torch.Tensor, state: StateLayer, meta: AttentionMetadata) -> torch.Tensor:
        layer = self._layer
        conv_states, states = state.states
        layer.conv_states, layer.states = conv_states.data_ptr(), states.data_ptr()
        layer.num_states, layer.block_size = len(states), state.block_size
        step = native_step(meta.of_group(state.group))
        if self._group_means is None:
            return self._kernels.mamba(layer, step, zxbcdt)
        y, squares = self._kernels.mamba_before_norm(layer, step, zxbcdt)
        return self._kernels.mamba_norm(layer, zxbcdt, y, self._group_means(squares))


class TritonMamba:
    """Our Triton kernels. What they are launched with depends on the numbers of tokens and requests only."""

    def __init__(
        self, params: MambaParams, weights: MambaWeights, group_means: SumSquares | None = None
    ) -> None:
        from argosy_engine.triton_kernels import mamba as kernels

        self._shape = kernels.MambaShape(
            params.num_heads,
            params.head_dim,
            params.num_groups,
            params.state_size,
            params.kernel_size,
            params.norm,
            params.group_ranks,
        )
        self._weights, self._group_means = weights, group_means
        self._kernels = kernels

    def __call__(self, zxbcdt: torch.Tensor, state: StateLayer, meta: AttentionMetadata) -> torch.Tensor:
        meta = meta.of_group(state.group)
        requests, chunks = divided_step(meta, len(zxbcdt), self._kernels.CHUNK_SIZE)
        weights, (conv_states, states) = self._weights, state.states
        return self._kernels.mamba(
            self._shape,
            zxbcdt,
            weights.conv,
            weights.conv_bias,
            weights.rates,
            weights.dt_bias,
            weights.skip,
            weights.norm,
            weights.eps,
            conv_states,
            states,
            requests,
            chunks,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            state.block_size,
            meta.num_decodes,
            self._group_means,
        )


class TorchMamba:
    """Plain torch, on any device. It waits for no device."""

    def __init__(
        self, params: MambaParams, weights: MambaWeights, group_means: SumSquares | None = None
    ) -> None:
        self._params, self._weights, self._group_means = params, weights, group_means

    def __call__(self, zxbcdt: torch.Tensor, state: StateLayer, meta: AttentionMetadata) -> torch.Tensor:
        of, weights, num_tokens = self._params, self._weights, len(zxbcdt)
        conv_states, states = state.states
        rows = state.rows(meta)
        z, inputs, dt = zxbcdt.split([of.num_values, of.num_channels, of.num_heads], dim=-1)
        mixed = F.silu(causal_conv(inputs, weights.conv, conv_states, rows, meta) + weights.conv_bias)
        size = of.num_groups * of.state_size
        values, b, c = mixed.split([of.num_values, size, size], dim=-1)
        x = values.view(num_tokens, of.num_heads, of.head_dim)
        shared = of.num_heads // of.num_groups
        b, c = (
            each.view(num_tokens, of.num_groups, of.state_size).repeat_interleave(shared, dim=1)
            for each in (b, c)
        )
        step = F.softplus(dt.float() + weights.dt_bias)
        decay, added = -weights.rates * step, x * step.unsqueeze(-1)
        own = states.index_select(0, rows.sources).masked_fill_(rows.begins[:, None, None, None], 0.0)
        read = torch.empty_like(x)
        num_decodes = meta.num_decodes
        if num_decodes:
            part = slice(0, num_decodes)
            read[part], own[part] = _single(added[part], b[part], c[part], decay[part], own[part])
        starts = meta.query_start_loc_cpu.tolist()
        for row in range(num_decodes, len(starts) - 1):
            for start in range(starts[row], starts[row + 1], _CHUNK):
                part = slice(start, min(start + _CHUNK, starts[row + 1]))
                read[part], own[row] = _chunk(added[part], b[part], c[part], decay[part], own[row])
        states.index_copy_(0, rows.targets, own)
        return self._gated((read + x * weights.skip.unsqueeze(-1)).flatten(1), z.float()).to(zxbcdt.dtype)

    def _gated(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Apply gate and norm to y [T, num_values]."""
        norm, gate = self._params.norm, F.silu(z)
        if norm is None:
            return y * gate
        if norm == "after_gate":
            y = y * gate
        groups = y.view(len(y), self._params.num_groups, -1)
        means = groups.square().mean(-1, keepdim=True)
        if self._group_means is not None:
            means = self._group_means(means.flatten() / self._params.group_ranks).view_as(means)
        normed = (groups * (means + self._weights.eps).rsqrt()).flatten(1) * self._weights.norm
        return normed * gate if norm == "before_gate" else normed


def _single(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token of each request; return what is read, [R, heads, head_dim], and the states.

    Args:
        x: [R, heads, head_dim], scaled by the step size.
        b, c: [R, heads, state_size]; decay (its logarithm): [R, heads].
        state: [R, heads, state_size, head_dim].
    """
    state = state * decay.exp()[..., None, None] + b.unsqueeze(-1) * x.unsqueeze(-2)
    return torch.einsum("rhnp,rhn->rhp", state, c), state


def _chunk(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute some tokens of one request at once; return what each reads, [T, heads, head_dim], and the state after
    them. The arguments are those of `_single` with tokens for requests, and one state."""
    x, b, c = (each.transpose(0, 1) for each in (x, b, c))
    of_token = decay.t()
    count = len(decay)
    later = torch.ones(count, count, dtype=torch.bool, device=x.device).tril(-1)
    # Sums of the tokens between two, not differences of sums from the first, which lose digits where decays are large.
    between = of_token.unsqueeze(-1).expand(-1, -1, count).masked_fill(~later, 0.0).cumsum(1).exp().tril()
    """From token j (column) to token i, [heads, T, T]."""
    seen = of_token.cumsum(-1).exp().unsqueeze(-1)
    """From the state before the chunk to after each token."""
    read = (c * seen) @ state + ((c @ b.mT) * between) @ x
    left = between[:, -1].unsqueeze(-1)
    state = state * seen[:, -1:] + (b * left).mT @ x
    return read.transpose(0, 1), state
