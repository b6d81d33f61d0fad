"""Decoders with Mamba-2 layers by our own code: what their configs and checkpoints may say, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.mamba_config import MambaHybridConfig
from argosy_engine.model_configs.sharding import Sharding, check_tensor_parallel
from argosy_engine.model_configs.stage import check_pipeline_parallel
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config, parse_config
from fp8_checkpoints import quantize_checkpoint
from rank_logits import TOKENS, logits_of
from state_shapes import FALCON_FACTORS, MAMBA_SHAPES
from thread_ranks import run_threads
from transformers_checkpoints import architecture_of, small_config, write_checkpoint
from transformers_sweep import served

MODEL_TYPES = ("granitemoehybrid", "bamba", "falcon_h1")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("model_type", "fields"), MAMBA_SHAPES, ids=[f"{each}-{i}" for i, (each, _) in enumerate(MAMBA_SHAPES)]
)
def test_greedy_tokens_are_those_of_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    found = served(write_checkpoint(model_type, tmp_path, **fields), tmp_path, model_impl="argosy")
    assert found[:2] == ("served", "")
    assert found.cached_tokens
    assert isinstance(load_model_config(tmp_path), MambaHybridConfig)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_in_flight_change_nothing(async_scheduling: bool, tmp_path: Path) -> None:
    reference = write_checkpoint("bamba", tmp_path)
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
    ],
)
def test_two_ranks_have_the_logits_of_transformers(
    model_type: str, has_whole_experts: bool, fields: dict[str, Any], tmp_path: Path
) -> None:
    reference = write_checkpoint(model_type, tmp_path, mamba_n_groups=2, **fields)
    ranks = run_threads(
        2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2, has_whole_experts))
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ranks[0], expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(*ranks)


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "lfm2", "lfm2_moe"])
@torch.inference_mode()
def test_fp8_weights_of_layers_with_states(model_type: str, tmp_path: Path) -> None:
    """On two ranks as well, which take their part of scales per channel."""
    fields = {} if model_type.startswith("lfm2") else {"mamba_n_groups": 2}
    write_checkpoint(model_type, tmp_path, **fields)
    quantize_checkpoint(tmp_path, "compressed-tensors-channel")
    expected = logits_of(tmp_path / "widened")
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-5, rtol=1e-5)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
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
        ("bamba", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
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


def test_transformers_code_runs_what_ours_does_not(tmp_path: Path) -> None:
    reference = write_checkpoint("bamba", tmp_path, hidden_act="gelu")
    assert served(reference, tmp_path)[:2] == ("served", "")
    assert isinstance(load_model_config(tmp_path), TransformersConfig)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_how_they_cannot_be_divided(model_type: str) -> None:
    with pytest.raises(ConfigError, match="number of Mamba groups 1 is not a multiple of it"):
        check_tensor_parallel(config_of(model_type), 2, False)
    with pytest.raises(ConfigError, match="keep a state per request, which stages do not support"):
        check_pipeline_parallel(config_of(model_type), 2)
    check_tensor_parallel(config_of(model_type, mamba_n_groups=2), 2, False)


def test_states_are_those_of_a_rank() -> None:
    (state, *_) = config_of("bamba", mamba_n_groups=2).state_layers
    conv, recurrent = state.of_rank(2).tensors
    assert conv.shape == (3, 64 + 2 * 16)
    assert recurrent.shape == (4, 16, 16)
    assert state.kv_cache_spec(2).page_bytes == 3 * 192 * 2 + 8 * 16 * 16 * 4
