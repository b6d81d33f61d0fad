"""Cases of the activations of MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.activations import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_fp8,
    relu2,
    relu2_fp8,
    silu_and_mul,
    silu_and_mul_fp8,
)
from argosy_engine.triton_kernels.launch import DeviceTraits
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for activate in (silu_and_mul, gelu_tanh_and_mul):
        for dtype, name in _DTYPES.items():
            yield Case(
                f"{activate.__name__}, {name}, inner 14336",
                _call(activate, 14336, dtype),
                is_sampled=activate is gelu_tanh_and_mul and dtype is torch.bfloat16,
            )
    yield Case("silu_and_mul, bf16, inner 384", _call(silu_and_mul, 384, torch.bfloat16))
    for dtype, name in _DTYPES.items():
        yield Case(f"relu2, {name}, inner 21504", _call(relu2, 21504, dtype, is_gated=False))
    if not traits.has_fp8:
        return
    for inner in (768, 3072, 14336, 28672):  # from one warp per row to rows that registers do not hold
        sampled = inner == 14336
        yield Case(f"silu_and_mul_fp8, bf16, inner {inner}", _call_fp8(silu_and_mul_fp8, inner), sampled)
    yield Case("gelu_tanh_and_mul_fp8, bf16, inner 15360", _call_fp8(gelu_tanh_and_mul_fp8, 15360))
    for inner in (3712, 15680, 21504):
        yield Case(f"relu2_fp8, bf16, inner {inner}", _call_fp8(relu2_fp8, inner, is_gated=False))
    yield Case(
        "relu2_fp8, bf16, inner 15680, static", _call_fp8(relu2_fp8, 15680, is_static=True, is_gated=False)
    )
    yield Case(
        "silu_and_mul_fp8, bf16, inner 14336, static", _call_fp8(silu_and_mul_fp8, 14336, is_static=True)
    )
    yield Case(
        "gelu_tanh_and_mul_fp8, bf16, inner 15360, static",
        _call_fp8(gelu_tanh_and_mul_fp8, 15360, is_static=True),
    )


def _call_fp8(
    activate: Callable[[torch.Tensor, torch.Tensor | None], object],
    inner: int,
    *,
    is_static: bool = False,
    is_gated: bool = True,
) -> Callable[[], object]:
    def call() -> object:
        given = torch.empty(64, (1 + is_gated) * inner, dtype=torch.bfloat16, device="cuda")
        return activate(given, torch.empty(1, device="cuda") if is_static else None)

    return call


def _call(
    activate: Callable[[torch.Tensor], object], inner: int, dtype: torch.dtype, *, is_gated: bool = True
) -> Callable[[], object]:
    return lambda: activate(torch.empty(64, (1 + is_gated) * inner, dtype=dtype, device="cuda"))
