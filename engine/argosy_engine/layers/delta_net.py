"""DeltaNet: what a Gated DeltaNet computes between its projections, over the states of a step's requests.

Queries, keys and values go through a short causal convolution and silu; each head applies the gated delta rule
(arXiv 2412.06464) with a decay and a rate per token, and a norm that z gates ends it. Of each request a layer keeps the
convolution's last inputs and the heads' states, in blocks (`attention.backend.StateLayer`).

Our CPU kernels compute a layer in one call, Triton's kernels in four launches, and two more where there are prompts.
Plain torch does what neither can: decodes together, the tokens of other requests in chunks, each of which is a
triangular system and a few products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import AttentionMetadata, StateLayer
from argosy_engine.attention.cpu_attn import native_step
from argosy_engine.attention.params import DeltaNetParams
from argosy_engine.layers.short_conv import causal_conv, divided_step
from argosy_engine.native.library import MAX_DELTA_KEYS, DeltaNetStruct, Kernels, kernels_for

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""
_CHUNK = 64
"""Tokens that torch computes at a time."""


class DeltaNetWeights(NamedTuple):
    """Weights of one layer, as far as it is this rank's."""

    conv: torch.Tensor
    """float32 [kernel_size, num_channels], the newest token's factors last."""
    rates: torch.Tensor
    """float32 [num_value_heads], exp(A_log)."""
    dt_bias: torch.Tensor
    """float32 [num_value_heads]"""
    norm: torch.Tensor
    """float32 [value_dim]"""
    eps: float
    """Of the norm."""


