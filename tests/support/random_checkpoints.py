"""Small random checkpoints of every architecture, in Hugging Face's layout, with transformers' model as the reference.

The weights have a variance at which the best logits differ clearly and every parameter affects them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA = {**_COMMON, "intermediate_size": 128, "num_key_value_heads": 2}
_GPT2: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_MOE = {
    **_LLAMA,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "tie_word_embeddings": False,
}
_HYBRID = {
    **_MOE,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 32,
}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
_GEMMA = {**_LLAMA, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 24}
_MLA = {
    **_COMMON,
    "intermediate_size": 128,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}


@dataclass(frozen=True, slots=True)
class Kind:
    """Describes one checkpoint.

    Attributes:
        matters: changes of config.json that must change the logits, which shows that the model reads these fields.
        tolerance: of logits. The triangular systems that transformers solves in float32 round more than our rule does.
    """

    config: str
    model: str
    fields: dict[str, Any]
    matters: tuple[dict[str, Any], ...] = ()
    is_sharded: bool = False
    reference: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4


KINDS = {
    "llama": Kind("LlamaConfig", "LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": False}),
    "llama3-rope": Kind(
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_LLAMA, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3, "head_dim": 32},
        (
            {"rope_parameters": {**_LLAMA3, "factor": 5.0}},
            {"rope_parameters": {**_LLAMA3, "low_freq_factor": 2.0}},
        ),
        is_sharded=True,
    ),
    "llama-linear-rope": Kind(
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},),
    ),
    "qwen3-yarn": Kind(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**_LLAMA, "head_dim": 32, "rope_parameters": _YARN},
        (
            {"rope_parameters": {**_YARN, "beta_fast": 8.0}},
            {"rope_parameters": {**_YARN, "attention_factor": 1.0}},
        ),
    ),
    "mistral-window": Kind(
        "MistralConfig",
        "MistralForCausalLM",
        {**_LLAMA, "sliding_window": 24},
        ({"sliding_window": 25}, {"sliding_window": None}),
    ),
    "qwen2-window": Kind(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
        ({"layer_types": ["full_attention"] * 4}, {"use_sliding_window": False}),
        is_sharded=True,
    ),
    "gpt2": Kind(
        "GPT2Config",
        "GPT2LMHeadModel",
        _GPT2,
        ({"activation_function": "relu"}, {"scale_attn_weights": False}),
    ),
    "gpt2-by-layer": Kind(
        "GPT2Config",
        "GPT2LMHeadModel",
        {**_GPT2, "n_inner": 96, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
        ({"scale_attn_by_inverse_layer_idx": False},),
        is_sharded=True,
    ),
    "opt": Kind("OPTConfig", "OPTForCausalLM", {**_COMMON, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "opt-post-norm": Kind(
        "OPTConfig",
        "OPTForCausalLM",
        {
            **_COMMON,
            "ffn_dim": 128,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
            "enable_bias": False,
        },
        is_sharded=True,
    ),
    "qwen3-moe": Kind(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_MOE, "norm_topk_prob": True},
        ({"norm_topk_prob": False}, {"num_experts_per_tok": 3}),
        is_sharded=True,
    ),
    "qwen3-moe-mixed": Kind(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True},
    ),
    "deepseek-v2": Kind(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **_MLA,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "attention_bias": True,
        },
        ({"topk_group": 3}, {"topk_method": "greedy"}, {"routed_scaling_factor": 2.0}),
    ),
    "deepseek-v3": Kind(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_MLA,
            "first_k_dense_replace": 2,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
        (
            {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            {"rope_interleave": False},
            {"norm_topk_prob": False},
            {"topk_group": 2},
        ),
        is_sharded=True,
    ),
    "glm4-moe-lite": Kind(
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**_MLA, "qk_rope_head_dim": 16, "v_head_dim": 24},
        ({"routed_scaling_factor": 1.0},),
    ),
    "qwen3-next": Kind(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_HYBRID, "mlp_only_layers": [1], "attention_bias": True, "rope_parameters": _PARTIAL_ROPE},
        (
            {"norm_topk_prob": False},
            {"rope_parameters": {**_PARTIAL_ROPE, "partial_rotary_factor": 0.5}},
            {"num_experts_per_tok": 3},
        ),
        is_sharded=True,
        tolerance=1e-3,
    ),
    "qwen3.5": Kind(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {**_HYBRID, "rope_parameters": _PARTIAL_ROPE, "tie_word_embeddings": True},
        ({"rope_parameters": {**_PARTIAL_ROPE, "rope_theta": 100.0}}, {"rms_norm_eps": 0.1}),
        tolerance=1e-3,
    ),
    "qwen3.5-moe": Kind(
        "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _HYBRID, is_sharded=True, tolerance=1e-3
    ),
    "gemma3": Kind(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
            },
        },
        ({"sliding_window": 25}, {"query_pre_attn_scalar": 32}, {"final_logit_softcapping": None}),
    ),
    "gemma": Kind(  # with fields that the family does not know
        "GemmaConfig",
        "GemmaForCausalLM",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
        ({"rms_norm_eps": 0.5},),
    ),
    "gemma2": Kind(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
        ({"attn_logit_softcapping": None}, {"sliding_window": 25}),
        reference={"attn_implementation": "eager"},  # SDPA has no soft cap
    ),
}


def make_checkpoint(kind: Kind, path: Path) -> torch.nn.Module:
    """Write the checkpoint to `path` and return the reference model."""
    config = getattr(transformers, kind.config)(**kind.fields)
    generator = torch.Generator().manual_seed(7)
    model = getattr(transformers, kind.model)._from_config(config, **kind.reference).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):  # at random, and up to where nothing is left of a state
                parameter.copy_(noise)
            elif parameter.ndim == 1:
                parameter.add_(noise * 0.05)
            else:
                # Small embeddings: with a large tied embedding the model would only repeat its input.
                is_table = "embed" in name or "wte" in name or "wpe" in name
                parameter.copy_(noise * (0.4 if is_table else 2.0) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(path, **({"max_shard_size": "100KB"} if kind.is_sharded else {}))
    return model
