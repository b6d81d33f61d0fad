"""Decoders of our own code have transformers' greedy tokens in the shapes that their configs allow: batched, in chunks
over a prefix cache, and preempted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from argosy_engine.checkpoint.shards import checkpoint_elements
from argosy_engine.errors import ConfigError
from argosy_engine.layers.embedding import query_scales
from argosy_engine.layers.experts import choose_experts
from argosy_engine.layers.mlp import SparseMLP
from argosy_engine.model_configs.experts_config import RoutingSpec
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config, parse_config
from argosy_engine.models.loader import load_model, plan_weights
from argosy_engine.sizing.kv_cache_sizing import used_elements
from deepseek_shapes import DEEPSEEK_SHAPES, EXPANDED
from gemma4_shapes import DENSE, EXPERTS, GEMMA4_SHAPES, SHARED
from llama_shapes import GROUPS, LLAMA_SHAPES, MULTIPLIERS, PARTIAL_ROPE, TEMPERATURE
from rank_logits import TOKENS, logits_of
from thread_ranks import run_threads
from transformers_checkpoints import small_config, write_checkpoint
from transformers_sweep import served

SHAPES = [*LLAMA_SHAPES, *DEEPSEEK_SHAPES, *GEMMA4_SHAPES]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model_type", "fields"), SHAPES, ids=[f"{each}-{i}" for i, (each, _) in enumerate(SHAPES)]
)
def test_greedy_tokens_are_those_of_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    found = served(write_checkpoint(model_type, tmp_path, **fields), tmp_path, model_impl="argosy")
    assert found[:2] == ("served", "")
    assert found.cached_tokens


@pytest.mark.parametrize(
    ("model_type", "fields"), [("deepseek_v3", {}), ("hy_v3", {"num_nextn_predict_layers": 1})]
)
def test_layers_that_predict_further_tokens_are_not_loaded(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    reference = write_checkpoint(model_type, tmp_path, **fields)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    last, more = reference.config.num_hidden_layers, torch.ones(8, 8)
    save_file({**stored, f"model.layers.{last}.eh_proj.weight": more}, file, {"format": "pt"})
    assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")
    config = load_model_config(tmp_path)
    assert used_elements(config, checkpoint_elements(tmp_path)).keys() == stored.keys()
    save_file({**stored, f"model.layers.{last + 1}.eh_proj.weight": more}, file, {"format": "pt"})
    assert served(reference, tmp_path, model_impl="argosy").kind == "refused"


_KINDS = ["sliding_attention", "full_attention"] * 2
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
_EDITED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("cohere2", {}, {"layer_types": ..., "sliding_window_pattern": 2}),
    ("cohere2", {}, {"layer_types": ..., "use_qk_norm": True}),
    ("ernie4_5_moe", {}, {"moe_norm_min": 0.9}),
    ("ernie4_5_moe", {}, {"num_experts_per_tok": 3}),
    ("ernie4_5_moe", {}, {"num_experts_per_tok": 3, "moe_k": None}),
    ("exaone4", {"sliding_window": None}, {"sliding_window": ..., "layer_types": ["full_attention"] * 4}),
    ("exaone4", {"sliding_window": None}, {"sliding_window": ..., "layer_types": _KINDS}),
    ("exaone4", {"sliding_window": None}, {"sliding_window": ..., "layer_types": ...}),
    ("gemma", {}, {"hidden_act": "gelu", "hidden_activation": "silu"}),
    ("glm4", {"head_dim": 20}, {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4}}),
    ("llama4_text", {}, {"layer_types": ..., "no_rope_layers": []}),
    ("llama4_text", {}, {"moe_layers": ..., "interleave_moe_layer_step": 1, "tie_word_embeddings": ...}),
    ("mistral", {"sliding_window": 20}, {"layer_types": _KINDS}),
    ("olmoe", {}, {"sliding_window": 20}),
    ("smollm3", {"sliding_window": 20}, {"layer_types": _KINDS}),
    ("smollm3", {}, {"no_rope_layers": [1, 0, 0, 1, 0, 0]}),
]
"""Model types, fields of their models, and what config.json says otherwise; ...: it has no such field."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model_type", "fields", "edits"), _EDITED, ids=[f"{each[0]}-{i}" for i, each in enumerate(_EDITED)]
)
def test_config_files_mean_what_they_mean_to_transformers(
    model_type: str, fields: dict[str, Any], edits: dict[str, Any], tmp_path: Path
) -> None:
    """Fields that its config classes do not write, or that contradict others."""
    write_checkpoint(model_type, tmp_path, **fields)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text()) | edits
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    assert served(reference.eval(), tmp_path)[:2] == ("served", "")


