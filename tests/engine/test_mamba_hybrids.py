"""Decoders with Mamba-2 layers by our own code: what their configs and checkpoints may say, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.hybrid_config import MambaHybridConfig
from argosy_engine.model_configs.model_config import check_pipeline_parallel, check_tensor_parallel
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config, parse_config
from fp8_checkpoints import quantize_checkpoint
from rank_logits import TOKENS, logits_of
from state_shapes import FALCON_FACTORS, MAMBA_SHAPES, NEMOTRON_SHAPES
from thread_ranks import run_threads
from thread_workers import thread_workers
from transformers_checkpoints import architecture_of, small_config, write_checkpoint
from transformers_sweep import served

MODEL_TYPES = ("granitemoehybrid", "bamba", "falcon_h1")
SHAPES = (*MAMBA_SHAPES, *(("nemotron_h", fields) for fields in NEMOTRON_SHAPES))


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
    assert isinstance(load_model_config(tmp_path), MambaHybridConfig)


@pytest.mark.parametrize("model_type", ["bamba", "nemotron_h"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_in_flight_change_nothing(async_scheduling: bool, model_type: str, tmp_path: Path) -> None:
    reference = write_checkpoint(model_type, tmp_path)
    found = served(reference, tmp_path, model_impl="argosy", async_scheduling=async_scheduling)
    assert found[:2] == ("served", "")
    assert found.preemptions


@pytest.mark.parametrize(
    ("model_type", "has_whole_experts", "fields"),
    [
        ("granitemoehybrid", False, {"mamba_proj_bias": True}),
        ("granitemoehybrid", True, {}),
        ("bamba", False, {"mlp_bias": True, "mamba_proj_bias": True}),
        (
            "falcon_h1",
            False,
            {"mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True, **FALCON_FACTORS},
        ),
        ("nemotron_h", False, {"use_bias": True, "mlp_bias": True}),
        ("nemotron_h", False, {"moe_latent_size": 40}),
        ("nemotron_h", True, {"moe_latent_size": 40}),
    ],
)
@pytest.mark.parametrize(("num_ranks", "groups"), [(2, 2), (2, 1), (4, 1), (4, 2)])
def test_ranks_have_the_logits_of_transformers(
    model_type: str,
    has_whole_experts: bool,
    fields: dict[str, Any],
    num_ranks: int,
    groups: int,
    tmp_path: Path,
) -> None:
    """Where ranks share groups as well."""
    reference = write_checkpoint(model_type, tmp_path, mamba_n_groups=groups, **fields)
    check_ranks(reference, tmp_path, num_ranks, has_whole_experts=has_whole_experts)


@pytest.mark.parametrize(("num_ranks", "groups"), [(2, 1), (4, 2)])
def test_ranks_of_nemotron_h_share_groups(num_ranks: int, groups: int, tmp_path: Path) -> None:
    check_ranks(write_checkpoint("nemotron_h", tmp_path, n_groups=groups), tmp_path, num_ranks)


@pytest.mark.parametrize("norm", [{}, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}])
@pytest.mark.parametrize("size", [{}, {"mamba_d_ssm": 128}])
def test_ranks_of_falcon_h1_share_a_group_with_any_norm(
    size: dict[str, Any], norm: dict[str, Any], tmp_path: Path
) -> None:
    """Heads are of sizes that plain torch and the CPU kernels compute."""
    reference = write_checkpoint("falcon_h1", tmp_path, mamba_n_groups=1, **size, **norm)
    check_ranks(reference, tmp_path, 2)


def check_ranks(
    reference: torch.nn.Module, path: Path, num_ranks: int, *, has_whole_experts: bool = False
) -> None:
    """Compare the logits of a checkpoint on tensor-parallel ranks with those of transformers' model."""
    ranks = run_threads(
        num_ranks, lambda group: logits_of(path, group, Sharding(group.rank, num_ranks, has_whole_experts))
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ranks[0], expected, atol=2e-4, rtol=2e-4)
    for other in ranks[1:]:
        assert torch.equal(ranks[0], other)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_ranks_that_share_a_group_serve_the_tokens_of_transformers(model_type: str, tmp_path: Path) -> None:
    """In chunks over a prefix cache and preempted, too: each rank has its part of the states."""
    fields = {"mamba_rms_norm": True} if model_type == "falcon_h1" else {}
    reference = write_checkpoint(model_type, tmp_path, mamba_n_groups=1, **fields)
    with thread_workers():
        found = served(reference, tmp_path, model_impl="argosy", tensor_parallel_size=2)
    assert found[:2] == ("served", "")
    assert found.cached_tokens


