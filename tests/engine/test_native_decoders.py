"""Decoders of our own code have transformers' greedy tokens in the shapes that their configs allow: batched, in chunks
over a prefix cache, and preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.models.config_file import parse_config
from rank_logits import TOKENS, logits_of
from thread_ranks import run_threads
from transformers_checkpoints import small_config, write_checkpoint
from transformers_sweep import served

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}
_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
_KINDS = ["sliding_attention", "full_attention"] * 2
_EXPANDED = {"kv_lora_rank": 48}
"""Latents of which prompts compute keys and values for each head."""
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("dots1", {}),
    ("dots1", {**_GROUPS, "attention_bias": True, "norm_topk_prob": True, "n_shared_experts": 2}),
    ("dots1", {"max_window_layers": 2, "n_shared_experts": 1, "tie_word_embeddings": True}),
    ("ernie4_5", {}),
    ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False, "head_dim": 32}),
    ("ernie4_5_moe", {}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2}),
    ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 2, "moe_k": 5}),
    ("exaone4", {"sliding_window": 20, "layer_types": _KINDS}),
    ("exaone4", {"sliding_window": None, "tie_word_embeddings": True}),
    ("glm", {"attention_bias": False}),
    ("glm", {"head_dim": 32, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4}}),
    ("glm4", {}),
    ("glm4", {"tie_word_embeddings": True, "rope_parameters": {**_YARN, "partial_rotary_factor": 0.5}}),
    ("glm4_moe", {}),
    ("glm4_moe", {**_GROUPS, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2}),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}}),
    ("gpt_oss", {}),
    ("gpt_oss", {"attention_bias": False, "num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 32}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 4, "rope_parameters": {**_YARN, "truncate": False}}),
    ("granite", _MULTIPLIERS),
    ("granite", {**_MULTIPLIERS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("granitemoe", _MULTIPLIERS),
    ("granitemoe", {"num_experts_per_tok": 1, "attention_bias": True}),
    ("minimax_m2", {}),
    ("minimax_m2", {"rotary_dim": 12, "num_experts_per_tok": 4}),
    ("ministral3", {"rope_parameters": {**_YARN, "original_max_position_embeddings": 48, "llama_4_scaling_beta": 0.7,
                                        "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("ministral3", {"sliding_window": 20}),
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 20, "num_experts_per_tok": 3, "tie_word_embeddings": True, "head_dim": 20}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("olmo3", {}),
    ("olmo3", {"attention_bias": True,
               "rope_parameters": {"full_attention": _YARN,
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
    ("olmoe", {}),
    ("olmoe", {"norm_topk_prob": True, "attention_bias": True, "num_experts_per_tok": 8}),
    ("phi3", {}),
    ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4, "rope_type": "default"},
              "sliding_window": 20, "tie_word_embeddings": True, "hidden_size": 128}),
    ("qwen2_moe", {}),
    ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False, "use_sliding_window": False}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "shared_expert_intermediate_size": 40}),
    ("seed_oss", {}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("deepseek_v2", {}),
    ("deepseek_v2", {**_GROUPS, **_EXPANDED, "topk_method": "group_limited_greedy", "attention_bias": True,
                     "mlp_bias": True, "n_shared_experts": 2}),
    ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 4,
                     "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {**_GROUPS, **_EXPANDED, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 40, "n_group": 1,
                     "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    ("deepseek_v3", {**_EXPANDED, "first_k_dense_replace": 2, "rope_parameters": {**_YARN, "mscale_all_dim": 1.0}}),
    ("glm4_moe_lite", {}),
    ("glm4_moe_lite", {**_GROUPS, "mlp_layer_types": ["sparse", "dense"] * 2, "qk_rope_head_dim": 16}),
    ("smollm3", {}),
    ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 20,
                 "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
]  # fmt: skip
"""Model types, with fields of their configs besides those of `small_config`."""


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


_DIVIDED: list[tuple[str, dict[str, Any], bool]] = [
    ("dots1", {**_GROUPS, "attention_bias": True}, True),
    ("deepseek_v2", {"attention_bias": True, "mlp_bias": True}, False),
    ("deepseek_v3", {**_GROUPS, **_EXPANDED}, False),
    ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2}, True),
    ("ernie4_5", {"use_bias": True}, False),
    ("glm4", {}, False),
    ("glm4_moe", {**_GROUPS, "use_qk_norm": True}, False),
    ("gpt_oss", {}, False),
    ("gpt_oss", {}, True),
    ("granitemoe", _MULTIPLIERS, False),
    ("granitemoe", _MULTIPLIERS, True),
    ("minimax_m2", {"rotary_dim": 12}, False),
    ("minimax_m2", {}, True),
    ("ministral3", SHAPES[26][1], False),
    ("olmo2", {"attention_bias": True}, False),
    ("phi3", SHAPES[37][1], False),
    ("qwen2_moe", {}, False),
    ("qwen2_moe", {}, True),
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