@pytest.mark.timeout(300)
def test_all_layers_of_a_text_part_of_mistral_have_the_window(tmp_path: Path) -> None:
    """transformers reads their types only where there is no wrapper."""
    reference = write_checkpoint("mistral3", tmp_path, sliding_window=20, layer_types=_KINDS)
    assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("cohere", {"hidden_act": "gelu"}),
        ("cohere", {"logit_scale": -0.5}),
        ("cohere2", {"logit_scale": -0.5}),
        ("gemma", {"hidden_act": "silu"}),
        ("gemma4_text", {"hidden_activation": "silu"}),
        ("gemma4_text", {"vocab_size_per_layer_input": 320}),
        ("glm4v", {"hidden_act": "gelu"}),
        ("llama4", {"attn_scale": -0.2}),
        ("llama4_text", {"attn_scale": -0.2}),
        ("llama4_text", {"hidden_act": "gelu"}),
        ("llama4_text", {"rope_parameters": _YARN}),
        ("llava", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("mistral3", {"hidden_act": "gelu"}),
        ("qwen3_vl_moe", {"moe_intermediate_size": 32}),
        ("stablelm", {"qk_layernorm": True}),
        ("starcoder2", {"hidden_act": "silu"}),
    ],
)
def test_what_ours_does_not_compute_is_left_to_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    reference = write_checkpoint(model_type, tmp_path, **fields)
    assert served(reference, tmp_path)[:2] == ("served", "")
    assert isinstance(load_model_config(tmp_path), TransformersConfig)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_impl", ["argosy", "transformers"])
def test_a_number_may_say_whether_queries_grow(model_impl: str, tmp_path: Path) -> None:
    """As in the config of Llama 4 Scout, which transformers' config class refuses."""
    reference = write_checkpoint("llama4", tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw["text_config"]["attn_temperature_tuning"] = 4
    file.write_text(json.dumps(raw))
    assert served(reference, tmp_path, model_impl=model_impl)[:2] == ("served", "")


@pytest.mark.timeout(300)
def test_experts_of_llama_4_may_be_stored_one_by_one(tmp_path: Path) -> None:
    """As in checkpoints that compressed-tensors quantised."""
    reference = write_checkpoint("llama4_text", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [each for each in stored if each.endswith((".gate_up_proj", "experts.down_proj"))]:
        prefix, kind = name.rsplit(".", 1)
        for index, expert in enumerate(stored.pop(name)):
            parts = (
                {"down_proj": expert}
                if kind == "down_proj"
                else {
                    f"{half}_proj": each
                    for half, each in zip(("gate", "up"), expert.chunk(2, dim=1), strict=True)
                }
            )
            stored |= {f"{prefix}.{index}.{part}.weight": each.T.contiguous() for part, each in parts.items()}
    save_file(stored, file, {"format": "pt"})
    assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")


def test_queries_of_llama_4_grow_in_float32_and_from_the_first_position_as_1() -> None:
    config = load_config_of("llama4_text", attn_scale=0.1, floor_scale=8192)
    assert [config.temperature_of(index) is not None for index in range(4)] == [False, False, False, True]
    factors = query_scales(config.temperature_of(3), torch.tensor([8190, 8191, 40000]), torch.bfloat16)
    expected = torch.tensor([1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(5)])
    torch.testing.assert_close(factors[:, 0], expected)


def test_chunks_that_no_request_exceeds_are_none() -> None:
    """So that backends without chunks serve them."""
    for size, expected in ((511, 511), (512, None)):
        layers = load_config_of("llama4_text", attention_chunk_size=size).attention_layers
        assert [layer.chunk_size for layer in layers] == [*3 * [expected], None]


def load_config_of(model_type: str, **fields: Any) -> Any:
    raw = small_config(model_type, **fields).to_dict()
    return parse_config(
        {**raw, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]}, {}, {}, "argosy"
    )


def test_the_highest_logit_decides_where_sigmoids_are_one() -> None:
    routing = RoutingSpec(num_experts=3, experts_per_token=1, scores="sigmoid")
    weights, experts = choose_experts(routing, torch.tensor([[20.0, 30.0, 25.0]]), None)
    assert (weights.tolist(), experts.tolist()) == ([[1.0]], [[1]])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer type 'sliding_attention'"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 4 layers"),
        ({"attention_chunk_size": None}, "attention_chunk_size is not set"),
        ({"attention_chunk_size": 0}, ">= 1"),
        ({"no_rope_layers": [1, 1]}, "2 no_rope_layers for 4 layers"),
        ({"floor_scale": 0}, ">= 1"),
        ({"attn_scale": 1e13}, "<= 1000000000000"),
        ({"num_experts_per_tok": 9}, "exceeds num_experts"),
    ],
)
def test_configs_of_llama_4_that_no_model_has_are_refused(fields: dict[str, Any], reason: str) -> None:
    raw = {**small_config("llama4_text").to_dict(), "architectures": ["Llama4ForCausalLM"], **fields}
    with pytest.raises(ConfigError, match=reason):
        parse_config(raw, {}, {}, "argosy")


