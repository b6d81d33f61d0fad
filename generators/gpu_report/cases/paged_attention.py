"""Cases of paged attention: prompts, decodes and split decodes of published head sizes, and each option once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from argosy_engine.triton_kernels.launch import DeviceTraits
from argosy_engine.triton_kernels.paged_attention import paged_attention, paged_attention_fp8
from gpu_report.case import Case

_FP8 = torch.float8_e4m3fn
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MODES = {"prefill": (4, 2048), "decode": (512, 1), "split decode": (4, 1), "drafts": (4, 5)}
"""Requests, and queries of each."""
_NUM_KV_HEADS = 8


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for head_dim in (64, 128, 256):
        for mode in ("prefill", "decode", "split decode"):
            for dtype in _DTYPES:
                sampled = (mode, head_dim, dtype, traits.capability) in _SAMPLED
                yield _case(mode, head_dim=head_dim, dtype=dtype, is_sampled=sampled)
            if traits.has_fp8:
                sampled = (mode, head_dim, _FP8, traits.capability) in _SAMPLED
                yield _case(mode, head_dim=head_dim, kv_dtype=_FP8, is_sampled=sampled)
    for mode in ("prefill", "decode"):
        for group_size in (1, 8):
            yield _case(mode, group_size=group_size)
        for head_dim in (80, 96, 112):
            yield _case(mode, head_dim=head_dim)
        yield _case(mode, block_size=32)
        yield _case(mode, block_size=64)
        yield _case(mode, sliding_window=4096)
        yield _case(mode, head_dim=256, group_size=2, logit_softcap=50.0)
        yield _case(mode, head_dim=64, group_size=8, sliding_window=128, has_sinks=True)
        yield _case(mode, group_size=5, chunk_size=8192)
        yield _case(mode, group_size=1, has_alibi=True)
    for window in (None, 1024):  # images of Gemma 3
        yield _case("prefill", head_dim=256, group_size=2, sliding_window=window, has_key_ends=True)
    yield _case("drafts", head_dim=256, group_size=2, has_key_ends=True)
    for mode in ("prefill", "split decode"):  # Gemma 4
        for dtype in (torch.bfloat16, torch.float16):
            yield _case(mode, head_dim=512, group_size=8, dtype=dtype)
        if traits.has_fp8:
            yield _case(mode, head_dim=512, group_size=8, kv_dtype=_FP8)
            yield _case(mode, head_dim=512, group_size=8, out="FP8 with one scale")
            yield _case(mode, head_dim=512, group_size=8, kv_dtype=_FP8, out="FP8 with one scale")
    if traits.has_fp8:
        yield _case("split decode", head_dim=512, group_size=8, out="FP8")
    yield _case("drafts", head_dim=128)
    if traits.has_fp8:
        yield from _fp8_results(traits)


def _fp8_results(traits: DeviceTraits) -> Iterator[Case]:
    """What FP8 products read: with the checkpoint's scale, or with one per token where segments are merged."""
    for head_dim in (64, 128, 256):
        for kv_dtype in (None, _FP8):
            for mode in ("prefill", "decode", "split decode"):
                yield _case(mode, head_dim=head_dim, kv_dtype=kv_dtype, out="FP8 with one scale")
            sampled = (head_dim, kv_dtype, traits.capability) == (128, None, 90)
            yield _case("split decode", head_dim=head_dim, kv_dtype=kv_dtype, out="FP8", is_sampled=sampled)
    yield _case("split decode", group_size=16, out="FP8")  # 128 heads


_SAMPLED = {
    ("prefill", 128, torch.bfloat16, 90),
    ("split decode", 128, torch.bfloat16, 100),
    ("split decode", 128, _FP8, 89),
}
"""One case of each kernel on some devices, with their capability: a prompt takes seconds to compile."""


def _case(
    mode: str,
    *,
    head_dim: int = 128,
    group_size: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 16,
    has_sinks: bool = False,
    has_alibi: bool = False,
    has_key_ends: bool = False,
    out: str = "",
    is_sampled: bool = False,
    **options: Any,
) -> Case:
    num_requests, max_query_len = _MODES[mode]
    label = f"{mode}, {_DTYPES[dtype]}{', FP8 cache' if kv_dtype else ''}, head_dim {head_dim}, group {group_size}"
    label += "" if block_size == 16 else f", block_size {block_size}"
    label += "".join(f", {name} {value}" for name, value in options.items())
    label += (", sinks" if has_sinks else "") + (", ALiBi" if has_alibi else "")
    label += ", key ends" if has_key_ends else ""
    label += f", result in {out}" if out else ""

    def call() -> object:
        num_heads = _NUM_KV_HEADS * group_size
        attend: Callable[..., object] = paged_attention
        if out:
            out_scale = _empty(1, dtype=torch.float32) if "one scale" in out else None
            attend = partial(paged_attention_fp8, out_scale=out_scale)
        return attend(
            _empty(num_requests * max_query_len, num_heads, head_dim, dtype=dtype),
            _empty(2, 1024, block_size, _NUM_KV_HEADS, head_dim, dtype=kv_dtype or dtype),
            query_start_loc=_empty(num_requests + 1, dtype=torch.int32),
            seq_lens=_empty(num_requests, dtype=torch.int32),
            block_table=_empty(num_requests, 512, dtype=torch.int32),
            max_query_len=max_query_len,
            scale=head_dim**-0.5,
            sinks=_empty(num_heads, dtype=dtype) if has_sinks else None,
            alibi_slopes=_empty(num_heads, dtype=torch.float32) if has_alibi else None,
            k_scale=_empty(1, dtype=torch.float32) if kv_dtype else None,
            v_scale=_empty(1, dtype=torch.float32) if kv_dtype else None,
            key_ends=_empty(num_requests * max_query_len, dtype=torch.int32) if has_key_ends else None,
            **options,
        )

    return Case(label, call, is_sampled)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")