@pytest.mark.parametrize(
    ("model_type", "fields", "form"),
    [
        ("bamba", {"mamba_n_groups": 2}, "compressed-tensors-channel"),
        ("falcon_h1", {"mamba_n_groups": 1}, "compressed-tensors-channel"),
        ("lfm2", {}, "compressed-tensors-channel"),
        ("lfm2_moe", {}, "compressed-tensors-channel"),
        ("nemotron_h", {"mamba_n_groups": 2, "moe_latent_size": 40}, "compressed-tensors-channel"),
        ("nemotron_h", {"mamba_n_groups": 2}, "modelopt"),
        ("nemotron_h", {"mamba_n_groups": 2}, "compressed-tensors-block"),
    ],
)
@torch.inference_mode()
def test_fp8_weights_of_layers_with_states(
    model_type: str, fields: dict[str, Any], form: str, tmp_path: Path
) -> None:
    """On two ranks as well, which take their part of scales per channel."""
    write_checkpoint(model_type, tmp_path, **fields)
    quantize_checkpoint(tmp_path, form)
    expected = logits_of(tmp_path / "widened")
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-5, rtol=1e-5)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], expected, atol=2e-4, rtol=2e-4)


@torch.inference_mode()
def test_step_sizes_of_nemotron_have_no_lower_bound(tmp_path: Path) -> None:
    """As in training. transformers' code lets none of a prompt be smaller than `time_step_min`."""
    reference = write_checkpoint("nemotron_h", tmp_path, time_step_min=0.5)
    tokens = torch.tensor([TOKENS])
    bounded = reference(tokens).logits[0]
    base: Any = reference.model
    for layer in base.layers:
        layer.mixer.time_step_limit = (0.0, math.inf)
    expected = reference(tokens).logits[0]
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=2e-4, rtol=2e-4)
    assert (bounded - expected).abs().max() > 0.1


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    write_checkpoint("nemotron_h", tmp_path)
    expected = logits_of(tmp_path)
    file = tmp_path / "model.safetensors"
    more = {"mtp.layers.0.mixer.q_proj.weight": torch.ones(8, 8)}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    assert torch.equal(logits_of(tmp_path), expected)


@pytest.mark.parametrize(
    "edits",
    [
        {"layers_block_type": None, "hybrid_override_pattern": "ME*-", "num_hidden_layers": 52},
        {"layers_block_type": None, "hybrid_override_pattern": None},
        {"hybrid_override_pattern": "M*"},
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        {"layers_block_type": ["mlp"], "layer_types": ["linear_attention", "moe", "full_attention", "mlp"]},
        {"n_groups": 2, "mamba_n_groups": 8, "conv_kernel": 7, "mamba_d_conv": 4},
        {"use_conv_bias": False, "mamba_conv_bias": True},
        {"n_routed_experts": 16, "num_local_experts": 8},
        {"expand": 7, "mamba_proj_bias": True, "residual_in_fp32": True, "num_nextn_predict_layers": 1},
        {"time_step_min": 0.5, "time_step_floor": 0.5, "rope_theta": 7.0, "attention_bias": True},
    ],
)
def test_other_ways_to_write_a_config_of_nemotron(edits: dict[str, Any]) -> None:
    wanted, raw = config_of("nemotron_h"), small_config("nemotron_h").to_dict() | edits
    raw = {name: value for name, value in raw.items() if value is not None}
    theirs = CONFIG_MAPPING["nemotron_h"].from_dict(raw).to_dict()
    for each in (raw, theirs):
        parsed = parse_config({**each, "architectures": [architecture_of("nemotron_h")]}, {}, {}, "argosy")
        assert parsed == wanted


