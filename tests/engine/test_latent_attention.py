"""Attention over latents in plain torch has the results of keys and values of each head in float64, and layers keep as
much as their config says."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from argosy_engine.attention.backend import LatentAttention, LatentWeights, RotaryEmbedding
from argosy_engine.attention.params import AttentionParams, LatentAttentionParams
from argosy_engine.attention.selector import AttentionNeeds, select_backend
from argosy_engine.attention.torch_attn import TorchBackend, TorchLatentAttention
from argosy_engine.errors import ConfigError
from latent_cases import latent_case

SMALL = LatentAttentionParams(
    num_heads=4, kv_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, scale=0.2
)
"""Expands the keys of 20 queries or more."""
V3 = LatentAttentionParams(
    num_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    scale=192**-0.5,
)
SPANS = [(40, 41), (0, 1), (300, 301), (0, 30), (20, 25), (16, 50), (30, 300)]
"""Decodes of different lengths, a prompt, a short and a long chunk."""


class FrugalBackend(TorchBackend):
    """Plain torch with room for little at a time."""

    def __init__(self, workspace_bytes: int, *, is_fused: bool) -> None:
        super().__init__(torch.float32)
        self._bytes, self._is_fused = workspace_bytes, is_fused

    def latent_attention(self, params: LatentAttentionParams, weights: LatentWeights) -> TorchLatentAttention:
        return TorchLatentAttention(params, weights, self._bytes, is_fused=self._is_fused)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_lora_rank": 16},  # never expanded
        {"v_head_dim": 40, "kv_lora_rank": 64},  # values larger than keys
        {"num_heads": 1, "qk_rope_head_dim": 2},
    ],
)
def test_a_step_has_the_results_of_the_reference(changes: dict[str, Any], block_size: int) -> None:
    case = latent_case(replace(SMALL, **changes), SPANS, block_size=block_size)
    torch.testing.assert_close(
        case.run(TorchBackend(torch.float32)).double(), case.expected(), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("workspace_bytes", [1, 20_000, 1 << 20])
def test_parts_of_a_step_have_the_results_of_the_whole(workspace_bytes: int, is_fused: bool) -> None:
    """Where a query, a head or a request at a time is computed, or a few of them."""
    case = latent_case(SMALL, SPANS)
    torch.testing.assert_close(
        case.run(FrugalBackend(workspace_bytes, is_fused=is_fused)).double(),
        case.expected(),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_have_the_results_of_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    params = LatentAttentionParams(
        num_heads=rng.choice((1, 3, 8)),
        kv_lora_rank=rng.choice((8, 48, 128)),
        qk_nope_head_dim=rng.choice((8, 24)),
        qk_rope_head_dim=rng.choice((2, 16)),
        v_head_dim=rng.choice((8, 20, 40)),
        scale=rng.choice((0.1, 0.5)),
    )
    spans = [(start, start + rng.choice((1, 1, 2, 40))) for start in rng.choices((0, 1, 16, 100), k=5)]
    spans.sort(key=lambda span: span[1] - span[0] > 1)
    case = latent_case(params, spans, seed=seed)
    torch.testing.assert_close(
        case.run(TorchBackend(torch.float32)).double(), case.expected(), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("stale", [math.nan, math.inf, -math.inf])
def test_what_others_left_in_the_cache_is_not_read(stale: float) -> None:
    case, backend = latent_case(SMALL, SPANS), TorchBackend(torch.float32)
    assert torch.equal(case.run(backend, stale), case.run(backend, 0.0))


def test_keys_are_expanded_where_that_takes_fewer_products() -> None:
    assert not SMALL.expands(19)
    assert SMALL.expands(20)
    assert not replace(SMALL, kv_lora_rank=14).expands(1 << 20)  # scores of latents cost no more than of keys
    assert (V3.expands(170), V3.expands(171)) == (False, True)


def test_a_token_of_deepseek_v3_takes_an_85th_of_keys_and_values_of_one_size() -> None:
    """On every rank as much, because the latents serve all heads."""
    spec = V3.kv_cache_spec(block_size=16, itemsize=2)
    assert spec.page_bytes == 16 * 576 * 2
    assert V3.of_rank(8).kv_cache_spec(16, 2) == spec
    expanded = AttentionParams(num_heads=128, num_kv_heads=128, head_dim=192, scale=1.0)
    assert expanded.kv_cache_spec(16, 2).page_bytes == pytest.approx(85.3 * spec.page_bytes, rel=1e-3)


def test_a_layer_keeps_what_its_params_say() -> None:
    rotary = RotaryEmbedding(torch.ones(4), 8, torch.bfloat16, torch.device("cpu"))
    weights = LatentWeights.of_kv_b(torch.zeros(4, 28, 48), 16, rotary, torch.ones(48), 1e-6)
    layer = LatentAttention(SMALL, TorchBackend(torch.bfloat16), weights)
    assert layer.kv_cache_shape(3, 16) == (3, 16, 56)
    cache = torch.zeros(layer.kv_cache_shape(3, 16), dtype=layer.kv_cache_dtype)
    assert cache.nbytes == 3 * layer.kv_cache_spec(16).page_bytes


def test_latents_are_left_to_the_backends_that_compute_them() -> None:
    on_cpu = AttentionNeeds("cpu", "float32", 16, [SMALL])
    choice = select_backend(on_cpu)
    assert choice.name == "torch"
    assert choice.refused["cpu"] == "it computes no multi-head latent attention"
    on_gpu = AttentionNeeds("cuda", "bfloat16", 256, [V3])
    assert select_backend(on_gpu).name == "triton"
    assert (
        "kv_lora_rank of 1024"
        in select_backend(on_gpu._replace(layers=[replace(V3, kv_lora_rank=1024)])).refused["triton"]
    )
    with pytest.raises(ConfigError, match="no multi-head latent attention"):
        select_backend(on_gpu, "flash_attn")


def test_latents_in_fp8_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype: no attention backend keeps the latents"):
        select_backend(AttentionNeeds("cuda", "bfloat16", 16, [V3], has_fp8_kv_cache=True))
