"""Cases of log probabilities: numbers of alternatives, small and large vocabularies; and of the processed logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.sampling import Cuts, DeviceSamplingBatch
from argosy_engine.triton_kernels.top_logprobs import cut_logits, top_logprobs
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    is_sampled = traits.capability in (90, 120)  # tests take seconds
    for dtype, name in _DTYPES.items():
        yield Case(
            f"{name}, vocabulary 151936, 20 alternatives",
            _call(151936, dtype, 20),
            is_sampled=is_sampled and dtype is torch.bfloat16,
        )
    for vocab_size, count in ((151936, 0), (32000, 5), (262144, 128)):
        yield Case(
            f"bf16, vocabulary {vocab_size}, {count} alternatives", _call(vocab_size, torch.bfloat16, count)
        )
    yield Case("processed logits, bf16", _cut, is_sampled)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def _call(vocab_size: int, dtype: torch.dtype, count: int) -> Callable[[], object]:
    return lambda: top_logprobs(
        _empty(64, vocab_size, dtype=dtype),
        _empty(64, dtype=torch.int64),
        count,
        rows=_empty(16, dtype=torch.int32),
    )


def _cut() -> object:
    floats = torch.empty(4, 64, device="cuda").unbind(0)
    ints, longs = _empty(64, dtype=torch.int32), _empty(64, dtype=torch.int64)
    batch = DeviceSamplingBatch(floats[0], ints, floats[1], floats[2], longs, longs)
    return cut_logits(_empty(64, 151936, dtype=torch.bfloat16), batch, Cuts(floats[3], ints))
