"""Steps of a Gated DeltaNet between its projections, over blocks with stale states, and the same in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import AttentionMetadata, StateLayer
from argosy_engine.attention.params import DeltaNetParams
from argosy_engine.layers.delta_net import DeltaNetWeights
from attention_cases import attention_metadata

BLOCK_SIZE = 16
NUM_STATES = 12
SIZES = {
    "aligned": DeltaNetParams(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=48, kernel_size=4),
    "one head": DeltaNetParams(num_key_heads=1, num_value_heads=1, key_dim=32, value_dim=16, kernel_size=2),
    "published": DeltaNetParams(
        num_key_heads=2, num_value_heads=6, key_dim=128, value_dim=128, kernel_size=4
    ),
    "odd": DeltaNetParams(num_key_heads=3, num_value_heads=3, key_dim=10, value_dim=6, kernel_size=3),
}
"""The CPU kernels do not support the odd sizes."""
Spans = list[tuple[int, int]]
"""Of each request the tokens that a step computes; decodes come first."""
STEPS: dict[str, list[Spans]] = {
    "one token, a chunk, a decode": [[(0, 1)], [(1, 2)], [(2, 70)], [(70, 71)]],
    "long chunks": [[(0, 150)], [(150, 152)], [(152, 290)]],
    "several requests": [
        [(0, 1), (0, 1), (0, 2), (0, 65)],
        [(1, 2), (1, 2), (2, 3), (65, 66)],
        [(2, 3), (2, 40)],
    ],
}
ALLOWED = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
Run = Callable[[torch.Tensor, torch.Tensor, StateLayer, AttentionMetadata], torch.Tensor]


def weights_of(params: DeltaNetParams) -> DeltaNetWeights:
    generator = torch.Generator().manual_seed(3)

    def random_of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    conv = random_of(params.kernel_size, params.num_channels)
    rates = random_of(params.num_value_heads).exp()
    return DeltaNetWeights(
        conv, rates, random_of(params.num_value_heads), 1 + random_of(params.value_dim) * 0.1, 1e-6
    )


def reference(
    params: DeltaNetParams, weights: DeltaNetWeights, qkvz: torch.Tensor, ba: torch.Tensor
) -> torch.Tensor:
    """Compute one whole request in float64."""
    qkvz, ba = qkvz.double(), ba.double()
    conv, rates, dt_bias, norm = (each.double() for each in weights[:4])
    heads, count = params.num_value_heads, len(qkvz)
    x, z = qkvz.split([params.num_channels, params.num_values], dim=1)
    padded = F.pad(x, (0, 0, params.kernel_size - 1, 0))
    mixed = F.silu(sum(padded[tap : tap + count] * conv[tap] for tap in range(params.kernel_size)))
    keys = params.num_key_heads * params.key_dim
    q, k, v = mixed.split([keys, keys, params.num_values], dim=1)
    q, k = (
        (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
            heads // params.num_key_heads, dim=1
        )
        for each in (part.view(count, -1, params.key_dim) for part in (q, k))
    )
    v = v.view(count, heads, -1)
    rate = ba[:, :heads].sigmoid()
    decay = (-rates * F.softplus(ba[:, heads:] + dt_bias)).exp()
    state = torch.zeros(heads, params.key_dim, params.value_dim, dtype=torch.float64)
    read = []
    for token in range(count):
        state = state * decay[token, :, None, None]
        change = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * rate[token, :, None]
        state = state + k[token, :, :, None] * change[:, None]
        read.append(torch.einsum("hkv,hk->hv", state, q[token] * params.key_dim**-0.5))
    out = torch.stack(read)
    out = out * (out.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * norm
    return out.flatten(1) * F.silu(z)


def inputs_of(params: DeltaNetParams, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qkvz = torch.randn(count, params.num_channels + params.num_values, generator=generator)
    return qkvz, torch.randn(count, 2 * params.num_value_heads, generator=generator)


def outputs_of(
    run: Run, params: DeltaNetParams, dtype: torch.dtype, steps: list[Spans]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run steps; return of each request what it was given, and the outputs of its tokens."""
    state = StateLayer(params.state, dtype)
    shapes = [((NUM_STATES, *shape), each) for shape, each in state.tensors]
    state.bind([torch.full(shape, math.nan, dtype=each) for shape, each in shapes], BLOCK_SIZE)
    num_requests = max(map(len, steps))
    given = [inputs_of(params, 300, seed) for seed in range(num_requests)]
    given = [(qkvz.to(dtype), ba.to(dtype)) for qkvz, ba in given]
    found: list[list[torch.Tensor]] = [[] for _ in given]
    held, free = [0] * num_requests, iter(range(1, NUM_STATES))
    for spans in steps:
        tables = torch.zeros(len(spans), 300 // BLOCK_SIZE + 1, dtype=torch.int32)
        for row, (start, end) in enumerate(spans):
            source, target = max(start - 1, 0) // BLOCK_SIZE, (end - 1) // BLOCK_SIZE
            tables[row, source] = held[row]
            if not start or (source != target and row % 2 == 0):  # others' blocks move along their lists
                held[row] = next(free)
            tables[row, target] = held[row]
        qkvz, ba = (
            torch.cat([given[row][part][start:end] for row, (start, end) in enumerate(spans)])
            for part in (0, 1)
        )
        out = run(qkvz, ba, state, attention_metadata(spans, tables, BLOCK_SIZE))
        parts = out.split([end - start for start, end in spans])
        for row, part in enumerate(parts):
            found[row].append(part)
    return [(*each, torch.cat(outputs)) for each, outputs in zip(given, found, strict=True)]


def check_steps(run: Run, params: DeltaNetParams, dtype: torch.dtype, steps: list[Spans]) -> None:
    """Compare steps with the whole of each request in float64."""
    for qkvz, ba, ours in outputs_of(run, params, dtype, steps):
        expected = reference(params, weights_of(params), qkvz[: len(ours)], ba[: len(ours)])
        torch.testing.assert_close(ours.double(), expected, atol=ALLOWED[dtype], rtol=ALLOWED[dtype])