def raw_config(model_type: str, **fields: Any) -> dict[str, Any]:
    """Return config.json of a small decoder."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return {**small_config(model_type).to_dict(), "architectures": [architecture], **fields}


@pytest.mark.parametrize(
    ("model_type", "name", "size"),
    [
        ("bamba", "mamba_expand", "hidden_size"),
        ("deepseek_v3", "n_shared_experts", "moe_intermediate_size"),
        ("dots1", "n_shared_experts", "moe_intermediate_size"),
        ("ernie4_5_moe", "moe_num_shared_experts", "moe_intermediate_size"),
        ("falcon_h1", "mamba_expand", "hidden_size"),
        ("glm4_moe", "n_shared_experts", "moe_intermediate_size"),
        ("granitemoehybrid", "mamba_expand", "hidden_size"),
        ("hy_v3", "num_shared_experts", "moe_intermediate_size"),
        ("solar_open", "n_shared_experts", "moe_intermediate_size"),
    ],
)
def test_a_text_is_not_repeated(model_type: str, name: str, size: str) -> None:
    """Until the memory is full."""
    raw = raw_config(model_type, **{name: "many", size: 1 << 50, "mamba_d_ssm": None})
    with pytest.raises(ConfigError, match="'many' is not a number"):
        parse_config(raw, {}, {}, "argosy")


@pytest.mark.parametrize(
    ("positions", "fields"),
    [
        ("many", {"rope_type": "linear"}),
        (512, {"rope_type": "yarn", "original_max_position_embeddings": "many"}),
    ],
)
def test_a_context_that_is_a_text_is_not_repeated(positions: Any, fields: dict[str, Any]) -> None:
    rope = {**fields, "factor": 1 << 50}
    with pytest.raises(ConfigError, match="'many' is not a number"):
        parse_config(raw_config("llama", max_position_embeddings=positions, rope_parameters=rope), {}, {})


def test_the_activation_of_gemma_is_ours_by_its_older_name_and_without_one() -> None:
    raw = raw_config("gemma")
    expected = parse_config(raw, {}, {}, "argosy")
    for fields in ({"hidden_act": "gelu"}, {"hidden_activation": "silu"}):  # the latter is Gemma 2's
        assert parse_config({**raw, **fields}, {}, {}, "argosy") == expected
    assert (
        parse_config({name: raw[name] for name in raw if name != "hidden_act"}, {}, {}, "argosy") == expected
    )


@pytest.mark.parametrize("name", ["n_group", "topk_group"])
@pytest.mark.parametrize("model_type", ["glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_zero_groups_of_experts_are_refused(model_type: str, name: str) -> None:
    with pytest.raises(ConfigError, match=">= 1"):
        parse_config(raw_config(model_type, **{name: 0}), {}, {})


@pytest.mark.parametrize("kinds", [["dense", "sparse", "sparse"], ["dense", "sparse", "sparse", "moe"]])
@pytest.mark.parametrize("model_type", ["glm4_moe_lite", "hy_v3"])
def test_types_of_mlps_that_no_model_has_are_refused(model_type: str, kinds: list[str]) -> None:
    with pytest.raises(ConfigError, match="mlp_layer_types must be dense or sparse for each of 4 layers"):
        parse_config(raw_config(model_type, mlp_layer_types=kinds), {}, {}, "argosy")


@pytest.mark.parametrize("value", [False, None, 0])
@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "gemma2", "gpt2", "llama", "opt", "phi", "qwen3_5_text"]
)
def test_attention_to_later_tokens_is_refused(model_type: str, value: Any) -> None:
    """For which transformers makes a mask of any decoder, whatever its modelling code."""
    with pytest.raises(ConfigError, match="is_causal"):
        parse_config(raw_config(model_type, is_causal=value), {}, {})
    parse_config(raw_config(model_type, is_causal=True), {}, {})


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("deepseek_v2", "mlp_bias"),
        ("deepseek_v3", "attention_bias"),
        ("deepseek_v3", "norm_topk_prob"),
        ("deepseek_v3", "rope_interleave"),
        ("ernie4_5", "use_bias"),
        ("glm4_moe", "use_qk_norm"),
        ("qwen2", "use_sliding_window"),
        ("qwen3", "attention_bias"),
        ("qwen3_next", "norm_topk_prob"),
        ("smollm3", "use_sliding_window"),
    ],
)
def test_a_word_is_neither_true_nor_false(model_type: str, name: str) -> None:
    """Not "false", above all. transformers refuses them, too."""
    with pytest.raises(ConfigError, match=rf"{name} 'false'|`bool`"):
        parse_config(raw_config(model_type, **{name: "false"}), {}, {}, "argosy")


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_a_head_that_is_not_what_is_rotated_is_refused(model_type: str) -> None:
    """transformers takes its frequencies from head_dim."""
    raw = raw_config(model_type)
    assert parse_config({**raw, "head_dim": raw["qk_rope_head_dim"]}, {}, {}) == parse_config(raw, {}, {})
    with pytest.raises(ConfigError, match="head_dim 2 is not qk_rope_head_dim 8"):
        parse_config({**raw, "head_dim": 2}, {}, {})


@pytest.mark.parametrize(
    ("model_type", "name", "alias"),
    [
        ("deepseek_v2", "n_routed_experts", "num_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
        ("hy_v3", "num_experts", "num_local_experts"),
    ],
)
def test_experts_may_be_counted_by_another_name(model_type: str, name: str, alias: str) -> None:
    """That of the config class' attribute map, which wins where both are given."""
    raw = raw_config(model_type)
    named = {each: value for each, value in raw.items() if each != name}
    assert parse_config({**named, alias: 8}, {}, {}) == parse_config(raw, {}, {})
    assert parse_config({**raw, alias: 16}, {}, {}).num_routed_experts == 16


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_dim": 23}, "only an even part of an even head"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320}}, "beta_fast"),
    ],
)
def test_rope_that_cannot_be_computed_is_refused_by_the_config_alone(
    fields: dict[str, Any], reason: str
) -> None:
    raw = {**small_config("glm4").to_dict(), "architectures": ["Glm4ForCausalLM"], **fields}
    with pytest.raises(ConfigError, match=reason):
        parse_config(raw, {}, {}, "argosy")


