"""Gemma 4 by our own code: what its configs and checkpoints may say, how it is divided, and its KV cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from argosy_engine.attention.kv_cache_spec import block_bytes
from argosy_engine.attention.selector import AttentionNeeds, select_backend
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.weights import WeightPlan
from argosy_engine.errors import ConfigError
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.model_configs.gemma_config import Gemma4Config
from argosy_engine.model_configs.model_config import check_pipeline_parallel, check_tensor_parallel
from argosy_engine.model_configs.sharding import Sharding, Stage
from argosy_engine.models.config_file import load_model_config, parse_config
from argosy_engine.models.gemma import Gemma4
from argosy_engine.models.loader import load_model
from argosy_engine.sizing.kv_cache_sizing import planned_groups
from argosy_engine.worker.model_runner import bind_kv_cache, layer_groups
from attention_cases import bind_sequence, sequence_inputs
from fp8_checkpoints import quantize_checkpoint
from gemma4_shapes import DENSE, EXPERTS, SHARED
from rank_logits import BLOCK_SIZE, CPU, TOKENS, logits_of
from thread_ranks import run_threads
from transformers_checkpoints import small_config, write_checkpoint
from transformers_sweep import served

PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
    "top_k_experts": 8,
    "vocab_size": 262144,
}
"""With experts, and fields of global layers as published configs have them."""


def config_of(**fields: Any) -> Gemma4Config:
    config = parse_config({**PUBLISHED, **fields}, {}, {}, "argosy")
    assert isinstance(config, Gemma4Config)
    return config


def small(**fields: Any) -> Gemma4Config:
    raw = {**small_config("gemma4_text", **DENSE).to_dict(), **fields, "architectures": ["Gemma4ForCausalLM"]}
    config = parse_config(raw, {}, {}, "argosy")
    assert isinstance(config, Gemma4Config)
    return config


def test_fields_of_global_layers_are_those_of_published_configs() -> None:
    config = config_of()
    local, last = config.attention_layers[0], config.attention_layers[5]
    assert (local.num_kv_heads, local.head_dim, local.scale, local.sliding_window) == (8, 256, 1.0, 1024)
    assert (last.num_kv_heads, last.head_dim, last.scale, last.sliding_window) == (2, 512, 1.0, None)
    assert [layer.sliding_window for layer in config.attention_layers].count(None) == 5
    assert (config.rope_global.kind, config.rope_global.theta, config.rope_global.rotary_dim(512)) == (
        "proportional", 1e6, 128,
    )  # fmt: skip
    assert config_of(attention_k_eq_v=False).attention_layers[5].num_kv_heads == 8


def test_blocks_are_as_large_as_global_layers_need() -> None:
    """Two local layers of twice the size fit into one of five global layers."""
    groups = planned_groups(config_of(), 2, 16)
    assert [len(group.layers) for group in groups] == [5, *[2] * 12, 1]
    assert block_bytes(groups) == 5 * 2 * 2 * 512 * 2 * 16
    assert sorted(layer for group in groups for layer in group.layers) == list(range(30))


@pytest.mark.parametrize("fields", [DENSE, SHARED], ids=["smaller", "larger"])
def test_layers_of_all_groups_keep_apart(fields: dict[str, Any]) -> None:
    """Each group in a block of its own, all layers of a group in the same."""
    config = small(**small_config("gemma4_text", **fields).to_dict())
    model = Gemma4(config, LayerFactory(WeightPlan(torch.float32), TorchBackend(torch.float32), 1))
    groups = layer_groups(model, BLOCK_SIZE)
    assert groups == planned_groups(config, 4, BLOCK_SIZE)
    assert len({group.spec.page_bytes for group in groups}) == 2
    bind_kv_cache(model, groups, len(groups), BLOCK_SIZE, CPU)
    layers = model.attention_layers
    for index, layer in enumerate(layers):
        assert layer.kv_cache.shape == layer.kv_cache_shape(len(groups), BLOCK_SIZE)
        layer.kv_cache[:, layer.group] = index + 1.0
    for index, layer in enumerate(layers):
        assert (layer.kv_cache[:, layer.group] == index + 1.0).all()


def test_backends_that_know_no_strided_blocks_pass() -> None:
    def chosen(layers: Any) -> Any:
        return select_backend(AttentionNeeds("cpu", "float32", 16, layers))

    choice = chosen(small(head_dim=16, per_layer_config=None, global_head_dim=32).attention_layers)
    assert choice.refused["cpu"] == "it needs layers with the same number and size of KV heads"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_activation": "silu"}, "activation 'silu'"),
        ({"use_bidirectional_attention": "all"}, "attend to those after them"),
        ({"layer_types": ["chunked_attention"] * 30}, "layer type 'chunked_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 30 layers"),
        ({"vocab_size_per_layer_input": 7, "hidden_size_per_layer_input": 4}, "vocab_size_per_layer_input 7"),
        ({"per_layer_config": {"5": {"sliding_window": 3}}}, "per_layer_config has sliding_window"),
        ({"per_layer_config": {"5": {"head_dim": 128}}}, "heads of layers of full_attention differ"),
        ({"per_layer_config": {"30": {"head_dim": 128}}}, "per_layer_config has layer 30"),
        ({"num_global_key_value_heads": 3}, "not a multiple of num_global_key_value_heads 3"),
        ({"num_kv_shared_layers": 30}, "leaves no full_attention"),
        ({"num_kv_shared_layers": 26}, "leaves no full_attention"),
        ({"num_kv_shared_layers": 31}, "leaves no"),
        (
            {
                "num_kv_shared_layers": 2,
                "per_layer_config": {"29": {"num_key_value_heads": 4}, "28": {"num_key_value_heads": 8}},
            },
            "layer 29 has 4 KV heads, and layer 23, whose keys and values it shares, 8",
        ),
        ({"pad_token_id": 262144}, "pad_token_id 262144"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "has no sliding_attention"),
        ({"top_k_experts": 129}, "exceeds num_experts"),
        ({"top_k_experts": None}, "experts_per_token"),
        ({"attention_k_eq_v": "false"}, "neither true nor false"),
        ({"final_logit_softcapping": 0.0}, "> 0"),
    ],
)
def test_what_our_code_does_not_compute_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**fields)


@pytest.mark.parametrize("rope_type", ["yarn", "llama3", "dynamic"])
def test_other_ropes_are_refused(rope_type: str) -> None:
    rope = {"sliding_attention": {}, "full_attention": {"rope_type": rope_type, "factor": 2.0}}
    with pytest.raises(ConfigError, match=f"RoPE scaling '{rope_type}'"):
        config_of(rope_parameters=rope)


def test_how_it_cannot_be_divided() -> None:
    check_tensor_parallel(config_of(), 8, True)
    with pytest.raises(ConfigError, match="num_global_key_value_heads 3 is neither"):
        check_tensor_parallel(config_of(num_attention_heads=24, num_global_key_value_heads=3), 4, False)
    with pytest.raises(ConfigError, match="moe_intermediate_size 704 is not a multiple"):
        check_tensor_parallel(config_of(num_attention_heads=24, num_key_value_heads=6), 3, False)
    check_pipeline_parallel(config_of(), 3)
    with pytest.raises(ConfigError, match="share keys and values"):
        check_pipeline_parallel(config_of(num_kv_shared_layers=10), 2)
    with pytest.raises(ConfigError, match="embeddings of their own"):
        check_pipeline_parallel(
            config_of(hidden_size_per_layer_input=8, vocab_size_per_layer_input=262144), 2
        )


@torch.inference_mode()
def test_two_stages_compute_what_one_process_computes(tmp_path: Path) -> None:
    write_checkpoint("gemma4_text", tmp_path, **EXPERTS)
    expected, hidden, parts = logits_of(tmp_path), None, []
    for index in range(2):
        loaded = load_model(
            tmp_path, load_model_config(tmp_path), dtype=torch.float32, device=CPU, attention_backend="torch",
            max_positions=512, load_format="auto", seed=0, stage=Stage(index, 2),
        )  # fmt: skip
        parts.append(loaded.model)
    for model in parts:
        bind_sequence(model, len(TOKENS), BLOCK_SIZE)
        inputs = sequence_inputs(model, TOKENS, 0, len(TOKENS), BLOCK_SIZE)
        hidden = model.forward(replace(inputs, hidden=hidden))
    torch.testing.assert_close(parts[1].logits(hidden), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fields", [DENSE, SHARED], ids=["dense", "shared"])
@torch.inference_mode()
def test_fp8_weights(fields: dict[str, Any], tmp_path: Path) -> None:
    """On two ranks as well, which take their part of scales per channel."""
    write_checkpoint("gemma4_text", tmp_path, **fields)
    quantize_checkpoint(tmp_path, "compressed-tensors-channel")
    expected = logits_of(tmp_path / "widened")
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-5, rtol=1e-5)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], expected, atol=2e-4, rtol=2e-4)


def test_experts_may_be_stored_one_by_one(tmp_path: Path) -> None:
    """As in checkpoints that compressed-tensors quantised."""
    write_checkpoint("gemma4_text", tmp_path, **EXPERTS)
    expected, file = logits_of(tmp_path), tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [each for each in stored if ".experts." in each]:
        prefix, kind = name.rsplit(".", 1)
        for index, expert in enumerate(stored.pop(name)):
            names = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
            for part, each in zip(names, expert.chunk(len(names)), strict=True):
                stored[f"{prefix}.{index}.{part}.weight"] = each.contiguous()
    save_file(stored, file, {"format": "pt"})
    torch.testing.assert_close(logits_of(tmp_path), expected)


def test_keys_and_values_of_layers_that_share_others_are_left_unread(tmp_path: Path) -> None:
    reference = write_checkpoint("gemma4_text", tmp_path, **SHARED)
    file = tmp_path / "model.safetensors"
    stored, more = load_file(file), torch.ones(48, 64)
    save_file({**stored, "model.layers.3.self_attn.k_proj.weight": more}, file, {"format": "pt"})
    assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")
    save_file({**stored, "model.layers.1.self_attn.v_norm.weight": more}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.v_norm"):
        logits_of(tmp_path)


def test_placeholders_are_padding(tmp_path: Path) -> None:
    """In the wrapper, whose tokens for images have no embedding that a text could mean."""
    reference = write_checkpoint("gemma4", tmp_path, **SHARED)
    raw = json.loads((tmp_path / "config.json").read_text())
    image, video = raw["image_token_id"], raw["video_token_id"]
    tokens = [TOKENS[0], image, *TOKENS[:9], video, TOKENS[3]]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
        model = load_model(
            tmp_path, load_model_config(tmp_path), dtype=torch.float32, device=CPU, attention_backend="torch",
            max_positions=512, load_format="auto", seed=0,
        ).model  # fmt: skip
        bind_sequence(model, len(tokens), BLOCK_SIZE)
        inputs = sequence_inputs(model, tokens, 0, len(tokens), BLOCK_SIZE)
        torch.testing.assert_close(model.logits(model.forward(inputs)), expected, atol=1e-4, rtol=1e-4)
