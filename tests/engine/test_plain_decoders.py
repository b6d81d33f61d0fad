"""Decoders with LayerNorms and MLPs without a gate by our own code: what the configs and checkpoints of BLOOM, Falcon,
MPT and XGLM may say, and what is refused. GPT-2 and OPT: `test_models`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.gpt2_config import FalconConfig
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.models.config_file import load_model_config, parse_config
from fp8_checkpoints import FORMATS, quantize_checkpoint
from rank_logits import TOKENS, logits_of
from thread_ranks import run_threads
from thread_workers import thread_workers
from transformers_checkpoints import architecture_of, small_config, write_checkpoint
from transformers_sweep import served

SMALL_CONTEXT = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("bloom", {}),
    ("bloom", {"n_head": 6, "hidden_size": 192, "tie_word_embeddings": False, "layer_norm_epsilon": 0.01}),
    ("falcon", {}),
    ("falcon", {"num_attention_heads": 6, "hidden_size": 96, "bias": True, "ffn_hidden_size": 160}),
    ("falcon", {"new_decoder_architecture": True, "tie_word_embeddings": False}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "rope_parameters": SMALL_CONTEXT}),
    ("falcon", {"multi_query": False, "num_kv_heads": None, "activation": "relu"}),
    ("falcon", {"parallel_attn": False, "bias": True, "layer_norm_epsilon": 0.01}),
    ("mpt", {}),
    ("mpt", {"n_heads": 6, "d_model": 192, "tie_word_embeddings": False}),
    ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4}}),
    ("xglm", {}),
    ("xglm", {"scale_embedding": False, "pad_token_id": 9, "tie_word_embeddings": False}),
    ("xglm", {"d_model": 96, "attention_heads": 6, "activation_function": "relu"}),
]


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


@pytest.mark.parametrize("model_type", ["bloom", "mpt"])
def test_position_biases_of_torch_are_those_of_the_kernels(model_type: str, tmp_path: Path) -> None:
    reference = write_checkpoint(model_type, tmp_path)
    found = served(reference, tmp_path, model_impl="argosy", attention_backend="torch")
    assert found[:2] == ("served", "")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("model_type", ["bloom", "falcon", "xglm"])
def test_pipeline_stages_have_the_tokens_of_transformers(model_type: str, tmp_path: Path) -> None:
    reference = write_checkpoint(model_type, tmp_path)
    with thread_workers():
        found = served(reference, tmp_path, model_impl="argosy", pipeline_parallel_size=2)
    assert found[:2] == ("served", "")


@pytest.mark.parametrize(
    ("model_type", "fields", "size"),
    [
        ("bloom", {}, 2),
        ("bloom", {"n_head": 6, "hidden_size": 192}, 2),
        ("falcon", {"bias": True}, 4),
        ("falcon", {"new_decoder_architecture": True, "bias": True}, 2),
        ("falcon", {"new_decoder_architecture": True}, 4),
        ("falcon", {"parallel_attn": False, "bias": True}, 2),
        ("mpt", {"attn_config": {"clip_qkv": 0.5}}, 4),
        ("xglm", {}, 2),
    ],
)
def test_ranks_have_the_logits_of_transformers(
    model_type: str, fields: dict[str, Any], size: int, tmp_path: Path
) -> None:
    reference = write_checkpoint(model_type, tmp_path, **fields)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    assert expected.std(dim=0).mean() > 0.05, "the positions would not matter"
    ranks = run_threads(size, lambda group: logits_of(tmp_path, group, Sharding(group.rank, size)))
    torch.testing.assert_close(ranks[0], expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(ranks[0], other) for other in ranks[1:]), "ranks would sample different tokens"


@pytest.mark.parametrize("form", FORMATS)
def test_quantised_projections_in_groups_compute_what_widened_ones_compute(form: str, tmp_path: Path) -> None:
    """On two ranks as well: a group has rows of q, k and v, of which each takes its own."""
    write_checkpoint("falcon", tmp_path, new_decoder_architecture=True, bias=True)
    quantize_checkpoint(tmp_path, form)
    expected = logits_of(tmp_path / "widened")
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-5, rtol=1e-5)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 71, 112])
def test_slopes_are_those_of_transformers(num_heads: int) -> None:
    raw = raw_config("bloom", n_head=num_heads, hidden_size=num_heads * 8)
    slopes = torch.tensor(config_of(raw).alibi_slopes)
    biases = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(slopes, biases[:, 0, 1])
    slopes = torch.tensor(config_of(raw_config("mpt", n_heads=num_heads, d_model=num_heads * 8)).alibi_slopes)
    torch.testing.assert_close(slopes, -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0])


def test_checkpoints_of_the_base_model_are_read(tmp_path: Path) -> None:
    """As those of BLOOM are published."""
    reference = write_checkpoint("bloom", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(stored, file, {"format": "pt"})
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    raw |= {"n_embed": raw.pop("hidden_size"), "num_attention_heads": raw.pop("n_head"), "seq_length": 300}
    config.write_text(json.dumps(raw))
    assert load_model_config(tmp_path).max_position_embeddings == 300
    assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")


def test_checkpoints_of_mpt_are_read_as_they_are_published(tmp_path: Path) -> None:
    """With code of their own, and its names."""
    reference = write_checkpoint("mpt", tmp_path)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    code = {
        "AutoConfig": "configuration_mpt.MPTConfig",
        "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
    }
    config.write_text(json.dumps(raw | {"architectures": ["MPTForCausalLM"], "auto_map": code}))
    assert load_model_config(tmp_path).replaced_code
    assert served(reference, tmp_path)[:2] == ("served", "")
    config.write_text(
        json.dumps(raw | {"architectures": ["MPTForCausalLM"], "auto_map": code | {"AutoConfig": "a.B"}})
    )
    with pytest.raises(ConfigError, match="it is not called like code of argosy"):
        load_model_config(tmp_path)


def test_positions_that_a_checkpoint_of_xglm_stores_are_left_out(tmp_path: Path) -> None:
    reference = write_checkpoint("xglm", tmp_path)
    file = tmp_path / "model.safetensors"
    more = {"model.embed_positions.weights": torch.ones(514, 64)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm is not supported"),
        ("bloom", {"n_head": 5}, "no multiple of 5 heads"),
        ("bloom", {"n_head": 0}, "no multiple of 0 heads"),
        ("bloom", {"n_layer": 5000}, "<= 4096"),
        ("falcon", {"alibi": True}, "rounds its biases"),
        ("falcon", {"alibi": "false"}, "neither true nor false"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "those of any Falcon"),
        ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, "those of any Falcon"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "those of any Falcon"),
        ("falcon", {"multi_query": False}, "num_kv_heads 2 is not num_attention_heads 4"),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}, "not a multiple of"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "another attn_type"),
        ("mpt", {"attn_config": {"alibi": False, "alibi_bias_max": 4}}, "another alibi, alibi_bias_max"),
        ("mpt", {"attn_config": {"qk_ln": True, "prefix_lm": True}}, "another prefix_lm, qk_ln"),
        ("mpt", {"attn_config": {"clip_qkv": -1.0}}, "> 0"),
        (
            "mpt",
            {"attn_config": {"rope": True, "sliding_window_size": 9}},
            "another rope, sliding_window_size",
        ),
        ("mpt", {"logit_scale": 0.5, "expansion_ratio": 2}, "another expansion_ratio, logit_scale"),
        ("mpt", {"no_bias": False}, "another no_bias"),
        ("xglm", {"add_cross_attention": True}, "cross-attention"),
        ("xglm", {"d_model": 3, "attention_heads": 1}, "less than 4"),
    ],
)
def test_what_is_not_computed_is_refused(model_type: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config(raw_config(model_type, **fields), {}, {})


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "mpt", "xglm"])
def test_a_missing_field_means_what_it_means_to_transformers(model_type: str) -> None:
    """Or the config is refused."""
    num_compared, config_class = 0, CONFIG_MAPPING[model_type]
    architecture = {"architectures": [architecture_of(model_type)]}
    for whole in (config_class().to_dict(), small_config(model_type).to_dict()):
        for name in whole:
            raw = {field: value for field, value in whole.items() if field != name}
            try:
                ours = config_of(raw | architecture)
            except ConfigError:
                continue
            expected = config_of(config_class.from_dict(raw).to_dict() | architecture)
            assert ours == replace(expected, dtype=ours.dtype, eos_token_ids=ours.eos_token_ids), name
            num_compared += 1
    assert num_compared > 20


def test_scores_of_mpt_may_have_a_factor_of_their_own() -> None:
    scales = [
        config_of(raw_config("mpt", attn_config={"softmax_scale": scale})).attention_layers[0].scale
        for scale in (None, 0.4)
    ]
    assert scales == [1 / math.sqrt(16), 0.4]


def raw_config(model_type: str, **fields: Any) -> dict[str, Any]:
    """Return config.json of a small decoder."""
    return {
        **small_config(model_type).to_dict(),
        "architectures": [architecture_of(model_type)],
        **fields,
    }


def config_of(raw: dict[str, Any]) -> Any:
    config = parse_config(raw, {}, {}, "argosy")
    assert isinstance(config, FalconConfig) or "XGLM" in config.architecture
    return config