@pytest.mark.timeout(20)
def test_a_plan_takes_no_time_for_the_order_of_rows() -> None:
    """Sizes come from config.json alone until the plan is held against the checkpoint."""
    raw = small_config("glm4", num_attention_heads=4096, num_key_value_heads=4096, head_dim=2048).to_dict()
    raw |= {"num_hidden_layers": 8, "architectures": ["Glm4ForCausalLM"]}
    with torch.inference_mode():
        plan = plan_weights(parse_config(raw, {}, {}), torch.bfloat16)
    assert plan.shapes["model.layers.7.self_attn.q_proj.weight"] == (4096 * 2048, 64)


def test_tensors_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As ERNIE 4.5 calls them."""
    reference = write_checkpoint("ernie4_5_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    more = {
        "model.mtp_block.0.self_attn.q_proj.weight": torch.ones(96, 64),
        "model.mtp_emb_norm.0.weight": torch.ones(64),
        "model.mtp_hidden_norm.0.weight": torch.ones(64),
        "model.mtp_linear_proj.0.weight": torch.ones(64, 128),
    }
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")


_DIVIDED: list[tuple[str, dict[str, Any], bool]] = [
    (
        "cohere",
        {"use_qk_norm": True, "attention_bias": True, "num_key_value_heads": 2, "head_dim": 24},
        False,
    ),
    ("cohere2", {}, False),
    ("dots1", {**GROUPS, "attention_bias": True}, True),
    ("deepseek_v2", {"attention_bias": True, "mlp_bias": True}, False),
    ("deepseek_v3", {**GROUPS, **EXPANDED}, False),
    ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2}, True),
    ("ernie4_5", {"use_bias": True}, False),
    ("gemma", {"attention_bias": True}, False),
    ("gemma4_text", {**DENSE, "attention_bias": True}, False),
    ("gemma4_text", EXPERTS, False),
    ("gemma4_text", EXPERTS, True),
    ("gemma4_text", SHARED, False),
    ("glm4", {}, False),
    ("glm4_moe", {**GROUPS, "use_qk_norm": True}, False),
    ("gpt_oss", {}, False),
    ("gpt_oss", {}, True),
    ("granitemoe", MULTIPLIERS, False),
    ("granitemoe", MULTIPLIERS, True),
    ("helium", {"attention_bias": True, "mlp_bias": True}, False),
    ("hy_v3", {"attention_bias": True, "mlp_bias": True}, False),
    ("hy_v3", {"num_shared_experts": 2}, True),
    ("llama4_text", {"moe_layers": [0, 3], "attention_bias": True}, False),
    ("llama4_text", {"num_experts_per_tok": 1, "use_qk_norm": False}, True),
    ("minimax_m2", {"rotary_dim": 12}, False),
    ("minimax_m2", {}, True),
    ("ministral3", TEMPERATURE, False),
    ("olmo2", {"attention_bias": True}, False),
    ("phi3", PARTIAL_ROPE, False),
    ("qwen2_moe", {}, False),
    ("qwen2_moe", {}, True),
    ("qwen3_vl_moe", {"attention_bias": True}, False),
    ("qwen3_vl_moe", {"mlp_only_layers": [1]}, True),
    ("solar_open", {**GROUPS, "attention_bias": True}, False),
    ("solar_open", {"n_shared_experts": 2}, True),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}, False),
    ("starcoder2", {}, False),
]
"""Model types, fields of their configs, and whether experts stay whole."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("model_type", "fields", "has_whole_experts"),
    _DIVIDED,
    ids=[f"{each[0]}-{index}" for index, each in enumerate(_DIVIDED)],
)
def test_ranks_compute_what_one_process_computes(
    model_type: str, fields: dict[str, Any], has_whole_experts: bool, size: int, tmp_path: Path
) -> None:
    reference = write_checkpoint(model_type, tmp_path, **fields)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    assert expected.std(dim=0).mean() > 0.05, "the positions would not matter"
    ranks = run_threads(
        size, lambda group: logits_of(tmp_path, group, Sharding(group.rank, size, has_whole_experts))
    )
    torch.testing.assert_close(ranks[0], expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(ranks[0], other) for other in ranks[1:]), "ranks would sample different tokens"


