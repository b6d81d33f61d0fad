"""Sharding: what the ranks hold is the model once, and what they compute together is what one process computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.weights import DummyWeights, SafetensorsWeights
from argosy_engine.errors import ConfigError
from argosy_engine.layers.experts import ExpertsSpec
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear_method import LinearMethod
from argosy_engine.model_configs.experts_config import RoutingSpec
from argosy_engine.model_configs.llama_config import LlamaConfig
from argosy_engine.model_configs.model_config import check_tensor_parallel
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import plan_weights
from argosy_engine.sizing.kv_cache_sizing import rank_elements
from fp8_checkpoints import quantize_checkpoint
from random_checkpoints import KINDS, make_checkpoint
from rank_logits import logits_of
from thread_ranks import run_threads

CPU = torch.device("cpu")
BLOCK_SIZE = 16
BIASED = {"llama-biased": {"attention_bias": True, "mlp_bias": True, "vocab_size": 509}}
"""A head and an embedding that do not divide evenly, and every bias that Llama may have."""
SHARDINGS = [
    *((name, size, False) for name in (*KINDS, *BIASED) for size in (2, 4)),
    *((name, size, True) for name in ("qwen3-moe", "qwen3-moe-mixed", "qwen3-next") for size in (2, 4)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            kind = KINDS[name.removesuffix("-biased")]
            fields = {**kind.fields, **BIASED.get(name, {})}
            make_checkpoint(replace(kind, fields=fields), made[name])
        return made[name]

    return make


@pytest.mark.parametrize(("name", "size", "has_whole_experts"), SHARDINGS)
def test_ranks_compute_what_one_process_computes(
    name: str, size: int, has_whole_experts: bool, checkpoint: Any
) -> None:
    path = checkpoint(name)
    with torch.inference_mode():
        expected = logits_of(path)
    ranks = run_threads(
        size, lambda group: logits_of(path, group, Sharding(group.rank, size, has_whole_experts))
    )
    tolerance = KINDS[name.removesuffix("-biased")].tolerance
    torch.testing.assert_close(ranks[0], expected, atol=tolerance, rtol=tolerance)
    assert all(torch.equal(ranks[0], other) for other in ranks[1:]), "ranks would sample different tokens"


@pytest.mark.parametrize("form", ["compressed-tensors-channel", "compressed-tensors-tensor"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe-mixed", "qwen3-next", "qwen3.5"])
def test_ranks_take_their_part_of_fp8_weights_and_scales(name: str, form: str, tmp_path: Path) -> None:
    make_checkpoint(replace(KINDS[name], is_sharded=False), tmp_path)
    quantize_checkpoint(tmp_path, form)
    with torch.inference_mode():
        expected = logits_of(tmp_path)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_random_weights_are_parts_of_the_same_model(has_whole_experts: bool, checkpoint: Any) -> None:
    path = checkpoint("qwen3-moe")
    with torch.inference_mode():
        expected = logits_of(path, load_format="dummy")
    ranks = run_threads(
        2, lambda group: logits_of(path, group, Sharding(group.rank, 2, has_whole_experts), "dummy")
    )
    torch.testing.assert_close(ranks[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "size", "has_whole_experts"), SHARDINGS)
def test_a_rank_holds_its_part_only(name: str, size: int, has_whole_experts: bool, checkpoint: Any) -> None:
    """Matrices are divided, but for what every rank needs; KV heads are replicated if there are fewer than ranks."""
    config = load_model_config(checkpoint(name))
    whole = plan_weights(config, torch.float32)
    plans = [
        plan_weights(config, torch.float32, Sharding(rank, size, has_whole_experts)) for rank in range(size)
    ]
    shared = ("norm", "ln_", "mlp.gate.", "shared_expert_gate", "wpe", "embed_positions", "project_")
    shared += ("q_a_proj", "kv_a_proj")
    replicas = max(size // config.num_key_value_heads, 1)
    for tensor, count in whole.elements.items():
        held = [plan.elements.get(tensor, 0) for plan in plans]
        if any(part in tensor for part in shared):
            assert held == [count] * size, tensor
        elif "k_proj" in tensor or "v_proj" in tensor:
            assert held == [count * replicas // size] * size, tensor
        elif tensor.endswith("bias") and any(
            part in tensor for part in ("o_proj", "out_proj", "c_proj", "down", "fc2")
        ):
            assert held == [count] + [0] * (size - 1), tensor
        else:
            assert sum(held) == count, tensor
            assert max(held) < count or has_whole_experts, tensor
    assert max(plan.num_bytes for plan in plans) < whole.num_bytes * (0.75 if size == 2 else 0.5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_sizes_without_a_model_are_those_of_a_rank(name: str, size: int, checkpoint: Any) -> None:
    """`argosy doctor` does not build the model: it takes learned positions and routers for matrices to divide, and
    biases for vectors that every rank has."""
    config = load_model_config(checkpoint(name))
    whole = plan_weights(config, torch.float32)
    estimated = sum(rank_elements(config, whole.elements, size).values())
    found = plan_weights(config, torch.float32, Sharding(0, size)).elements
    undivided = sum(
        count - count // size
        for tensor, count in found.items()
        if any(part in tensor for part in ("wpe", "embed_positions", "project_", "mlp.gate."))
    )
    has_biases = any(tensor.endswith("bias") for tensor in found)
    assert estimated == pytest.approx(sum(found.values()) - undivided, rel=0.03 if has_biases else 0.001)


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
def test_a_rank_reads_its_bytes_only(name: str, prefix: str, checkpoint: Any) -> None:
    config, sharding = load_model_config(checkpoint(name)), Sharding(1, 2)
    reader = SafetensorsWeights(checkpoint(name), torch.float32, CPU, prefix=prefix)
    read: list[int] = []
    reader.on_read = read.append
    factory = LayerFactory(reader, TorchBackend(torch.float32), 1, sharding=sharding)
    registry.model_class(config.architecture)(config, factory)
    assert sum(read) == reader.num_bytes == plan_weights(config, torch.float32, sharding).num_bytes


@pytest.mark.parametrize("sharding", [Sharding(1, 2), Sharding(1, 2, has_whole_experts=True)])
def test_stacked_experts_are_parts_of_the_whole(sharding: Sharding) -> None:
    """As kernels for GPUs hold them."""
    weights = DummyWeights(torch.float32, CPU, 0)
    spec = ExpertsSpec("e.", RoutingSpec(num_experts=6, experts_per_token=2), hidden=8, inner=4)
    whole = LinearMethod().load_experts(weights, spec)
    if sharding.has_whole_experts:
        expected = (whole.gate_up[3:], whole.down[3:])
        part = replace(spec, held=sharding.experts(6))
    else:
        expected = (whole.gate_up[:, [2, 3, 6, 7]], whole.down[:, :, 2:])
        part = replace(spec, features=sharding.part(4))
    found = LinearMethod().load_experts(weights, part)
    assert torch.equal(found.gate_up, expected[0])
    assert torch.equal(found.down, expected[1])


def test_heads_of_a_rank() -> None:
    params = AttentionParams(num_heads=8, num_kv_heads=2, head_dim=10, scale=1.0)
    assert Sharding(1, 2).qkv(params) == (range(40, 80), range(10, 20), range(10, 20))
    assert [Sharding(rank, 4).qkv(params)[1].start for rank in range(4)] == [0, 0, 10, 10]
    assert [params.of_rank(size).num_kv_heads for size in (1, 2, 4, 8)] == [2, 1, 1, 1]
    assert params.of_rank(4).num_heads == 2
    assert [list(Sharding(rank, 3, True).experts(8)) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize(
    ("name", "changes", "size", "experts", "message"),
    [
        ("llama", {}, 3, False, "num_attention_heads 4 is not a multiple of it; use 1, 2 or 4$"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, False, "num_key_value_heads 3"),
        ("llama", {"intermediate_size": 129}, 2, False, "intermediate_size 129 is not .*; use 1$"),
        ("llama", {"vocab_size": 5}, 4, False, "vocab_size 5 is too small; use 1 or 2"),
        ("gpt2", {}, 8, False, "num_attention_heads 4"),
        ("qwen3-moe", {"experts": {"inner": 49}}, 2, False, "moe_intermediate_size 49"),
        (
            "qwen3-moe",
            {"experts": {"routing": RoutingSpec(num_experts=3, experts_per_token=1)}},
            4,
            True,
            "only 3 experts; use 1 or 2$",
        ),
        ("llama", {}, 2, True, "LlamaForCausalLM has no experts"),
        ("llama", {}, 1, True, "LlamaForCausalLM has no experts"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_sizes_that_work(
    name: str, changes: dict[str, Any], size: int, experts: bool, message: str, checkpoint: Any
) -> None:
    config = load_model_config(checkpoint(name))
    if "experts" in changes:
        assert isinstance(config, LlamaConfig)
        assert config.experts is not None
        changes = {"experts": structs.replace(config.experts, **changes["experts"])}
    config = structs.replace(config, **changes)
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel(config, size, experts)


def test_what_does_not_have_to_divide(checkpoint: Any) -> None:
    """Whole experts are not cut, and a model without dense layers has no other intermediate features."""
    config = load_model_config(checkpoint("qwen3-moe"))
    assert isinstance(config, LlamaConfig)
    assert config.experts is not None
    changed = structs.replace(
        config, experts=structs.replace(config.experts, inner=49), intermediate_size=129
    )
    check_tensor_parallel(changed, 4, True)
    for name in KINDS:
        for size in (1, 2, 4):
            check_tensor_parallel(load_model_config(checkpoint(name)), size, False)
