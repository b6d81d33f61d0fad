"""Shapes of decoders with Mamba-2 layers or short convolutions: each field that changes the computation, at least
once."""

from __future__ import annotations

from typing import Any

FALCON_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 2.5,
    "attention_in_multiplier": 0.6,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.4,
    "mlp_multipliers": [0.8, 0.2],
    "ssm_multipliers": [0.5, 2.0, 0.7, 1.3, 0.9],
}
"""Of Falcon-H1."""
MAMBA_SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "granitemoehybrid",
        {
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_heads": 32,  # of 4 elements, which torch computes
            "mamba_d_state": 10,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    (
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope", "num_key_value_heads": 4},
    ),
    (
        "granitemoehybrid",
        {"num_experts_per_tok": 3, "mamba_expand": 3, "mamba_n_heads": 6, "mamba_d_state": 32},
    ),
    ("bamba", {"mamba_d_conv": 2, "mamba_d_state": 24}),
    (
        "bamba",
        {
            "attn_layer_indices": [0, 1, 3],
            "mamba_n_groups": 4,
            "mlp_bias": True,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
    ),
    ("falcon_h1", {"mamba_n_groups": 2, "mamba_d_ssm": 128}),
    (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "mamba_d_ssm": None,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            **FALCON_FACTORS,
        },
    ),
    (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "ssm_multipliers": [0.5, 2.0, 0.7, 1.3, 0.9],
        },
    ),
)
NEMOTRON_SHAPES: tuple[dict[str, Any], ...] = (
    {
        "layers_block_type": ["mlp", "full_attention", "moe", "linear_attention", "linear_attention", "moe"],
        "use_bias": True,
        "mlp_bias": True,
        "attention_bias": True,  # which transformers ignores
        "n_groups": 2,
        "conv_kernel": 3,
        "routed_scaling_factor": 2.5,
        "num_key_value_heads": 4,
    },
    {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_latent_size": 40,
        "n_group": 1,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "use_conv_bias": False,
        "layer_norm_epsilon": 0.1,
    },
    {
        "layers_block_type": ["full_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 32,
        "mamba_head_dim": 4,  # which torch computes
        "ssm_state_size": 10,
        "mamba_proj_bias": True,
    },
)
"""Of Nemotron-H."""
LFM2_SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lfm2", {"block_multiple_of": 32, "conv_L_cache": 4}),
    (
        "lfm2",
        {
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "conv_L_cache": 2,
        },
    ),
    (
        "lfm2",
        {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "block_ffn_dim_multiplier": 0.7,
        },
    ),
    ("lfm2", {"layer_types": ["full_attention"] * 4, "norm_eps": 0.1}),
    ("lfm2_moe", {"num_experts_per_tok": 3, "conv_bias": True, "routed_scaling_factor": 1.7}),
    ("lfm2_moe", {"use_expert_bias": False, "num_dense_layers": 0, "tie_word_embeddings": False}),
    ("lfm2_moe", {"norm_topk_prob": False, "num_dense_layers": 2, "norm_eps": 0.1, "conv_L_cache": 4}),
    (
        "lfm2_moe",
        {
            "layer_types": ["full_attention"] * 4,
            "num_dense_layers": 4,
            "block_auto_adjust_ff_dim": True,  # which it does not know
        },
    ),
)
"""Of LFM2."""
