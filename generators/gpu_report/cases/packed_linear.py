"""Cases of products by packed integers: layers of Llama-3-8B, one that no tile divides, from one token to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.packed_linear import PackedIntegers, block_inputs, packed_linear
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for bits in (4, 8):
        for tokens in (1, 8, 16, 32, 64, 2048):
            for dtype, name in _DTYPES.items():
                yield Case(
                    f"{name}, int{bits} in groups of 128, 6144 outputs, {tokens} tokens",
                    _call(tokens, 6144, 4096, bits, dtype),
                    is_sampled=bits == 4 and tokens in (1, 2048) and dtype is torch.bfloat16,
                )
            yield Case(
                f"bf16, int{bits} in groups of 32 with zero points, 28672 outputs, {tokens} tokens",
                _call(tokens, 28672, 4096, bits, torch.bfloat16, 32, has_zeros=True),
            )
        for tokens in (1, 32, 2048):
            for group in (32, 64, 4096):
                yield Case(
                    f"bf16, int{bits} in groups of {group} with zero points, {tokens} tokens",
                    _call(tokens, 6144, 4096, bits, torch.bfloat16, group, has_zeros=True),
                    is_sampled=group == 32 and tokens != 32 and bits == 8,
                )
            yield Case(
                f"bf16, int{bits} of uneven sizes, {tokens} tokens",
                _call(tokens, 1000, 1376, bits, torch.bfloat16, 32),
            )


def _call(
    tokens: int,
    outputs: int,
    inputs: int,
    bits: int,
    dtype: torch.dtype,
    group: int = 128,
    *,
    has_zeros: bool = False,
) -> Callable[[], object]:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def call() -> object:
        words = -(-inputs // block_inputs(bits)) * 16
        zeros = empty(inputs // group, outputs, dtype=torch.int8) if has_zeros else None
        weight = PackedIntegers(
            empty(outputs, words, dtype=torch.int32),
            empty(inputs // group, outputs, dtype=torch.float16),
            zeros,
            bits,
            inputs,
        )
        return packed_linear(empty(tokens, inputs), weight, empty(outputs) if has_zeros else None)

    return call
