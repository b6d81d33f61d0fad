"""Cases of routing: experts and experts per token of published models, small and large batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.fused_moe import route
from argosy_engine.triton_kernels.launch import DeviceTraits
from gpu_report.case import Case


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for experts, k in ((8, 2), (60, 4), (128, 8), (512, 10)):
        for tokens in (1, 256, 8192):
            yield Case(
                f"bf16, {tokens} tokens, {k} of {experts} experts",
                _call(tokens, experts, k, torch.bfloat16),
                is_sampled=tokens == 8192 and experts == 128,
            )
    # DeepSeek-V3's groups and its correction of sigmoid scores; GLM-4.5's without groups
    for tokens in (1, 8192):
        yield Case(
            f"bf16, {tokens} tokens, 8 of 256 experts in groups",
            _call(tokens, 256, 8, torch.bfloat16, is_sigmoid=True, num_groups=8, groups_per_token=4),
            is_sampled=tokens == 8192,
        )
        yield Case(
            f"bf16, {tokens} tokens, 8 of 160 experts by sigmoids",
            _call(tokens, 160, 8, torch.bfloat16, is_sigmoid=True),
        )
        yield Case(
            f"bf16, {tokens} tokens, 8 of 128 experts with factors",
            _call(tokens, 128, 8, torch.bfloat16, has_scales=True),
        )
        yield Case(  # of a router in float32
            f"fp32, {tokens} tokens, 6 of 128 experts by sigmoids",
            _call(tokens, 128, 6, torch.float32, is_sigmoid=True),
        )
    # expert parallelism: the second of two ranks
    yield Case("bf16, 256 tokens, 64 held of 128 experts", _call(256, 128, 8, torch.bfloat16, range(64, 128)))
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        yield Case(f"{name}, 8192 tokens, 8 of 128 experts", _call(8192, 128, 8, dtype))


def _call(
    tokens: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    held: range | None = None,
    *,
    is_sigmoid: bool = False,
    num_groups: int = 1,
    groups_per_token: int = 1,
    has_scales: bool = False,
) -> Callable[[], object]:
    def call() -> object:
        logits = torch.empty(tokens, experts, dtype=dtype, device="cuda")
        slots = torch.empty(tokens, dtype=torch.int64, device="cuda")
        correction = torch.empty(experts, device="cuda") if is_sigmoid else None
        return route(
            logits,
            k,
            normalises=True,
            tile_rows=16,
            slot_mapping=slots,
            held=held,
            is_sigmoid=is_sigmoid,
            correction=correction,
            expert_scales=torch.empty(experts, device="cuda") if has_scales else None,
            num_groups=num_groups,
            groups_per_token=groups_per_token,
        )

    return call