@pytest.mark.parametrize(
    "model_type", sorted({each for each, _ in SHAPES} | {"llama", "mistral", "qwen3", "qwen3_moe"})
)
def test_a_missing_field_means_what_it_means_to_transformers(model_type: str) -> None:
    """Or the config is refused."""
    config_class = CONFIG_MAPPING[model_type]
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    num_compared = 0
    for config in (config_class(), small_config(model_type)):
        whole = config.to_dict()
        for name in whole:
            raw = {field: value for field, value in whole.items() if field != name}
            try:
                theirs = config_class.from_dict(raw).to_dict()
                ours = parse_config({**raw, "architectures": [architecture]}, {}, {}, "argosy")
            except Exception:  # of their validation, or our refusal
                continue
            expected = parse_config({**theirs, "architectures": [architecture]}, {}, {}, "argosy")
            expected = replace(expected, dtype=ours.dtype, eos_token_ids=ours.eos_token_ids)
            assert ours == expected, name
            num_compared += 1
    assert num_compared > 20


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "hy_v3", "minimax_m2", "solar_open"]
)
def test_routers_compute_in_float32_where_those_of_transformers_do(model_type: str, tmp_path: Path) -> None:
    """Of bfloat16's logits near each other another one may be the largest."""
    write_checkpoint(model_type, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    names = [name for name in stored if name.endswith("gate.weight")]
    loaded = load_model(
        tmp_path, load_model_config(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu"),
        attention_backend="torch", max_positions=64, load_format="auto", seed=0,
    )  # fmt: skip
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    routers = [each.mlp.router for each in loaded.model.layers if isinstance(each.mlp, SparseMLP)]  # type: ignore[attr-defined]
    assert len(routers) == len(names) > 0
    for name, router in zip(sorted(names), routers, strict=True):
        torch.testing.assert_close(router(x), x.float() @ stored[name].T, atol=1e-5, rtol=1e-5)
