"""Cases of sampling: vocabularies of published models, one row and full batches, with and without limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.sampling import Cuts, DeviceSamplingBatch, sample_tokens
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    is_sampled = traits.capability in (90, 120)  # tests take seconds
    for dtype, name in _DTYPES.items():
        yield Case(
            f"{name}, 1 row, vocabulary 151936",
            _call(1, 151936, dtype, True),
            is_sampled=is_sampled and dtype is torch.bfloat16,
        )
        yield Case(f"{name}, 256 rows, vocabulary 151936, no limits", _call(256, 151936, dtype, False))
        yield Case(f"{name}, 256 rows, vocabulary 151936", _call(256, 151936, dtype, True, stores_cuts=True))
    for rows, vocab_size in ((1, 50257), (1024, 262144)):
        yield Case(
            f"fp32, {rows} rows, vocabulary {vocab_size}", _call(rows, vocab_size, torch.float32, True)
        )
    yield Case(
        "fp32, 16 rows, vocabulary 151936, counts tokens and stores cuts",
        _call(16, 151936, torch.float32, True, stores_cuts=True),
    )


def _call(
    rows: int, vocab_size: int, dtype: torch.dtype, has_limits: bool, stores_cuts: bool = False
) -> Callable[[], object]:
    def call() -> object:
        def ints(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, dtype=dtype, device="cuda")

        floats = torch.empty(3, rows, device="cuda").unbind(0)
        batch = DeviceSamplingBatch(
            floats[0], ints(torch.int32), floats[1], floats[2], ints(torch.int64), ints(torch.int64)
        )
        return sample_tokens(
            torch.empty(rows, vocab_size, dtype=dtype, device="cuda"),
            batch,
            has_limits=has_limits,
            cuts=Cuts(torch.empty(rows, device="cuda"), ints(torch.int32)) if stores_cuts else None,
            token_counts=torch.empty(64, vocab_size, dtype=torch.int32, device="cuda")
            if stores_cuts
            else None,
            count_entries=ints(torch.int32) if stores_cuts else None,
        )

    return call
