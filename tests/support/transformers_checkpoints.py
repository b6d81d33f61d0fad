"""Tiny random checkpoints of transformers' own config classes, for the model types that a decoder fleet meets."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from argosy_engine.checkpoint.model_folder import resolve_model

# fmt: off
MODEL_TYPES = (
    "apertus", "arcee", "bamba", "bitnet", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v4",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense",
    "hy_v3", "jetmoe", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "longcat_flash", "mamba",
    "mamba2", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "ministral3", "mistral", "mixtral",
    "modernbert-decoder", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
    "vaultgemma", "xglm", "zamba2",
)
# fmt: on

VOCAB_SIZE = 307
_LAYERS = 4
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "d_model": 64, "n_embd": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "moe_intermediate_size": 48, "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48, "intermediate_size_mlp": 96, "ffn_hidden_size": 96,
    "num_hidden_layers": _LAYERS, "num_layers": _LAYERS, "n_layer": _LAYERS, "n_layers": _LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24, "kv_channels": 16, "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_head_dim": 24, "sliding_window": 20, "attention_chunk_size": 48, "local_attention": 20,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 8,
    "zero_expert_num": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_mamba_kernels": False,
    "global_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "chunk_size": 32, "mamba_chunk_size": 32,
}  # fmt: skip
"""Values of fields, for the configs that have them."""
_OWN: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": [96] * _LAYERS,
                     "activation_sparsity_pattern": None, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    **{name: {"num_key_value_heads": 4, "head_dim": None}
       for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")},
    **{name: {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 20}
       for name in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 24},
    "llama4_text": {"layer_types": ["chunked_attention"] * 3 + ["full_attention"], "floor_scale": 16,
                    "attn_scale": 0.5},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 16},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3],
               "mamba_ngroups": 1, "n_mamba_heads": 8,
               "time_step_min": 1e-30, "time_step_floor": 0.05},  # as for Nemotron-H
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "falcon": {"num_kv_heads": 2},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_state": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 8,
                         "mamba_d_state": 16, "shared_intermediate_size": 48, "num_local_experts": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
                   "moe_shared_expert_intermediate_size": 80,
                   "time_step_min": 1e-30, "time_step_floor": 0.05},  # transformers' code then bounds no step size
    "kimi_linear": {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
                    "linear_head_dim": 16, "linear_num_heads": 4},
}  # fmt: skip


WRAPPER_TYPES = (
    *(
        "aria",
        "aya_vision",
        "cohere2_vision",
        "deepseek_vl",
        "ernie4_5_vl_moe",
        "exaone4_5",
        "gemma3",
        "gemma4",
    ),
    *("glm4v", "glm4v_moe", "glm_ocr", "got_ocr2", "idefics3", "internvl", "kimi_k25", "llama4", "llava"),
    *(
        "llava_next",
        "llava_onevision",
        "mistral3",
        "ovis2",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
    ),
    *("smolvlm", "video_llama_3", "paligemma", "qwen3_5", "qwen3_5_moe", "mllama"),
)
"""Model types with a text part in them."""
_SMALL_PART: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2,
    "num_attention_heads": 2, "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64,
    "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "num_position_embeddings": 16,
    "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1], "head_dim": 16,
}  # fmt: skip
"""Values of fields of what is beside the text part."""
_OWN_PART: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": 64},  # that of the text part
    "llama4": {"intermediate_size": 128},  # of four patches
    "gemma3": {"image_size": 84},
}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
_OWN_WRAPPER: dict[str, dict[str, Any]] = {
    **{name: {"image_grid_pinpoints": _PINPOINTS} for name in ("llava_next", "llava_onevision")},
    "aria": {"projector_patch_to_query_dict": {4: 3}},
    "gemma3": {"mm_tokens_per_image": 9, "tie_word_embeddings": False},  # tied, tokens repeat themselves
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}
_OWN_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
    "qwen2_5_vl": {"rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]}},
    "qwen3_vl": {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
    "qwen3_vl_moe": {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
    **{name: {"head_dim": 24, "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]}}
       for name in ("glm4v_moe", "glm_ocr")},
    **{name: {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                                  "mrope_section": [1, 1, 1]}} for name in ("qwen3_5", "qwen3_5_moe")},
    "ernie4_5_vl_moe": {"rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}},
    "glm4v": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
}  # fmt: skip
"""Fields of the text parts of wrappers, besides those of their model types."""


def small_wrapper_config(model_type: str, text_type: str | None = None, **text: Any) -> Any:
    """Return a small config of a model type with parts for images.

    Args:
        text_type: model type of the text part; None: the usual one.
        text: fields of the text part.
    """
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    parts: dict[str, Any] = {}
    for name in config_class.sub_configs:
        part = getattr(default, name)
        if part is default.get_text_config():
            own = {**_OWN_TEXT.get(model_type, {}), **text}
            if text_type is None:
                parts[name] = small_config(part.model_type, type(part), **own)
            else:
                parts[name] = small_config(text_type, **own)
        elif part is not None:
            known = part.to_dict()
            fields = {field: value for field, value in _SMALL_PART.items() if known.get(field) is not None}
            parts[name] = type(part)(**{**fields, **_OWN_PART.get(model_type, {})})
    known = default.to_dict()
    tokens = {
        name: 5 + index
        for index, name in enumerate(sorted(known))
        if name.endswith(("token_id", "token_index"))
    }
    sizes = {
        name: value for name, value in (("hidden_size", 64), ("vocab_size", VOCAB_SIZE)) if name in known
    }
    return config_class(**parts, **tokens, **sizes, **_OWN_WRAPPER.get(model_type, {}))


def small_config(model_type: str, config_class: Any = None, **own: Any) -> Any:
    """Return a small config of a model type."""
    config_class = config_class or CONFIG_MAPPING[model_type]
    known = inspect.signature(config_class.__init__).parameters.keys() | config_class().to_dict().keys()
    fields = {name: value for name, value in _SMALL.items() if name in known}
    default = config_class().to_dict()
    for name in ("q_lora_rank", "sliding_window", "head_dim"):
        if name in fields and default.get(name) is None:
            del fields[name]
    fields = {
        name: value for name, value in fields.items() if not isinstance(default.get(name), (list, dict))
    }
    fields |= _OWN.get(model_type, {}) | own
    return config_class(**{name: value for name, value in fields.items() if value is not None})


def architecture_of(model_type: str) -> str:
    """Return the name of transformers' class that generates text."""
    if model_type in WRAPPER_TYPES:
        return str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


