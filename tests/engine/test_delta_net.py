"""A Gated DeltaNet between its projections equals a token-by-token computation in float64, over blocks with stale states."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from argosy_engine.attention.params import DeltaNetParams
from argosy_engine.layers.delta_net import (
    CpuDeltaNet,
    DeltaNet,
    DeltaNetKernel,
    DeltaNetWeights,
    TorchDeltaNet,
)
from argosy_engine.native.library import kernels
from attention_cases import attention_metadata

BLOCK_SIZE = 16
NUM_STATES = 12
CASES = {
    "aligned": DeltaNetParams(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=48, kernel_size=4),
    "one-head": DeltaNetParams(num_key_heads=1, num_value_heads=1, key_dim=32, value_dim=16, kernel_size=2),
    "published": DeltaNetParams(
        num_key_heads=2, num_value_heads=6, key_dim=128, value_dim=128, kernel_size=4
    ),
}
ODD = DeltaNetParams(num_key_heads=3, num_value_heads=3, key_dim=10, value_dim=6, kernel_size=3)
"""Sizes that our CPU kernels do not support."""
STEPS = (
    [[(0, 1)], [(1, 2)], [(2, 70)], [(70, 71)]],  # begins with one token; a chunk; a decode
    [[(0, 150)], [(150, 152)], [(152, 290)]],  # chunks of torch's and parts of them
    [[(0, 1), (0, 1), (0, 2), (0, 65)], [(1, 2), (1, 2), (2, 3), (65, 66)], [(2, 3), (2, 40)]],
)
"""Of each request and step the tokens that are computed."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def layer_of(params: DeltaNetParams, kind: str, dtype: torch.dtype) -> tuple[DeltaNet, DeltaNetKernel]:
    weights = weights_of(params)
    net = DeltaNet(params, weights, dtype, uses_triton=False)
    states = [torch.full((NUM_STATES, *shape), math.nan, dtype=each) for shape, each in net.state.tensors]
    net.state.bind(states, BLOCK_SIZE)
    if kind == "torch":
        return net, TorchDeltaNet(params, weights)
    loaded = kernels()
    if loaded is None:
        pytest.skip("no CPU kernels on this machine")
    return net, CpuDeltaNet(params, weights, loaded)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("params", "kind", "dtype"),
    [
        *((each, kind, torch.float32) for each in CASES.values() for kind in ("cpu", "torch")),
        *((CASES["aligned"], kind, torch.bfloat16) for kind in ("cpu", "torch")),
        (ODD, "torch", torch.float32),
        (ODD, "torch", torch.float16),
    ],
)
@torch.inference_mode()
def test_steps_equal_the_whole_in_float64(
    params: DeltaNetParams, kind: str, dtype: torch.dtype, steps: list[list[tuple[int, int]]]
) -> None:
    net, run = layer_of(params, kind, dtype)
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
        out = run(qkvz, ba, net.state, attention_metadata(spans, tables, BLOCK_SIZE))
        parts = out.split([end - start for start, end in spans])
        for row, part in enumerate(parts):
            found[row].append(part)
    for (qkvz, ba), outputs in zip(given, found, strict=True):
        ours = torch.cat(outputs).double()
        expected = reference(params, weights_of(params), qkvz[: len(ours)], ba[: len(ours)])
        allowed = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        torch.testing.assert_close(ours, expected, atol=allowed, rtol=allowed)
