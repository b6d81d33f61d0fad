"""Qwen3-Next and Qwen3.5 by our own code: what their configs and checkpoints may say, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.hybrid_config import Qwen3NextConfig
from argosy_engine.model_configs.model_config import check_pipeline_parallel, check_tensor_parallel
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.models.config_file import load_model_config, parse_config
from rank_logits import TOKENS, logits_of
from thread_ranks import run_threads
from transformers_checkpoints import small_config, write_checkpoint
from transformers_sweep import served

ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
SMALL = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3_next", {**SMALL, "linear_value_head_dim": 32, "layer_types": ["full_attention"] * 4}),
    (
        "qwen3_next",
        {
            **SMALL,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [0, 2],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    ("qwen3_5_text", {**SMALL, "linear_key_head_dim": 10, "linear_value_head_dim": 6}),  # torch computes it
    (
        "qwen3_5_text",
        {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 48,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    ("qwen3_5_moe_text", {**SMALL, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 2}),
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("model_type", "fields"), SHAPES, ids=[f"{each}-{i}" for i, (each, _) in enumerate(SHAPES)]
)
def test_greedy_tokens_are_those_of_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    found = served(write_checkpoint(model_type, tmp_path, **fields), tmp_path, model_impl="argosy")
    assert found[:2] == ("served", "")
    assert found.cached_tokens
    assert isinstance(load_model_config(tmp_path), Qwen3NextConfig)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_in_flight_change_nothing(async_scheduling: bool, tmp_path: Path) -> None:
    reference = write_checkpoint("qwen3_5_text", tmp_path, **SMALL, linear_value_head_dim=32)
    found = served(reference, tmp_path, model_impl="argosy", async_scheduling=async_scheduling)
    assert found[:2] == ("served", "")
    assert found.preemptions


def stack_experts(path: Path) -> None:
    """Store the experts of each layer in two tensors, as Qwen publishes them."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    found: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in list(tensors):
        if match := re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            experts = found.setdefault(match[1], {})
            experts.setdefault(int(match[2]), {})[match[3]] = tensors.pop(name)
    for prefix, experts in found.items():
        ordered = [experts[index] for index in range(len(experts))]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat([each["gate"], each["up"]]) for each in ordered]
        )
        tensors[f"{prefix}.down_proj"] = torch.stack([each["down"] for each in ordered])
    assert found
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "qwen3_5_moe"])
def test_experts_may_be_stacked(model_type: str, tmp_path: Path) -> None:
    reference = write_checkpoint(model_type, tmp_path, **SMALL, linear_value_head_dim=32)
    stack_experts(tmp_path)
    assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_ranks_take_their_part_of_stacked_experts(has_whole_experts: bool, tmp_path: Path) -> None:
    write_checkpoint("qwen3_5_moe_text", tmp_path, **SMALL, linear_value_head_dim=32)
    with torch.inference_mode():
        expected = logits_of(tmp_path)
    stack_experts(tmp_path)
    ranks = run_threads(
        2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2, has_whole_experts))
    )
    assert len(ranks[0]) == len(TOKENS)
    torch.testing.assert_close(ranks[0], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(*ranks)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_missing_field_means_what_it_means_to_transformers(model_type: str) -> None:
    """Or the config is refused."""
    config_class = CONFIG_MAPPING[model_type]
    num_compared = 0
    for config in (config_class(), small_config(model_type)):
        whole = config.to_dict()
        for name in whole:
            raw = {field: value for field, value in whole.items() if field != name}
            try:
                theirs = config_class.from_dict(raw).to_dict()
                ours = parse_config({**raw, "architectures": [ARCHITECTURES[model_type]]}, {}, {}, "argosy")
            except Exception:  # of their validation, or our refusal
                continue
            expected = parse_config(
                {**theirs, "architectures": [ARCHITECTURES[model_type]]}, {}, {}, "argosy"
            )
            expected = replace(expected, dtype=ours.dtype, eos_token_ids=ours.eos_token_ids)
            assert ours == expected, name
            num_compared += 1
    assert num_compared > 40


def config_of(**fields: Any) -> Qwen3NextConfig:
    raw = {
        **small_config("qwen3_next", **SMALL).to_dict(),
        **fields,
        "architectures": ["Qwen3NextForCausalLM"],
    }
    config = parse_config(raw, {}, {}, "argosy")
    assert isinstance(config, Qwen3NextConfig)
    return config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer is full_attention"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_key_head_dim": 1024}, "linear_key_head_dim"),
        ({"linear_num_key_heads": 10**9}, "linear_num_key_heads"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_what_our_code_does_not_compute_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**fields)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda config: check_tensor_parallel(config, 4, False),
            "linear_num_key_heads 2 is not a multiple of it",
        ),
        (
            lambda config: check_pipeline_parallel(config, 5),
            "exceeds the model's 4 layers",
        ),
    ],
)
def test_how_it_cannot_be_divided(check: Callable[[Qwen3NextConfig], None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config_of())
    check_tensor_parallel(config_of(), 2, False)
    check_pipeline_parallel(config_of(), 1)


def test_states_are_those_of_a_rank() -> None:
    (state, *_) = config_of(linear_value_head_dim=8).state_layers
    conv, recurrent = state.of_rank(2).tensors
    assert conv.shape == (3, 2 * 16 + 2 * 8)
    assert recurrent.shape == (2, 16, 8)
    assert state.kv_cache_spec(2).page_bytes == 3 * 96 * 2 + 4 * 16 * 8 * 4


def test_the_config_of_qwen3_next_as_it_is_published(tmp_path: Path) -> None:
    raw = {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config: Any = load_model_config(tmp_path)
    assert len(config.attention_layers) == 12
    assert len(config.state_layers) == 36
    assert [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"] == [
        *range(3, 48, 4)
    ]
    assert config.rope.rotary_dim(256) == 64
    assert config.rope.theta == 1e7
    assert config.state_layers[0].kv_cache_spec(2).page_bytes == 3 * 8192 * 2 + 32 * 128 * 128 * 4