def test_the_published_config_of_nemotron_3_nano() -> None:
    raw = {
        "architectures": ["NemotronHForCausalLM"], "hidden_size": 2688, "head_dim": 128, "vocab_size": 131072,
        "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 262144,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "n_groups": 8,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4, "n_group": 1,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "intermediate_size": 1856,
        "time_step_min": 0.001, "time_step_floor": 0.0001, "time_step_limit": [0.0, math.inf],
    }  # fmt: skip
    config = parse_config(raw, {}, {}, "argosy")
    assert (len(config.attention_layers), len(config.state_layers)) == (6, 23)
    assert isinstance(config, MambaHybridConfig)
    assert config.experts is not None
    assert sum(config.experts.is_sparse) == 23
    assert "intermediate_size" not in config.divided_sizes(has_whole_experts=False)
    assert config.divided_sizes(has_whole_experts=True)["intermediate size of shared experts"] == 3712
    assert config_of("nemotron_h").divided_sizes(has_whole_experts=False)["intermediate_size"] == 96
    check_tensor_parallel(config, 8, True)


@pytest.mark.parametrize("model_type", [*MODEL_TYPES, "nemotron_h"])
def test_a_missing_field_means_what_it_means_to_transformers(model_type: str) -> None:
    """Or the config is refused."""
    config_class = CONFIG_MAPPING[model_type]
    architecture = {"architectures": [architecture_of(model_type)]}
    num_compared = 0
    for config in (config_class(), small_config(model_type)):
        whole = config.to_dict()
        for name in whole:
            raw = {field: value for field, value in whole.items() if field != name}
            try:
                theirs = config_class.from_dict(raw).to_dict()
                ours = parse_config({**raw, **architecture}, {}, {}, "argosy")
            except Exception:  # of their validation, or our refusal
                continue
            expected = parse_config({**theirs, **architecture}, {}, {}, "argosy")
            expected = replace(expected, dtype=ours.dtype, eos_token_ids=ours.eos_token_ids)
            assert ours == expected, name
            num_compared += 1
    assert num_compared > 30


