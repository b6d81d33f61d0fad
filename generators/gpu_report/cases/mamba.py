"""Cases of Mamba-2 layers: sizes of published models, on one device and divided among several."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.mamba import MambaShape, mamba
from argosy_engine.triton_kernels.short_conv import requests_of_tokens
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_SHAPES = {
    "48 heads of 64, states of 128 (Granite 4.0 H Tiny)": MambaShape(48, 64, 1, 128, 4, "after_gate"),
    "128 heads of 64, states of 128 (Granite 4.0 H Small, Bamba)": MambaShape(
        128, 64, 1, 128, 4, "after_gate"
    ),
    "24 heads of 64, states of 256 (Falcon-H1)": MambaShape(24, 64, 1, 256, 4, None),
    "128 heads of 80 in 8 groups, states of 128 (Nemotron-H)": MambaShape(128, 80, 8, 128, 4, "after_gate"),
}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for label, shape in _SHAPES.items():
        for dtype, name in _DTYPES.items():
            is_sampled = shape.num_heads == 48 and dtype is torch.bfloat16
            yield Case(f"{name}, {label}", _call(shape, dtype), is_sampled=is_sampled)
            if dtype is torch.bfloat16:
                call = _call(shape, dtype, has_prompts=False)
                yield Case(f"{name}, {label}, decodes", call, is_sampled=is_sampled)
    part = MambaShape(16, 80, 1, 128, 4, "after_gate")
    yield Case("bf16, 16 heads of 80, states of 128", _call(part, torch.bfloat16))
    before = MambaShape(8, 128, 2, 64, 4, "before_gate")
    yield Case(
        "bf16, 8 heads of 128 in 2 groups, states of 64, norm before the gate", _call(before, torch.bfloat16)
    )
    half = MambaShape(64, 64, 1, 128, 4, "after_gate", group_ranks=2)
    for dtype in (torch.bfloat16, torch.float16):
        yield Case(f"{_DTYPES[dtype]}, half of the heads of Granite 4.0 H Small's group", _call(half, dtype))
    shared = before._replace(num_groups=1, group_ranks=2)
    yield Case("bf16, half of the heads of a group, norm before the gate", _call(shared, torch.bfloat16))


def _call(shape: MambaShape, dtype: torch.dtype, *, has_prompts: bool = True) -> Callable[[], object]:
    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="cuda")

    def call() -> object:
        tokens, rows = 64, 8 if has_prompts else 64
        heads, channels = shape.num_heads, shape.num_channels
        starts = empty(rows + 1, dtype=torch.int32)
        return mamba(
            shape,
            empty(tokens, shape.num_inputs, dtype=dtype),
            empty(shape.kernel_size, channels),
            empty(channels),
            empty(heads),
            empty(heads),
            empty(heads),
            empty(shape.num_values),
            1e-6,
            empty(4, shape.kernel_size - 1, channels, dtype=dtype),
            empty(4, heads, shape.state_size, shape.head_dim),
            requests_of_tokens(starts, tokens) if has_prompts else None,
            empty(12, 2, dtype=torch.int32) if has_prompts else None,
            starts,
            empty(rows, dtype=torch.int32),
            empty(rows, 64, dtype=torch.int32),
            16,
            2 if has_prompts else rows,
            _summed if shape.group_ranks > 1 else None,
        )

    return call


def _summed(squares: torch.Tensor) -> torch.Tensor:
    """Stands for the exchange between ranks."""
    return squares
