"""Shapes of Gemma 4's text part: each field that changes the computation, at least once."""

from __future__ import annotations

from typing import Any

DENSE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
"""As the 31B: global layers keep fewer elements per token than the others."""
EXPERTS: dict[str, Any] = {
    **DENSE,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 48,
}
"""As the 26B-A4B."""
SHARED: dict[str, Any] = {"global_head_dim": 48, "num_key_value_heads": 1, "use_double_wide_mlp": True}
"""As E2B: global layers keep more."""
_HALF = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e3, "factor": 2.0}
_LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e3}
GEMMA4_SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("gemma4_text", DENSE),
    ("gemma4_text", {**DENSE, "attention_bias": True, "tie_word_embeddings": False, "final_logit_softcapping": 2.0}),
    ("gemma4_text", {**DENSE, "attention_k_eq_v": False, "layer_types": None,
                     "rope_parameters": {"full_attention": _HALF, "sliding_attention": _LINEAR}}),
    ("gemma4_text", {**DENSE, "head_dim": 16, "num_global_key_value_heads": None,  # all keep as much
                     "per_layer_config": {1: {"num_key_value_heads": 1, "head_dim": 32},
                                          3: {"num_key_value_heads": 1, "head_dim": 32}}}),
    ("gemma4_text", {**DENSE, "layer_types": ["full_attention"] * 4, "use_bidirectional_attention": "vision",
                     "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e3,
                                                            "partial_rotary_factor": 0.5}}}),
    ("gemma4_text", EXPERTS),
    ("gemma4_text", {**EXPERTS, "attention_k_eq_v": False, "top_k_experts": 1, "num_experts_per_tok": 4}),
    ("gemma4_text", SHARED),
    ("gemma4_text", {**SHARED, "attention_k_eq_v": True, "num_kv_shared_layers": 1, "use_double_wide_mlp": False,
                     "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}),
    ("gemma4_text", {**EXPERTS, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}),
    ("gemma4_text", {**DENSE, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                     "use_double_wide_mlp": True}),
    ("gemma4_text", {**DENSE, "hidden_size_per_layer_input": 8}),
]  # fmt: skip
"""Model types, with fields of their configs besides those of `small_config`."""
