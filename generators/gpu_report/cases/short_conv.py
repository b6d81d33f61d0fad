"""Cases of short convolutions: sizes of LFM2."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.short_conv import requests_of_tokens, short_conv
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for channels in (1024, 2048, 2560):
        for dtype, name in _DTYPES.items():
            is_sampled = channels == 2048 and dtype is torch.bfloat16
            label = f"{name}, {channels} channels, kernels of 3"
            yield Case(label, _call(channels, dtype), is_sampled=is_sampled)
            call = _call(channels, dtype, has_prompts=False)
            yield Case(f"{label}, decodes", call, is_sampled=is_sampled)


def _call(channels: int, dtype: torch.dtype, *, has_prompts: bool = True) -> Callable[[], object]:
    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="cuda")

    def call() -> object:
        tokens, rows = 64, 8 if has_prompts else 64
        starts = empty(rows + 1, dtype=torch.int32)
        return short_conv(
            empty(tokens, 3 * channels, dtype=dtype),
            empty(3, channels),
            empty(channels),
            empty(4, 2, channels, dtype=dtype),
            requests_of_tokens(starts, tokens) if has_prompts else None,
            starts,
            empty(rows, dtype=torch.int32),
            empty(rows, 64, dtype=torch.int32),
            16,
        )

    return call
