"""Cases of Gated DeltaNets: sizes of published models, on one device and divided among several."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.gated_delta_net import (
    MAX_CHUNK_KEYS,
    DeltaNetShape,
    gated_delta_net,
)
from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.short_conv import requests_of_tokens
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for value_heads in (16, 32, 48, 64):
        for dtype, name in _DTYPES.items():
            yield Case(
                f"{name}, 16 key heads, {value_heads} value heads of 128",
                _call(DeltaNetShape(16, value_heads, 128, 128, 4), dtype),
                is_sampled=value_heads == 32 and dtype is torch.bfloat16,
            )
    yield Case(
        "bf16, 16 key heads, 32 value heads of 128, decodes",
        _call(DeltaNetShape(16, 32, 128, 128, 4), torch.bfloat16, has_prompts=False),
        is_sampled=True,
    )
    yield Case(
        "bf16, 2 key heads, 4 value heads of 128", _call(DeltaNetShape(2, 4, 128, 128, 4), torch.bfloat16)
    )
    yield Case("bf16, 4 heads of 256 and 192", _call(DeltaNetShape(4, 4, 256, 192, 4), torch.bfloat16))


def _call(shape: DeltaNetShape, dtype: torch.dtype, *, has_prompts: bool = True) -> Callable[[], object]:
    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="cuda")

    def call() -> object:
        tokens, rows = 64, 8 if has_prompts else 64
        heads = shape.num_value_heads
        starts = empty(rows + 1, dtype=torch.int32)
        return gated_delta_net(
            shape,
            empty(tokens, shape.num_channels + shape.num_values, dtype=dtype),
            empty(tokens, 2 * heads, dtype=dtype),
            empty(shape.kernel_size, shape.num_channels),
            empty(heads),
            empty(heads),
            empty(shape.value_dim),
            1e-6,
            empty(4, shape.kernel_size - 1, shape.num_channels, dtype=dtype),
            empty(4, heads, shape.key_dim, shape.value_dim),
            requests_of_tokens(starts, tokens) if has_prompts else None,
            empty(12, 2, dtype=torch.int32) if has_prompts and shape.key_dim <= MAX_CHUNK_KEYS else None,
            starts,
            empty(rows, dtype=torch.int32),
            empty(rows, 64, dtype=torch.int32),
            16,
            2 if has_prompts else rows,
        )

    return call
