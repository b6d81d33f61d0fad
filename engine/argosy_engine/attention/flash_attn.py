"""Backend `flash_attn`: attention by the flash-attn library (arXiv 2205.14135, 2307.08691, 2407.08608), if installed.

The norm of the heads, the rotary embedding and the write to the cache are those of backend `triton`, and so is the
cache's layout.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from argosy_engine.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionWeights,
)
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.selector import installed_versions, version_for
from argosy_engine.attention.triton_attn import prepare
from argosy_engine.errors import ConfigError

Attend = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, AttentionParams], torch.Tensor]
"""Maps queries [T, num_heads, head_dim] and a layer's cache to the attention's output, of the queries' shape."""


class FlashAttnBackend(AttentionBackend):
    """Attention by the version of flash-attn that suits the current device.

    Raises:
        ConfigError: no installed version computes on this device.
    """

    uses_triton = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.kv_cache_dtype = dtype
        self._attend = _attend_on(torch.cuda.get_device_capability())

    def attention(self, params: AttentionParams, weights: AttentionWeights) -> FlashAttention:
        return FlashAttention(params, weights, self._attend)


class FlashAttention:
    """One layer's attention by flash-attn."""

    def __init__(self, params: AttentionParams, weights: AttentionWeights, attend: Attend) -> None:
        self._params = params
        self._weights = weights
        self._attend = attend

    def __call__(self, qkv: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        queries = prepare(qkv, kv_cache, meta, self._params, self._weights)
        return self._attend(queries, kv_cache, meta, self._params).view(len(qkv), -1)


def _attend_on(capability: tuple[int, int]) -> Attend:
    installed = installed_versions()
    version = version_for(capability, installed)
    if version is None:
        names = " and ".join(map(str, installed)) or "none"
        raise ConfigError(
            f"no installed version of flash-attn ({names}) computes on compute capability "
            f"{capability[0]}.{capability[1]}; use --attention-backend auto"
        )
    return {2: _version_2, 3: _version_3, 4: _version_4}[version]()


def _version_2() -> Attend:
    """Pages of 256 tokens. Decodes have a call of their own, because only that one splits long contexts among the
    multiprocessors."""
    library = import_module("flash_attn")

    def attend(
        queries: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        keys, values = kv_cache
        settings = _settings(params, unlimited=-1)
        decodes = meta.num_decodes
        outputs = []
        if decodes:
            attended = library.flash_attn_with_kvcache(
                queries[:decodes].unsqueeze(1),
                keys,
                values,
                cache_seqlens=meta.seq_lens[:decodes],
                block_table=meta.block_table[:decodes],
                **settings,
            )
            outputs.append(attended.squeeze(1))
        if decodes < len(meta.seq_lens):
            query_starts, key_starts = _prompt_starts(meta)
            outputs.append(
                library.flash_attn_varlen_func(
                    queries[decodes:],
                    keys,
                    values,
                    cu_seqlens_q=query_starts,
                    cu_seqlens_k=key_starts,
                    max_seqlen_q=meta.max_query_len,
                    max_seqlen_k=int(meta.seq_lens_cpu[decodes:].max()),
                    block_table=meta.block_table[decodes:],
                    **settings,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    return attend


def _prompt_starts(meta: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the queries and the keys of each request with several new tokens start, int32 [prompts + 1] each; found
    once for all layers."""
    found: tuple[torch.Tensor, torch.Tensor] | None = meta.shared.get(_prompt_starts)
    if found is None:
        decodes = meta.num_decodes
        key_starts = torch.nn.functional.pad(meta.seq_lens[decodes:].cumsum(0, dtype=torch.int32), (1, 0))
        found = meta.query_start_loc[decodes:] - decodes, key_starts
        meta.shared[_prompt_starts] = found
    return found


def _version_3() -> Attend:
    library = import_module("flash_attn_interface")

    def attend(
        queries: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        return library.flash_attn_with_kvcache(
            queries,
            *kv_cache,
            cache_seqlens=meta.seq_lens,
            page_table=meta.block_table,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            **_settings(params, unlimited=-1),
        )

    return attend


def _version_4() -> Attend:
    library = import_module("flash_attn.cute")

    def attend(
        queries: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        attended, _ = library.flash_attn_varlen_func(
            queries,
            *kv_cache,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            seqused_k=meta.seq_lens,
            page_table=meta.block_table,
            **_settings(params, unlimited=None),
        )
        return attended

    return attend


def _settings(params: AttentionParams, *, unlimited: int | None) -> dict[str, Any]:
    """The arguments that all versions have, with the same names.

    Args:
        unlimited: how the library writes a window without an end.
    """
    window = (unlimited, unlimited) if params.sliding_window is None else (params.sliding_window - 1, 0)
    return {
        "softmax_scale": params.scale,
        "causal": True,
        "window_size": window,
        "softcap": params.logit_softcap or 0.0,
    }
