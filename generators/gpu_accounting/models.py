"""The published configs whose steps are counted, as far as the engine reads them."""

from __future__ import annotations

from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 151936,
    "eos_token_id": 151645,
}

_PLAIN: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        "eos_token_id": 128001,
    },
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Gemma-3-12B": {
        "architectures": ["Gemma3ForCausalLM"],
        "dtype": "bfloat16",
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "max_position_embeddings": 131072,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
        "eos_token_id": 1,
    },
}
_FP8_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
_FP8_PER_TOKEN = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_FP8_BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_FP8_BITS, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
_FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}

MODELS: dict[str, dict[str, Any]] = {
    **_PLAIN,
    "Qwen3-8B-FP8-dynamic": {**_PLAIN["Qwen3-8B"], "quantization_config": _FP8_PER_TOKEN},
    "Qwen3-30B-A3B-FP8-dynamic": {**_PLAIN["Qwen3-30B-A3B"], "quantization_config": _FP8_PER_TOKEN},
    "Meta-Llama-3-8B-Instruct-FP8": {**_PLAIN["Llama-3-8B"], "quantization_config": _FP8_STATIC},
}
"""config.json by name. Source: the repositories of these names on Hugging Face; of Gemma the text part. FP8: of weights
with a scale per channel and activations with one per token; of both with the checkpoint's scale per tensor."""

PERIODS = {"Gemma-3-12B": 6}
"""Number of layers after which the kinds of layers repeat, where it is not 1."""
