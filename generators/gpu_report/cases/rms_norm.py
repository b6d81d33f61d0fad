"""Cases of RMSNorm: widths of published models, with and without the residual, and Gemma's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.rms_norm import (
    MAX_WIDTH,
    add_rms_norm,
    add_rms_norm_fp8,
    rms_norm,
    rms_norm_fp8,
)
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for width in (128, 1024, 3072, 5120, MAX_WIDTH):
        for dtype, name in _DTYPES.items():
            sampled = width == 5120 and dtype is torch.bfloat16
            yield Case(f"add, {name}, width {width}", _call(width, dtype, True, False), sampled)
    for width in (128, 4096, MAX_WIDTH):
        yield Case(f"bf16, width {width}", _call(width, torch.bfloat16, False, False))
    yield Case("bf16, width 2304, 1 + weight", _call(2304, torch.bfloat16, False, True), is_sampled=True)
    for width in (2304, 5376, MAX_WIDTH):
        yield Case(f"add normed, bf16, width {width}", _call_normed(width), is_sampled=width == MAX_WIDTH)
    if not traits.has_fp8:
        return
    for width in (1024, 5120, MAX_WIDTH):
        for is_static in (False, True):
            name = f"bf16 to FP8, width {width}" + (", static" if is_static else "")
            yield Case(name, _call_fp8(width, is_static))
            sampled = width == MAX_WIDTH and not is_static
            yield Case(f"add, {name}", _call_add_fp8(width, is_static, False), is_sampled=sampled)
    yield Case(f"add normed, bf16 to FP8, width {MAX_WIDTH}", _call_add_fp8(MAX_WIDTH, False, True))


def _call_fp8(width: int, is_static: bool) -> Callable[[], object]:
    def call() -> object:
        x = torch.empty(64, width, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(width, dtype=torch.bfloat16, device="cuda")
        return rms_norm_fp8(x, weight, 1e-6, torch.empty(1, device="cuda") if is_static else None)

    return call


def _call_add_fp8(width: int, is_static: bool, is_normed: bool) -> Callable[[], object]:
    def call() -> object:
        x = torch.empty(64, width, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(width, dtype=torch.float32, device="cuda")
        scale = torch.empty(1, device="cuda") if is_static else None
        x_weight = torch.empty_like(weight) if is_normed else None
        return add_rms_norm_fp8(x, torch.empty_like(x), weight, 1e-6, scale, x_weight=x_weight)

    return call


def _call_normed(width: int) -> Callable[[], object]:
    def call() -> object:
        x = torch.empty(64, width, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(width, dtype=torch.float32, device="cuda")
        return add_rms_norm(x, torch.empty_like(x), weight, 1e-6, x_weight=torch.empty_like(weight))

    return call


def _call(width: int, dtype: torch.dtype, has_residual: bool, adds_one: bool) -> Callable[[], object]:
    def call() -> object:
        x = torch.empty(64, width, dtype=dtype, device="cuda")
        weight = torch.empty(width, dtype=dtype, device="cuda")
        if has_residual:
            return add_rms_norm(x, torch.empty_like(x), weight, 1e-6, adds_one=adds_one)
        return rms_norm(x, weight, 1e-6, adds_one=adds_one)

    return call
