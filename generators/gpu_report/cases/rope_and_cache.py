"""Cases of norm, rotation and KV cache write: head sizes of published models, small and large batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.rope_and_cache import rope_and_cache
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for tokens in (1, 4096):
        for dtype, name in _DTYPES.items():
            for norm in ("", ", q/k norm"):
                yield Case(
                    f"{name}, {tokens} tokens, head_dim 128{norm}",
                    _call(tokens, 128, dtype, has_norm=bool(norm)),
                    is_sampled=tokens == 4096 and dtype is torch.bfloat16 and bool(norm),
                )
    for head_dim in (64, 80, 96, 112, 256, 512):
        yield Case(f"bf16, 1 token, head_dim {head_dim}", _call(1, head_dim, torch.bfloat16))
    yield Case(
        "bf16, 4096 tokens, head_dim 256, q/k norm with 1 + weight",
        _call(4096, 256, torch.bfloat16, has_norm=True, adds_one=True),
    )
    for tokens in (1, 4096):
        yield Case(
            f"bf16, {tokens} tokens, head_dim 128 of which 32 rotate",
            _call(tokens, 128, torch.bfloat16, rotary_dim=32, has_norm=True),
        )
    if traits.has_fp8:
        for dtype, name in _DTYPES.items():
            yield Case(
                f"{name}, 1 token, head_dim 128, FP8 cache",
                _call(1, 128, dtype, is_fp8=True, has_norm=True),
                is_sampled=dtype is torch.bfloat16,
            )


def _call(
    tokens: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    rotary_dim: int | None = None,
    has_norm: bool = False,
    adds_one: bool = False,
    is_fp8: bool = False,
) -> Callable[[], object]:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def call() -> None:
        num_heads, num_kv_heads = 32, 8
        table = empty(4096, (rotary_dim or head_dim) // 2)
        options: dict[str, Any] = {"adds_one": adds_one}
        if has_norm:
            options |= {"q_norm": empty(head_dim, dtype=dtype), "k_norm": empty(head_dim, dtype=dtype)}
        if is_fp8:
            options |= {"k_scale": empty(1), "v_scale": empty(1)}
        rope_and_cache(
            empty(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
            empty(tokens, dtype=torch.int64),
            table,
            table,
            empty(tokens, dtype=torch.int64),
            empty(2, 512, 16, num_kv_heads, head_dim, dtype=torch.float8_e4m3fn if is_fp8 else dtype),
            num_heads=num_heads,
            **options,
        )

    return call
