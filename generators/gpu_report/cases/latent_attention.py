"""Cases of attention over latents, with what writes them: DeepSeek V3's sizes whole and divided among ranks, and
smaller latents."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from argosy_engine.triton_kernels.latent_attention import latent_attention, latent_rope_and_cache
from argosy_engine.triton_kernels.launch import DeviceTraits
from gpu_report.case import Case

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MODES = {"prefill": (4, 2048), "decode": (512, 1), "split decode": (4, 1), "drafts": (4, 5)}
"""Requests, and queries of each."""


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for mode in _MODES:
        for dtype, name in _DTYPES.items():
            is_sampled = (mode, dtype, traits.capability) == ("split decode", torch.bfloat16, 90)
            yield Case(f"{mode}, {name}, 16 heads", _attend(mode, dtype, 16), is_sampled)
        for num_heads in (8, 20, 128):
            yield Case(f"{mode}, bf16, {num_heads} heads", _attend(mode, torch.bfloat16, num_heads))
        yield Case(f"{mode}, bf16, 16 heads, latents of 256", _attend(mode, torch.bfloat16, 16, rank=256))
    for tokens in (1, 4096):
        for dtype, name in _DTYPES.items():
            is_sampled = (tokens, dtype) == (4096, torch.bfloat16)
            yield Case(f"cache write, {name}, {tokens} tokens", _write(tokens, dtype), is_sampled)


def _attend(mode: str, dtype: torch.dtype, num_heads: int, rank: int = 512) -> Callable[[], object]:
    num_requests, max_query_len = _MODES[mode]

    def call() -> object:
        tokens = num_requests * max_query_len
        return latent_attention(
            _empty(num_heads, tokens, rank, dtype=dtype).transpose(0, 1),
            _empty(tokens, num_heads, 192, dtype=dtype)[..., 128:],
            _empty(1024, 16, rank + 64, dtype=dtype),
            query_start_loc=_empty(num_requests + 1, dtype=torch.int32),
            seq_lens=_empty(num_requests, dtype=torch.int32),
            block_table=_empty(num_requests, 512, dtype=torch.int32),
            max_query_len=max_query_len,
            scale=192**-0.5,
        )

    return call


def _write(tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    def call() -> None:
        table = _empty(4096, 32, dtype=torch.float32)
        latent_rope_and_cache(
            _empty(tokens, 16, 192, dtype=dtype),
            _empty(tokens, 1536 + 576, dtype=dtype)[:, 1536:],
            _empty(tokens, dtype=torch.int64),
            table,
            table,
            _empty(tokens, dtype=torch.int64),
            _empty(512, 16, 576, dtype=dtype),
            norm=_empty(512, dtype=dtype),
            eps=1e-6,
        )

    return call


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")
