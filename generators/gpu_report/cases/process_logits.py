"""Cases of logits processing: each processor that a batch may use, and all of them; and the penalties' counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.process_logits import (
    RowEdits,
    RowMasks,
    RowPenalties,
    clear_entries,
    count_tokens,
    process_logits,
)
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_KINDS = ("grammar", "allowed", "edits", "penalties")


def cases(traits: DeviceTraits) -> Iterator[Case]:
    is_sampled = traits.capability in (90, 120)  # tests take seconds
    for dtype, name in _DTYPES.items():
        yield Case(
            f"{name}, vocabulary 151936, all processors",
            _call(151936, dtype, _KINDS),
            is_sampled=is_sampled and dtype is torch.bfloat16,
        )
    for kind in _KINDS:
        yield Case(f"bf16, vocabulary 151936, {kind}", _call(151936, torch.bfloat16, (kind,)))
    yield Case("bf16, vocabulary 50257, all processors", _call(50257, torch.bfloat16, _KINDS))
    yield Case("penalty counts, vocabulary 151936", _count, is_sampled)


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def _count() -> None:
    counts = _empty(64, 151936)
    clear_entries(counts, _empty(4))
    count_tokens(counts, _empty(9000), _empty(9000), _empty(9000, dtype=torch.bool))


def _call(vocab_size: int, dtype: torch.dtype, kinds: tuple[str, ...]) -> Callable[[], object]:
    def call() -> object:
        words = -(-vocab_size // 32)
        table = _empty(16, 5764)
        values: dict[str, Any] = {
            "grammar": RowMasks(_empty(64), _empty(8, words)),
            "allowed": RowMasks(_empty(64), _empty(8, words)),
            "edits": RowEdits(
                _empty(64),
                table[:, 5760],
                table[:, 2880:4320],
                table.view(torch.float32)[:, 4320:5760],
                table.view(torch.int64)[:, :1440],
            ),
            "penalties": RowPenalties(_empty(64), _empty(16, vocab_size), _empty(16, 3, dtype=torch.float32)),
        }
        return process_logits(
            _empty(64, vocab_size, dtype=dtype),
            _empty(64, dtype=torch.int64),
            **{kind: values[kind] for kind in kinds},
        )

    return call
