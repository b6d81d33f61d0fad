"""Steps of a short convolution between its projections, over blocks with stale states, and the same in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import AttentionMetadata, StateLayer
from argosy_engine.attention.params import ShortConvParams
from argosy_engine.layers.short_conv import ShortConvWeights
from attention_cases import attention_metadata
from delta_net_cases import BLOCK_SIZE, NUM_STATES, Spans

Run = Callable[[torch.Tensor, StateLayer, AttentionMetadata], torch.Tensor]
_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def weights_of(params: ShortConvParams) -> ShortConvWeights:
    generator = torch.Generator().manual_seed(3)
    shapes = (params.kernel_size, params.num_channels), (params.num_channels,)
    return ShortConvWeights(*(torch.randn(shape, generator=generator) for shape in shapes))


def reference(params: ShortConvParams, bcx: torch.Tensor) -> torch.Tensor:
    """Compute one whole request in float64."""
    conv, bias = (each.double() for each in weights_of(params))
    b, c, x = bcx.double().chunk(3, dim=1)
    padded = F.pad(b * x, (0, 0, params.kernel_size - 1, 0))
    return (sum(padded[tap : tap + len(bcx)] * conv[tap] for tap in range(params.kernel_size)) + bias) * c


def check_steps(run: Run, params: ShortConvParams, dtype: torch.dtype, steps: list[Spans]) -> None:
    """Compare steps with the whole of each request in float64."""
    state = StateLayer(params.state, dtype)
    ((shape, _),) = state.tensors
    state.bind([torch.full((NUM_STATES, *shape), math.nan, dtype=dtype)], BLOCK_SIZE)
    num_requests = max(map(len, steps))
    generator = torch.Generator().manual_seed(7)
    given = [
        torch.randn(300, 3 * params.num_channels, generator=generator).to(dtype) for _ in range(num_requests)
    ]
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
        parts = out.split([end - start for start, end in spans])
        for row, (part, (start, end)) in enumerate(zip(parts, spans, strict=True)):
            expected = reference(params, given[row][:end])[start:]
            torch.testing.assert_close(part.double(), expected, atol=_ALLOWED[dtype], rtol=_ALLOWED[dtype])