class DeltaNet:
    """One layer between its projections.

    Args:
        params, weights: of this rank.
        dtype: of the activations.
        uses_triton: see `AttentionBackend`.
    """

    def __init__(
        self, params: DeltaNetParams, weights: DeltaNetWeights, dtype: torch.dtype, *, uses_triton: bool
    ) -> None:
        self.params = params
        self.state = StateLayer(params.state, dtype)
        self._kernel = _kernel(params, weights, dtype, uses_triton=uses_triton)

    def __call__(self, qkvz: torch.Tensor, ba: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Compute the layer, [T, num_values], and the states after the step.

        Args:
            qkvz: [T, num_channels + num_values], contiguous: queries, keys and values of all heads, and z.
            ba: [T, 2 * num_value_heads], contiguous: what rates and decays are made of.
            meta: of the step.
        """
        return self._kernel(qkvz, ba, self.state, meta)


def _kernel(
    params: DeltaNetParams, weights: DeltaNetWeights, dtype: torch.dtype, *, uses_triton: bool
) -> TritonDeltaNet | CpuDeltaNet | TorchDeltaNet:
    if uses_triton:
        return TritonDeltaNet(params, weights)
    native = kernels_for(weights.conv.device, dtype)
    is_aligned = native is not None and params.key_dim % native.lanes == params.value_dim % native.lanes == 0
    if native is not None and is_aligned and params.key_dim <= MAX_DELTA_KEYS:
        return CpuDeltaNet(params, weights, native)
    return TorchDeltaNet(params, weights)


class CpuDeltaNet:
    """Our CPU kernels."""

    def __init__(self, params: DeltaNetParams, weights: DeltaNetWeights, loaded: Kernels) -> None:
        self._kernels = loaded
        self._kept_alive = [each.contiguous() for each in weights[:4]]
        conv, rates, dt_bias, norm = (each.data_ptr() for each in self._kept_alive)
        self._layer = DeltaNetStruct(
            conv=conv,
            rates=rates,
            dt_bias=dt_bias,
            norm=norm,
            key_heads=params.num_key_heads,
            value_heads=params.num_value_heads,
            key_dim=params.key_dim,
            value_dim=params.value_dim,
            kernel=params.kernel_size,
            eps=weights.eps,
        )

    def __call__(
        self, qkvz: torch.Tensor, ba: torch.Tensor, state: StateLayer, meta: AttentionMetadata
    ) -> torch.Tensor:
        layer = self._layer
        conv_states, states = state.states
        layer.conv_states, layer.states = conv_states.data_ptr(), states.data_ptr()
        layer.num_states, layer.block_size = len(states), state.block_size
        return self._kernels.gated_delta_net(layer, native_step(meta.of_group(state.group)), qkvz, ba)


class TritonDeltaNet:
    """Our Triton kernels. What they are launched with depends on the numbers of tokens and requests only."""

    def __init__(self, params: DeltaNetParams, weights: DeltaNetWeights) -> None:
        from argosy_engine.triton_kernels import gated_delta_net as kernels

        self._shape = kernels.DeltaNetShape(
            params.num_key_heads,
            params.num_value_heads,
            params.key_dim,
            params.value_dim,
            params.kernel_size,
        )
        self._weights = weights
        self._kernels = kernels
        self._chunk_size = kernels.CHUNK_SIZE if params.key_dim <= kernels.MAX_CHUNK_KEYS else None

    def __call__(
        self, qkvz: torch.Tensor, ba: torch.Tensor, state: StateLayer, meta: AttentionMetadata
    ) -> torch.Tensor:
        meta = meta.of_group(state.group)
        requests, chunks = divided_step(meta, len(qkvz), self._chunk_size)
        weights, (conv_states, states) = self._weights, state.states
        return self._kernels.gated_delta_net(
            self._shape,
            qkvz,
            ba,
            weights.conv,
            weights.rates,
            weights.dt_bias,
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
            norm_eps=NORM_EPS,
        )


class TorchDeltaNet:
    """Plain torch, on any device. It waits for no device."""

    def __init__(self, params: DeltaNetParams, weights: DeltaNetWeights) -> None:
        self._params, self._weights = params, weights

    def __call__(
        self, qkvz: torch.Tensor, ba: torch.Tensor, state: StateLayer, meta: AttentionMetadata
    ) -> torch.Tensor:
        of, weights, num_tokens = self._params, self._weights, len(qkvz)
        conv_states, states = state.states
        rows = state.rows(meta)
        x, z = qkvz.split([of.num_channels, of.num_values], dim=-1)
        summed = causal_conv(x, weights.conv, conv_states, rows, meta)
        q, k, v = (
            part.view(num_tokens, -1, size)
            for part, size in zip(
                F.silu(summed).split([(of.num_channels - of.num_values) // 2] * 2 + [of.num_values], dim=-1),
                (of.key_dim, of.key_dim, of.value_dim),
                strict=True,
            )
        )
        shared = of.num_value_heads // of.num_key_heads
        q, k = (
            (each * (each.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).repeat_interleave(shared, dim=1)
            for each in (q, k)
        )
        q = q * of.key_dim**-0.5
        b, a = ba.float().chunk(2, dim=-1)
        rate, decay = b.sigmoid(), -weights.rates * F.softplus(a + weights.dt_bias)
        own = states.index_select(0, rows.sources).masked_fill_(rows.begins[:, None, None, None], 0.0)
        read = torch.empty_like(v)
        num_decodes = meta.num_decodes
        if num_decodes:
            part = slice(0, num_decodes)
            read[part], own[part] = _single(q[part], k[part], v[part], decay[part], rate[part], own[part])
        starts = meta.query_start_loc_cpu.tolist()
        for row in range(num_decodes, len(starts) - 1):
            for start in range(starts[row], starts[row + 1], _CHUNK):
                part = slice(start, min(start + _CHUNK, starts[row + 1]))
                read[part], own[row] = _chunk(q[part], k[part], v[part], decay[part], rate[part], own[row])
        states.index_copy_(0, rows.targets, own)
        normed = read * (read.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * weights.norm
        return (normed.flatten(1) * F.silu(z.float())).to(qkvz.dtype)


def _single(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to one token of each request; return what is read, [R, heads, value_dim], and the states.

    Args:
        q, k: [R, heads, key_dim]; v: [R, heads, value_dim]; decay (its logarithm), rate: [R, heads].
        state: [R, heads, key_dim, value_dim].
    """
    state = state * decay.exp()[..., None, None]
    change = (v - torch.einsum("rhkv,rhk->rhv", state, k)) * rate.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * change.unsqueeze(-2)
    return torch.einsum("rhkv,rhk->rhv", state, q), state


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to some tokens of one request at once; return what each reads, [T, heads, value_dim], and the
    state after them.

    What a token changes depends on what those before it have changed: a triangular system (the WY representation,
    arXiv 2406.06484, with decays as in 2412.06464).

    Args:
        q, k: [T, heads, key_dim]; v: [T, heads, value_dim]; decay (its logarithm), rate: [T, heads].
        state: [heads, key_dim, value_dim].
    """
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    rate = rate.t().unsqueeze(-1)
    total = decay.t().cumsum(-1)
    """Logarithm of the decay from the state before the chunk to after each token."""
    # Sums of their own: after a token that forgets nearly all, differences of totals have lost what came after it.
    later = decay.t().unsqueeze(-1).expand(-1, -1, len(decay)).tril(-1)
    between = later.cumsum(-2).exp().tril()
    """From token j (column) to token i."""
    seen = total.exp().unsqueeze(-1)
    system = (k @ k.mT) * between * rate
    change = torch.linalg.solve_triangular(
        system, (v - (k * seen) @ state) * rate, upper=False, unitriangular=True
    )
    read = (q * seen) @ state + ((q @ k.mT) * between) @ change
    left = between[:, -1].unsqueeze(-1)
    state = state * seen[:, -1:] + (k * left).mT @ change
    return read.transpose(0, 1), state
