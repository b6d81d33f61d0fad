"""Shapes of decoders with multi-head latent attention: model types, and fields of their configs."""

from __future__ import annotations

from typing import Any

from llama_shapes import GROUPS

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
EXPANDED = {"kv_lora_rank": 48}
"""Latents of which prompts compute keys and values for each head."""
DEEPSEEK_SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {}),
    ("deepseek_v2", {**GROUPS, **EXPANDED, "topk_method": "group_limited_greedy", "attention_bias": True,
                     "mlp_bias": True, "n_shared_experts": 2}),
    ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 4,
                     "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {**GROUPS, **EXPANDED, "attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 40, "n_group": 1,
                     "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    ("deepseek_v3", {**EXPANDED, "first_k_dense_replace": 2, "rope_parameters": {**_YARN, "mscale_all_dim": 1.0}}),
    ("glm4_moe_lite", {}),
    ("glm4_moe_lite", {**GROUPS, "mlp_layer_types": ["sparse", "dense"] * 2, "qk_rope_head_dim": 16}),
]  # fmt: skip
"""With fields besides those of `small_config`."""