def config_of(model_type: str, **fields: Any) -> MambaHybridConfig:
    raw = {
        **small_config(model_type).to_dict(),
        **fields,
        "architectures": [architecture_of(model_type)],
    }
    config = parse_config(raw, {}, {}, "argosy")
    assert isinstance(config, MambaHybridConfig)
    return config


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("bamba", {"time_step_limit": [0.0, 0.1]}, "time_step_limit.*; leave out --model-impl argosy"),
        ("bamba", {"time_step_limit": None}, "time_step_limit"),
        ("granitemoehybrid", {"time_step_limit": [0.01, math.inf]}, "time_step_limit"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "no layer has attention"),
        ("bamba", {"attn_layer_indices": None}, "no layer has attention"),
        ("granitemoehybrid", {"layer_types": ["attention"] * 3}, "3 layer_types for 4 layers"),
        ("granitemoehybrid", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ("bamba", {"mamba_n_groups": 3}, "8 heads of Mamba are not a multiple of 3 groups"),
        ("bamba", {"mamba_d_head": 15}, "are not the 128 elements"),
        ("bamba", {"mamba_d_conv": 1}, "mamba_kernel_size"),
        ("bamba", {"mamba_d_state": 10**9}, "mamba_state_size"),
        ("bamba", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit.*; --model-impl transformers"),
        ("nemotron_h", {"mamba_dt_limit": [0.01, math.inf]}, "time_step_limit"),
        ("nemotron_h", {"layers_block_type": ["moe", "mlp", "linear_attention"]}, "no layer has attention"),
        ("nemotron_h", {"layers_block_type": ["hybrid", "full_attention"]}, "layer type 'hybrid'"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "layer type 'X'"),
        ("nemotron_h", {"layers_block_type": []}, "layers: Expected `int` >= 1"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'.*--model-impl transformers"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("nemotron_h", {"sliding_window": 128}, "sliding_window"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts"),
        ("nemotron_h", {"moe_latent_size": 40, "mlp_bias": True}, "mlp_bias"),
        ("nemotron_h", {"n_group": 3}, "n_group 3"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "mamba_projected"),
        ("falcon_h1", {"attention_out_multiplier": None}, "attention_output"),
        ("falcon_h1", {"key_multiplier": 0.0}, "attention_multiplier"),
    ],
)
def test_what_our_code_does_not_compute_is_refused(
    model_type: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(model_type, **fields)


def test_bounds_of_time_steps_may_be_written_in_three_ways() -> None:
    for infinity in (math.inf, "Infinity", {"__float__": "Infinity"}):
        config_of("bamba", time_step_limit=[0.0, infinity])


def test_transformers_code_runs_nemotron_only_where_it_is_asked_for() -> None:
    """With its bound of step sizes it computes another model."""
    for fields in ({"mlp_hidden_act": "silu"}, {"time_step_limit": [0.0, 1.0]}, {"head_dim": 23}):
        raw = small_config("nemotron_h", **fields).to_dict()
        raw["architectures"] = [architecture_of("nemotron_h")]
        with pytest.raises(ConfigError):
            parse_config(raw, {}, {}, "auto")
        assert isinstance(parse_config(raw, {}, {}, "transformers"), TransformersConfig)


def test_transformers_code_runs_what_ours_does_not(tmp_path: Path) -> None:
    reference = write_checkpoint("bamba", tmp_path, hidden_act="gelu")
    assert served(reference, tmp_path)[:2] == ("served", "")
    assert isinstance(load_model_config(tmp_path), TransformersConfig)


def test_how_they_cannot_be_divided() -> None:
    heads = dict.fromkeys(("mamba_n_heads", "num_attention_heads", "num_key_value_heads"), 12)
    refused = "number of Mamba groups 3 is neither a multiple of it nor divides it; use 1, 3, 6 or 12"
    with pytest.raises(ConfigError, match=refused):
        check_tensor_parallel(
            config_of("granitemoehybrid", hidden_size=96, mamba_n_groups=3, **heads), 2, False
        )
    with pytest.raises(ConfigError, match="number of Mamba heads 2 is not a multiple of it; use 1 or 2"):
        check_tensor_parallel(config_of("granitemoehybrid", mamba_n_heads=2, mamba_d_head=64), 4, False)
    with pytest.raises(ConfigError, match="exceeds the model's 4 layers"):
        check_pipeline_parallel(config_of("bamba"), 5)


@pytest.mark.parametrize(
    ("groups", "num_ranks", "channels", "heads"),
    [
        (2, 2, 64 + 2 * 16, 4),
        (1, 2, 64 + 2 * 16, 4),
        (1, 4, 32 + 2 * 16, 2),
        (2, 4, 32 + 2 * 16, 2),
        (4, 2, 64 + 4 * 16, 4),
    ],
)
def test_states_are_those_of_a_rank(groups: int, num_ranks: int, channels: int, heads: int) -> None:
    config = config_of("bamba", mamba_n_groups=groups)
    (state, *_) = config.state_layers
    conv, recurrent = state.of_rank(num_ranks).tensors
    assert conv.shape == (3, channels)
    assert recurrent.shape == (heads, 16, 16)
    assert state.of_rank(num_ranks) == config.mamba.of_rank(num_ranks).state.of_rank(1)
    assert state.kv_cache_spec(2).page_bytes == 3 * (128 + groups * 32) * 2 + 8 * 16 * 16 * 4
