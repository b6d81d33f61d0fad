"""Cases of the gated activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.device_traits import DeviceTraits
from argosy_engine.triton_kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
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


def _call(activate: Callable[[torch.Tensor], object], inner: int, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: activate(torch.empty(64, 2 * inner, dtype=dtype, device="cuda"))
