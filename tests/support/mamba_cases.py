"""Steps of a Mamba-2 layer between its projections, over blocks with stale states, and the same in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import AttentionMetadata, StateLayer
from argosy_engine.attention.params import MambaParams
from argosy_engine.layers.mamba import GroupMeans, MambaWeights
from argosy_engine.model_configs.sharding import Sharding
from attention_cases import attention_metadata
from delta_net_cases import BLOCK_SIZE, NUM_STATES, Spans
from thread_ranks import ThreadCommunicator, run_threads

SIZES = {
    "aligned": MambaParams(num_heads=4, head_dim=48, num_groups=2, state_size=32, kernel_size=4),
    "one head": MambaParams(
        num_heads=1, head_dim=16, num_groups=1, state_size=16, kernel_size=2, norm="before_gate"
    ),
    "published": MambaParams(num_heads=6, head_dim=64, num_groups=2, state_size=128, kernel_size=4),
    "many": MambaParams(num_heads=33, head_dim=80, num_groups=1, state_size=16, kernel_size=3, norm=None),
    "odd": MambaParams(num_heads=3, head_dim=6, num_groups=3, state_size=10, kernel_size=3),
}
"""The CPU kernels do not support the odd sizes."""
ALLOWED = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
Run = Callable[[torch.Tensor, StateLayer, AttentionMetadata], torch.Tensor]


def weights_of(params: MambaParams) -> MambaWeights:
    generator = torch.Generator().manual_seed(3)

    def random_of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads, channels = params.num_heads, params.num_channels
    return MambaWeights(
        conv=random_of(params.kernel_size, channels),
        conv_bias=random_of(channels) / 4,
        rates=random_of(heads).mul_(2).exp_(),
        dt_bias=random_of(heads) - 2,
        skip=random_of(heads),
        norm=1 + random_of(params.num_values) * 0.1,
        eps=1e-6,
    )


def reference(params: MambaParams, weights: MambaWeights, zxbcdt: torch.Tensor) -> torch.Tensor:
    """Compute one whole request in float64."""
    zxbcdt = zxbcdt.double()
    conv, conv_bias, rates, dt_bias, skip, norm = (each.double() for each in weights[:6])
    heads, groups, count = params.num_heads, params.num_groups, len(zxbcdt)
    z, inputs, dt = zxbcdt.split([params.num_values, params.num_channels, heads], dim=1)
    padded = F.pad(inputs, (0, 0, params.kernel_size - 1, 0))
    taps = sum(padded[tap : tap + count] * conv[tap] for tap in range(params.kernel_size))
    size = groups * params.state_size
    values, b, c = F.silu(taps + conv_bias).split([params.num_values, size, size], dim=1)
    x = values.view(count, heads, -1)
    b, c = (each.view(count, groups, -1).repeat_interleave(heads // groups, dim=1) for each in (b, c))
    step = F.softplus(dt + dt_bias)
    state = torch.zeros(heads, params.state_size, params.head_dim, dtype=torch.float64)
    read = []
    for token in range(count):
        added = torch.einsum("hn,hp->hnp", b[token], x[token] * step[token, :, None])
        state = state * (-rates * step[token]).exp()[:, None, None] + added
        read.append(torch.einsum("hnp,hn->hp", state, c[token]))
    y = (torch.stack(read) + x * skip[:, None]).flatten(1)
    if params.norm != "before_gate":
        y = y * F.silu(z)
    if params.norm is not None:
        grouped = y.view(count, groups, -1)
        y = (grouped * (grouped.square().mean(-1, keepdim=True) + weights.eps).rsqrt()).flatten(1) * norm
    return y * F.silu(z) if params.norm == "before_gate" else y


def inputs_of(params: MambaParams, count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, params.num_inputs, generator=torch.Generator().manual_seed(seed))


def outputs_of(
    run: Run,
    params: MambaParams,
    dtype: torch.dtype,
    steps: list[Spans],
    draw: Callable[[int], torch.Tensor] | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run steps; return of each request what it was given, and the outputs of its tokens.

    Args:
        draw: returns the inputs of the request of a seed; None: random ones.
    """
    state = StateLayer(params.state, dtype)
    shapes = [((NUM_STATES, *shape), each) for shape, each in state.tensors]
    state.bind([torch.full(shape, math.nan, dtype=each) for shape, each in shapes], BLOCK_SIZE)
    num_requests = max(map(len, steps))
    draw = draw or partial(inputs_of, params, 300)
    given = [draw(seed).to(dtype) for seed in range(num_requests)]
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
        rows = torch.cat([given[row][start:end] for row, (start, end) in enumerate(spans)])
        out = run(rows, state, attention_metadata(spans, tables, BLOCK_SIZE))
        for row, part in enumerate(out.split([end - start for start, end in spans])):
            found[row].append(part)
    return [(each, torch.cat(outputs)) for each, outputs in zip(given, found, strict=True)]


def check_steps(run: Run, params: MambaParams, dtype: torch.dtype, steps: list[Spans]) -> None:
    """Compare steps with the whole of each request in float64."""
    for zxbcdt, ours in outputs_of(run, params, dtype, steps):
        expected = reference(params, weights_of(params), zxbcdt[: len(ours)])
        torch.testing.assert_close(ours.double(), expected, atol=ALLOWED[dtype], rtol=ALLOWED[dtype])


def check_ranks(
    make: Callable[[MambaParams, MambaWeights, GroupMeans], Run],
    params: MambaParams,
    dtype: torch.dtype,
    steps: list[Spans],
    num_ranks: int,
) -> None:
    """Compare steps of ranks that share groups with the whole of each request in float64."""
    own, weights = params.of_rank(num_ranks), weights_of(params)

    def of_rank(group: ThreadCommunicator) -> list[torch.Tensor]:
        sharding = Sharding(group.rank, num_ranks)
        values, states = (list(each) for each in sharding.mamba(params))
        heads, first = list(sharding.part(params.num_heads)), params.num_values
        size = params.num_groups * params.state_size
        channels = values + [first + each for each in states] + [first + size + each for each in states]
        last = params.num_inputs - params.num_heads
        columns = values + [first + each for each in channels] + [last + each for each in heads]
        part = MambaWeights(
            weights.conv[:, channels].contiguous(),
            weights.conv_bias[channels],
            *(each[heads] for each in (weights.rates, weights.dt_bias, weights.skip)),
            weights.norm[values],
            weights.eps,
        )
        run = make(own, part, GroupMeans(group, params.num_groups))
        outputs = outputs_of(
            run, own, dtype, steps, lambda seed: inputs_of(params, 300, seed)[:, columns].contiguous()
        )
        return [each for _, each in outputs]

    for seed, parts in enumerate(zip(*run_threads(num_ranks, of_rank), strict=True)):
        ours = torch.cat(parts, dim=1)
        expected = reference(params, weights, inputs_of(params, 300, seed)[: len(ours)].to(dtype))
        torch.testing.assert_close(ours.double(), expected, atol=ALLOWED[dtype], rtol=ALLOWED[dtype])
