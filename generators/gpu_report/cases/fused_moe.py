"""Cases of the experts' matrix products: shapes of Qwen3-30B-A3B, Mixtral, gpt-oss-20b, Llama-4-Scout and Nemotron 3
Nano, from one token to a full prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.fused_moe import fused_moe
from argosy_engine.triton_kernels.launch import DeviceTraits
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_QWEN3 = (128, 8, 2048, 768)
_MIXTRAL = (8, 2, 4096, 14336)
_GPT_OSS = (32, 4, 2880, 2880)
_LLAMA_4 = (16, 1, 5120, 8192)
_NEMOTRON_3 = (128, 6, 2688, 1856)


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for tokens in (1, 512, 1024, 8192):  # tiles of 16, 32, 64 and 128 rows
        for dtype, name in _DTYPES.items():
            yield Case(
                f"{name}, {tokens} tokens, 128 experts",
                _call(tokens, *_QWEN3, dtype=dtype),
                is_sampled=tokens == 8192 and dtype is torch.bfloat16,
            )
        if traits.has_fp8:
            for dtype, name in _DTYPES.items():
                yield Case(
                    f"{name}, FP8 weights, {tokens} tokens, 128 experts",
                    _call(tokens, *_QWEN3, dtype=dtype, is_fp8=True),
                )
            yield Case(
                f"bf16, FP8 weights with scales of blocks, {tokens} tokens, 128 experts",
                _call(tokens, *_QWEN3, dtype=torch.bfloat16, is_fp8=True, has_blocks=True),
                is_sampled=tokens == 8192,
            )
    for tokens in (1, 512, 1024, 8192):
        yield Case(
            f"bf16, {tokens} tokens, 128 experts without a gate",
            _call(tokens, *_NEMOTRON_3, dtype=torch.bfloat16, is_nemotron_3=True),
            is_sampled=tokens == 512,
        )
        if traits.has_fp8:
            yield Case(
                f"bf16, FP8 weights, {tokens} tokens, 128 experts without a gate",
                _call(tokens, *_NEMOTRON_3, dtype=torch.bfloat16, is_fp8=True, is_nemotron_3=True),
            )
    for tokens in (1, 512, 8192):
        yield Case(
            f"bf16, {tokens} tokens, 32 experts with biases",
            _call(tokens, *_GPT_OSS, dtype=torch.bfloat16, is_gpt_oss=True),
            is_sampled=tokens == 512,
        )
        yield Case(
            f"bf16, {tokens} tokens, 32 experts in MXFP4 with biases",
            _call(tokens, *_GPT_OSS, dtype=torch.bfloat16, is_gpt_oss=True, is_mxfp4=True),
            is_sampled=tokens != 512,
        )
        yield Case(
            f"bf16, {tokens} tokens, 16 experts that get weighted inputs",
            _call(tokens, *_LLAMA_4, dtype=torch.bfloat16, is_llama_4=True),
        )
    yield Case("bf16, 64 tokens, 8 experts", _call(64, *_MIXTRAL, dtype=torch.bfloat16))
    yield Case("bf16, 64 tokens, 8 experts of uneven size", _call(64, 8, 2, 1000, 360, dtype=torch.bfloat16))


def _call(
    tokens: int,
    experts: int,
    k: int,
    hidden: int,
    inner: int,
    *,
    dtype: torch.dtype,
    is_fp8: bool = False,
    is_gpt_oss: bool = False,
    is_llama_4: bool = False,
    is_nemotron_3: bool = False,
    has_blocks: bool = False,
    is_mxfp4: bool = False,
) -> Callable[[], object]:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def weight(rows: int, columns: int) -> torch.Tensor:
        if is_mxfp4:
            return empty(experts, rows, columns // 2, dtype=torch.uint8)
        return empty(experts, rows, columns, dtype=torch.float8_e4m3fn if is_fp8 else dtype)

    def scales(rows: int, columns: int) -> torch.Tensor:
        if is_mxfp4:
            return empty(experts, rows, columns // 32, dtype=torch.uint8)
        shape = (experts, -(-columns // 128), rows) if has_blocks else (experts, rows)
        return empty(*shape, dtype=torch.float32)

    def call() -> object:
        rows, is_quantised = inner if is_nemotron_3 else 2 * inner, is_fp8 or is_mxfp4
        return fused_moe(
            empty(tokens, hidden),
            empty(tokens, experts, dtype=torch.float32 if is_nemotron_3 else dtype),
            weight(rows, hidden),
            weight(hidden, inner),
            k,
            normalises=not is_llama_4,
            is_sigmoid=is_llama_4 or is_nemotron_3,
            correction=empty(experts, dtype=torch.float32) if is_nemotron_3 else None,
            scales_inputs=is_llama_4,
            activation="swigluoai" if is_gpt_oss else "relu2" if is_nemotron_3 else "silu",
            w1_bias=empty(experts, 2 * inner) if is_gpt_oss else None,
            w2_bias=empty(experts, hidden) if is_gpt_oss else None,
            w1_scale=scales(rows, hidden) if is_quantised else None,
            w2_scale=scales(hidden, inner) if is_quantised else None,
        )

    return call
