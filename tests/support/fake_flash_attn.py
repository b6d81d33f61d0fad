"""Stand-ins for the versions of the flash-attn library: their signatures and rules, computed by torch on a CPU."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from argosy_engine.attention import selector


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *versions: int) -> None:
    """Make exactly these versions importable, and findable as files in `folder`."""
    modules: dict[str, ModuleType] = {}
    specs: dict[str, ModuleSpec | None] = {"flash_attn": None, "flash_attn_interface": None}
    package = folder / "flash_attn"
    if {2, 4} & {*versions}:
        package.mkdir()
        modules["flash_attn"] = ModuleType("flash_attn")
        specs["flash_attn"] = spec = ModuleSpec("flash_attn", None, is_package=True)
        spec.submodule_search_locations = [str(package)]
    if 2 in versions:
        (package / "flash_attn_interface.py").touch()
        modules["flash_attn"].__dict__.update(
            flash_attn_with_kvcache=_v2_with_kvcache, flash_attn_varlen_func=_v2_varlen
        )
    if 3 in versions:
        modules["flash_attn_interface"] = ModuleType("flash_attn_interface")
        modules["flash_attn_interface"].__dict__.update(flash_attn_with_kvcache=_v3_with_kvcache)
        specs["flash_attn_interface"] = ModuleSpec("flash_attn_interface", None)
    if 4 in versions:
        (package / "cute").mkdir()
        modules["flash_attn.cute"] = ModuleType("flash_attn.cute")
        modules["flash_attn.cute"].__dict__.update(flash_attn_varlen_func=_v4_varlen)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(selector, "find_spec", lambda name: specs[name] if name in specs else find_spec(name))


def _v2_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert causal
    starts = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
    settings = softmax_scale, window_size, softcap
    attended = _attend(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, *settings)
    return attended.view(q.shape)


def _v2_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert causal
    lens = cu_seqlens_k.diff()
    assert cu_seqlens_k.dtype == cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_k == int(lens.max())
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return _attend(q, k, v, cu_seqlens_q, lens, block_table, softmax_scale, window_size, softcap)


def _v3_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    assert causal
    assert max_seqlen_q is not None
    assert max_seqlen_q == max(int(cu_seqlens_q.diff().max()), 1)  # padding has none
    settings = softmax_scale, window_size, softcap
    return _attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, *settings)


def _v4_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: None = None,
    seqused_k: Any = None,
    gather_kv_indices: None = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
) -> tuple[torch.Tensor, None]:
    assert causal
    assert -1 not in window_size
    assert max_seqlen_q is not None
    assert max_seqlen_q == max(int(cu_seqlens_q.diff().max()), 1)  # padding has none
    window = tuple(-1 if side is None else side for side in window_size)
    return _attend(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window, softcap), None


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor,
    scale: float | None,
    window: tuple[int, ...],
    softcap: float,
) -> torch.Tensor:
    """Causal attention, aligned at the end of each request's keys."""
    assert scale is not None
    assert window == (-1, -1) or window[1] == 0
    assert table.dtype == lens.dtype == torch.int32
    out = torch.empty_like(q)
    for row, length in enumerate(lens.tolist()):
        first, last = starts[row : row + 2].tolist()
        k, v = (cache[table[row].long()].flatten(0, 1)[:length].float() for cache in (keys, values))
        group = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length - (last - first), length)[:, None] - torch.arange(length)
        is_seen = (distance >= 0) & ((distance <= window[0]) | (window[0] < 0))
        probabilities = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", probabilities, v).to(q.dtype)
    return out