QWEN3_5_TEMPLATE = """\
{%- set texts = namespace(system='') %}
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content %}
        {%- if 'image' in part or part.type == 'image_url' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- else %}{{- part.text }}{%- endif %}
    {%- endfor %}{%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n<function=example>\\n<parameter=a>\\nvalue\\n</parameter>\\n' }}
    {{- '</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ text_of(message.content) ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
"""
"""A chat template in the form of Qwen3.5's."""


def write_folder(model_type: str, path: Path) -> None:
    """Write a checkpoint with the tokenizer of the built-in model and a chat template in the form of Qwen3.5's."""
    built_in = resolve_model("builtin://tiny")
    write_checkpoint(model_type, path, vocab_size=1024, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_bytes((built_in / name).read_bytes())
    (path / "chat_template.jinja").write_text(QWEN3_5_TEMPLATE)


def write_checkpoint(
    model_type: str, path: Path, dtype: torch.dtype = torch.float32, **text: Any
) -> torch.nn.Module:
    """Write a checkpoint with random weights, norms, biases and sinks; return transformers' model of it, eager.

    Args:
        text: fields of the decoder's config.
    """
    torch.manual_seed(11)
    if model_type in WRAPPER_TYPES:
        config, auto_class = small_wrapper_config(model_type, **text), AutoModelForImageTextToText
    else:
        config, auto_class = small_config(model_type, **text), AutoModelForCausalLM
    model = auto_class.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                scale = 0.3 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(noise * scale)
            elif "norm" in name and "bias" not in name:
                parameter.add_(noise * 0.1)
            else:
                parameter.add_(noise * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)
    if dtype is not torch.float32:
        model = model.to(dtype)
    model = model.eval()
    model.save_pretrained(path, safe_serialization=True)
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw["architectures"] = [type(model).__name__]
    file.write_text(json.dumps(raw))
    if model_type == "llama4":  # in transformers 5.24 the whole model fails on texts
        return model.language_model
    return model
