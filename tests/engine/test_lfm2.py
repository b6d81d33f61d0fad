"""LFM2 by our own code: what its configs and checkpoints may say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.hybrid_config import Lfm2Config
from argosy_engine.model_configs.model_config import check_pipeline_parallel, check_tensor_parallel
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.models.config_file import load_model_config, parse_config
from rank_logits import TOKENS, logits_of
from state_shapes import LFM2_SHAPES
from thread_ranks import run_threads
from transformers_checkpoints import architecture_of, small_config, write_checkpoint
from transformers_sweep import served

MODEL_TYPES = ("lfm2", "lfm2_moe")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model_type", "fields"), LFM2_SHAPES, ids=range(len(LFM2_SHAPES)))
def test_greedy_tokens_are_those_of_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    found = served(write_checkpoint(model_type, tmp_path, **fields), tmp_path, model_impl="argosy")
    assert found[:2] == ("served", "")
    assert found.cached_tokens
    assert isinstance(load_model_config(tmp_path), Lfm2Config)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_in_flight_change_nothing(async_scheduling: bool, tmp_path: Path) -> None:
    reference = write_checkpoint("lfm2", tmp_path)
    found = served(reference, tmp_path, model_impl="argosy", async_scheduling=async_scheduling)
    assert found[:2] == ("served", "")
    assert found.preemptions


def test_names_of_the_first_release_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    write_checkpoint("lfm2", tmp_path, block_multiple_of=32, tie_word_embeddings=True)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw |= {
        "block_ff_dim": raw.pop("intermediate_size"),
        "tie_embedding": True,
        "tie_word_embeddings": False,
        "layer_types": None,
        "full_attn_idxs": [1, 3],
    }
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    assert served(reference.eval(), tmp_path, model_impl="argosy")[:2] == ("served", "")


@pytest.mark.parametrize(
    ("model_type", "has_whole_experts"), [("lfm2", False), ("lfm2_moe", False), ("lfm2_moe", True)]
)
def test_two_ranks_have_the_logits_of_transformers(
    model_type: str, has_whole_experts: bool, tmp_path: Path
) -> None:
    reference = write_checkpoint(model_type, tmp_path, conv_bias=True)
    ranks = run_threads(
        2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2, has_whole_experts))
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ranks[0], expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(*ranks)


def test_weights_that_sum_to_nearly_nothing_stay_small(tmp_path: Path) -> None:
    """What the sum is increased by before weights are divided by it counts where all scores are tiny."""
    reference = write_checkpoint("lfm2_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("feed_forward.gate.weight"):
                norm = reference.get_parameter(name.replace("feed_forward.gate", "ffn_norm"))
                norm.zero_()[0] = 16.0
                parameter[:, 0] = -1.0
                stored |= {name: parameter, name.replace("feed_forward.gate", "ffn_norm"): norm}
        expected = reference(torch.tensor([TOKENS])).logits[0]
    save_file({name: each.detach().contiguous() for name, each in stored.items()}, file, {"format": "pt"})
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_missing_field_means_what_it_means_to_transformers(model_type: str) -> None:
    """Or the config is refused."""
    config_class, architecture = CONFIG_MAPPING[model_type], {"architectures": [architecture_of(model_type)]}
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
    assert num_compared > 20


def config_of(model_type: str = "lfm2", **fields: Any) -> Lfm2Config:
    raw = {**small_config(model_type).to_dict(), **fields, "architectures": [architecture_of(model_type)]}
    config = parse_config(raw, {}, {}, "argosy")
    assert isinstance(config, Lfm2Config)
    return config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["conv"] * 4}, "no layer has attention"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"conv_L_cache": 1}, "conv_kernel_size"),
        ({"conv_L_cache": 10**9}, "conv_kernel_size"),
        ({"block_multiple_of": 0}, "malformed"),
        ({"model_type": "lfm2_moe", "layer_types": None}, "no layer_types"),
        ({"model_type": "lfm2_moe", "num_experts_per_tok": 9}, "exceeds num_experts"),
        ({"model_type": "lfm2_moe", "use_expert_bias": "false"}, "neither true nor false"),
    ],
)
def test_what_our_code_does_not_compute_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**fields)


def test_how_it_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="hidden_size 62 is not a multiple of it"):
        check_tensor_parallel(config_of(hidden_size=62, head_dim=16), 4, False)
    with pytest.raises(ConfigError, match="exceeds the model's 4 layers"):
        check_pipeline_parallel(config_of(), 5)


def test_states_are_those_of_a_rank() -> None:
    (state, *_) = config_of(conv_L_cache=4).state_layers
    assert state.of_rank(2).tensors[0].shape == (3, 32)
    assert state.kv_cache_spec(2).page_bytes == 3 * 64 * 2
