"""Decoders that differ from Llama by their configs: model types, with fields in which their models may differ."""

from __future__ import annotations

from typing import Any

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "rope_theta": 1e4}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
TEMPERATURE = {
    "rope_parameters": {
        **_YARN,
        "original_max_position_embeddings": 48,
        "llama_4_scaling_beta": 0.7,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
"""Of Ministral 3: queries that grow with their position."""
PARTIAL_ROPE = {
    "rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 1e4, "rope_type": "default"},
    "sliding_window": 20,
    "tie_word_embeddings": True,
    "hidden_size": 128,
}
"""Of Phi-3: a part of each head is rotated."""
_KINDS = ["sliding_attention", "full_attention"] * 2
LLAMA_SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"num_key_value_heads": 2}),
    ("cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False, "head_dim": 24,
                "logit_scale": 0.8, "num_key_value_heads": 2, "mlp_bias": True}),  # which it does not know
    ("cohere", {"rope_parameters": _YARN, "use_qk_norm": True, "layer_norm_eps": 0.01}),
    ("cohere2", {}),
    ("cohere2", {"layer_types": _KINDS, "attention_bias": True, "tie_word_embeddings": False, "head_dim": 24,
                 "logit_scale": 1.7}),
    ("cohere2", {"layer_types": ["full_attention"] * 4, "sliding_window": None, "num_key_value_heads": 2}),
    ("dots1", {}),
    ("dots1", {**GROUPS, "attention_bias": True, "norm_topk_prob": True, "n_shared_experts": 2}),
    ("dots1", {"max_window_layers": 2, "n_shared_experts": 1, "tie_word_embeddings": True}),
    ("ernie4_5", {}),
    ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False, "head_dim": 32}),
    ("ernie4_5_moe", {}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2}),
    ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 2, "moe_k": 5}),
    ("exaone4", {"sliding_window": 20, "layer_types": _KINDS}),
    ("exaone4", {"sliding_window": None, "tie_word_embeddings": True}),
    ("gemma", {}),
    ("gemma", {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 32, "rope_parameters": _YARN}),
    ("glm", {"attention_bias": False}),
    ("glm", {"head_dim": 32, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4}}),
    ("glm4", {}),
    ("glm4", {"tie_word_embeddings": True, "rope_parameters": {**_YARN, "partial_rotary_factor": 0.5}}),
    ("glm4_moe", {}),
    ("glm4_moe", {**GROUPS, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2}),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}}),
    ("gpt_oss", {}),
    ("gpt_oss", {"attention_bias": False, "num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 32}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 4, "rope_parameters": {**_YARN, "truncate": False}}),
    ("granite", MULTIPLIERS),
    ("granite", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("granitemoe", MULTIPLIERS),
    ("granitemoe", {"num_experts_per_tok": 1, "attention_bias": True}),
    ("helium", {}),
    ("helium", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("helium", {"rope_parameters": _YARN}),
    ("hy_v3", {}),
    ("hy_v3", {"attention_bias": True, "mlp_bias": True, "num_shared_experts": 2, "router_scaling_factor": 0.7,
               "tie_word_embeddings": True, "enable_moe_fp32_combine": False}),  # which rounds alike
    ("hy_v3", {"mlp_layer_types": ["sparse", "dense"] * 2, "num_shared_experts": 0, "num_experts_per_tok": 3,
               "head_dim": 32, "rope_parameters": _YARN}),
    ("llama4_text", {}),
    ("llama4_text", {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 80, "attention_bias": True,
                     "no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True, "num_experts_per_tok": 1,
                     "attention_chunk_size": 20}),
    ("llama4_text", {"moe_layers": [0, 3], "use_qk_norm": False, "attn_temperature_tuning": False, "head_dim": 32,
                     "rope_parameters": _LLAMA3, "attention_chunk_size": None, "layer_types": None}),
    ("llama4_text", {"moe_layers": [], "no_rope_layer_interval": 2, "layer_types": ["chunked_attention"] * 4,
                     "num_key_value_heads": 4, "mlp_bias": True}),  # which it does not know
    ("minimax_m2", {}),
    ("minimax_m2", {"rotary_dim": 12, "num_experts_per_tok": 4}),
    ("ministral3", TEMPERATURE),
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
    ("phi3", PARTIAL_ROPE),
    ("qwen2_moe", {}),
    ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False, "use_sliding_window": False}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "shared_expert_intermediate_size": 40}),
    ("seed_oss", {}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("stablelm", {}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, "tie_word_embeddings": True,
                  "layer_norm_eps": 0.01, "num_key_value_heads": 4}),
    ("stablelm", {"rope_parameters": {**_YARN, "partial_rotary_factor": 0.5}, "attention_bias": True,
                  "mlp_bias": True}),  # which it does not know
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False, "head_dim": 24, "sliding_window": 20,
                    "norm_epsilon": 0.01}),
    ("starcoder2", {"hidden_act": "gelu", "rope_parameters": _LLAMA3, "num_key_value_heads": 4}),
    ("smollm3", {}),
    ("smollm3", {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 20,
                 "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("solar_open", {}),
    ("solar_open", {**GROUPS, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2}),
    ("solar_open", {"tie_word_embeddings": True, "rope_parameters": _YARN, "num_experts_per_tok": 3,
                    "mlp_bias": True}),  # which it does not know
]  # fmt: skip
"""Model types, with fields of their configs besides those of `small_config`."""
