"""Cases of activations in FP8: hidden and intermediate sizes of published models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.activations import quantize_fp8
from argosy_engine.triton_kernels.launch import DeviceTraits
from gpu_report.case import Case


def cases(traits: DeviceTraits) -> Iterator[Case]:
    if not traits.has_fp8:
        return
    for width in (1024, 4096, 28672):
        for is_static in (False, True):
            name = f"bf16, width {width}" + (", static" if is_static else "")
            yield Case(name, _call(width, is_static), is_sampled=width == 28672)


def _call(width: int, is_static: bool) -> Callable[[], object]:
    def call() -> object:
        x = torch.empty(64, width, dtype=torch.bfloat16, device="cuda")
        return quantize_fp8(x, torch.empty(1, device="cuda") if is_static else None)

    return call
