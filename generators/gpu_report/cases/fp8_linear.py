"""Cases of products in FP8: layers of Llama-3-8B and DeepSeek-V3, and one that no tile divides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.fp8_linear import FEW, block_fp8_linear, fp8_linear_few
from argosy_engine.triton_kernels.launch import DeviceTraits
from gpu_report.case import Case

_SHAPES = ((6144, 4096), (28672, 4096), (7168, 16384), (1000, 1376))


def cases(traits: DeviceTraits) -> Iterator[Case]:
    if not traits.has_fp8:
        return
    for outputs, inputs in _SHAPES:
        for tokens in (1, 8, FEW):
            yield Case(
                f"bf16, {outputs} outputs of {inputs} inputs, {tokens} tokens",
                _few(tokens, outputs, inputs),
                is_sampled=outputs == 6144 and tokens == 1,
            )
        for tokens in (1, FEW, 64, 2048):
            yield Case(
                f"bf16, scales of blocks, {outputs} outputs of {inputs} inputs, {tokens} tokens",
                _blocks(tokens, outputs, inputs),
                is_sampled=outputs == 7168 and tokens in (1, 2048),
            )


def _few(tokens: int, outputs: int, inputs: int) -> Callable[[], object]:
    def call() -> object:
        x = torch.empty(tokens, inputs, dtype=torch.float8_e4m3fn, device="cuda")
        weight = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="cuda")
        x_scales, scales = torch.empty(tokens, 1, device="cuda"), torch.empty(outputs, device="cuda")
        return fp8_linear_few(x, x_scales, weight, scales, None, torch.bfloat16)

    return call


def _blocks(tokens: int, outputs: int, inputs: int) -> Callable[[], object]:
    def call() -> object:
        x = torch.empty(tokens, inputs, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="cuda")
        return block_fp8_linear(x, weight, torch.empty(-(-inputs // 128), outputs, device="cuda"))

    return call
