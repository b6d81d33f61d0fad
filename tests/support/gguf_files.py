"""GGUF files of transformers' models, written as llama.cpp's convert_hf_to_gguf.py writes them, and the models with the
weights that the files then have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

TINY = Path(__file__).parents[2] / "models" / "argosy-tiny"
_BLOCK_BYTES = {Type.Q4_K: 144, Type.Q5_K: 176, Type.Q6_K: 210}

_DENSE: dict[str, Any] = {
    "vocab_size": 1018,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_GEMMA = {
    **_DENSE,
    "num_hidden_layers": 7,
    "head_dim": 32,
    "sliding_window": 24,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_DENSE, "tie_word_embeddings": False}),
    "llama with scaled rotation": ("Llama", {**_DENSE, "head_dim": 32, "rope_parameters": _LLAMA3}),
    "llama of large blocks": ("Llama", {**_DENSE, "hidden_size": 256, "intermediate_size": 512}),
    "mixtral": ("Mixtral", {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {**_DENSE, "tie_word_embeddings": True}),
    "qwen3": (
        "Qwen3",
        {
            **_DENSE,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen2moe": ("Qwen2Moe", {**_DENSE, **_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3moe": ("Qwen3Moe", {**_DENSE, **_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3Text", _GEMMA),
    "phi3": ("Phi3", {**_DENSE, "tie_word_embeddings": False}),
}
_MODELS = {"Gemma3Text": "Gemma3ForCausalLM"}
_ARCHITECTURES = {"Mixtral": "llama", "Gemma3Text": "gemma3"}

_NAMES = [
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"blk.\1.attn_norm"),
    (r"model\.layers\.(\d+)\.self_attn\.(q|k|v|qkv)_proj", r"blk.\1.attn_\2"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blk.\1.attn_output"),
    (r"model\.layers\.(\d+)\.self_attn\.(q|k)_norm", r"blk.\1.attn_\2_norm"),
    (r"model\.layers\.(\d+)\.pre_feedforward_layernorm", r"blk.\1.ffn_norm"),
    (r"model\.layers\.(\d+)\.post_feedforward_layernorm", r"blk.\1.post_ffw_norm"),
    (r"model\.layers\.(\d+)\.mlp\.gate_up_proj", r"blk.\1.ffn_up"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj", r"blk.\1.ffn_\2"),
    (r"model\.layers\.(\d+)\.mlp\.shared_expert\.(gate|up|down)_proj", r"blk.\1.ffn_\2_shexp"),
    (r"model\.layers\.(\d+)\.mlp\.shared_expert_gate", r"blk.\1.ffn_gate_inp_shexp"),
    (r"model\.layers\.(\d+)\.mlp\.gate", r"blk.\1.ffn_gate_inp"),
]


def make_gguf(
    path: Path, kind: str, type_: Type, *, changes: dict[str, Any] | None = None, part_tensors: int = 0
) -> torch.nn.Module:
    """Write a GGUF file with random weights, and return the model with the weights that the file has.

    Args:
        type_: of matrices; norms and biases are F32.
        changes: keys that are set otherwise, or left out (None).
        part_tensors: of each part but the last, whose names begin with that of the file without its end; 0: one file.
    """
    torch.manual_seed(3)
    name, fields = CONFIGS[kind]
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, _MODELS.get(name, f"{name}ForCausalLM"))(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 0.1)
        if parameter.ndim == 1 and not name.startswith("Gemma"):
            parameter.data += 1
    architecture = _ARCHITECTURES.get(name, name.lower())
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    add_tokenizer(writer)
    values = {**_keys(architecture, config), "tokenizer.ggml.add_bos_token": False, **(changes or {})}
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    rng = np.random.default_rng(4)
    with torch.no_grad():
        for parameter_name, tensor in model.state_dict().items():
            _add(writer, architecture, config, parameter_name, tensor, type_, rng)
    if kind == "llama with scaled rotation":
        factors = model.model.rotary_emb.inv_freq
        plain = 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
        writer.add_tensor("rope_freqs.weight", (plain / factors).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _keys(architecture: str, config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    if architecture == "gemma3":
        rope = rope["full_attention"]
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        keys["rope.dimension_count"] = head_dim
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if architecture.startswith("gemma"):
        keys["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        keys["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if (experts := getattr(config, "num_local_experts", getattr(config, "num_experts", None))) is not None:
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if architecture in ("qwen2moe", "qwen3moe"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    by_id = special | {id_: token for token, id_ in tokenizer["model"]["vocab"].items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([by_id[id_] for id_ in range(len(by_id))])
    writer.add_token_types([3 if id_ in special else 1 for id_ in range(len(by_id))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 0)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    )


def _add(
    writer: gguf.GGUFWriter,
    architecture: str,
    config: Any,
    name: str,
    tensor: torch.Tensor,
    type_: Type,
    rng: np.random.Generator,
) -> None:
    """Add a parameter, and set it to what was stored."""
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return
    if (found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name)) is not None:
        layer, part = found.groups()
        parts = (
            {"down": tensor}
            if part == "down"
            else dict(zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True))
        )
        for each, stacked in parts.items():
            stored = _stored(writer, f"blk.{layer}.ffn_{each}_exps.weight", stacked.numpy(), type_, rng)
            stacked.copy_(torch.from_numpy(stored))
        return
    stem, _, kind = name.rpartition(".")
    for pattern, to in _names(architecture):
        if re.fullmatch(pattern, stem):
            stem = re.sub(pattern, to, stem)
            break
    else:
        raise AssertionError(f"no name for {name}")
    values = tensor.numpy().copy()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        stem.rpartition(".")[2]
    )
    is_permuted = architecture == "llama" and heads is not None
    if is_permuted:
        assert heads is not None
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and "norm" in stem:
        values = values + 1
    if stem.endswith("ffn_gate_inp_shexp"):
        values = values[0]
    is_plain = values.ndim < 2 or stem.endswith("ffn_gate_inp")
    stored = _stored(writer, f"{stem}.{kind}", values, Type.F32 if is_plain else type_, rng)
    if is_permuted:
        stored = stored.reshape(heads, -1, 2, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
    if architecture.startswith("gemma") and "norm" in stem:
        stored = stored - 1
    tensor.copy_(torch.from_numpy(np.ascontiguousarray(stored)).reshape(tensor.shape))


def _names(architecture: str) -> list[tuple[str, str]]:
    after = r"model\.layers\.(\d+)\.post_attention_layernorm"
    return [
        (after, r"blk.\1.post_attention_norm" if architecture.startswith("gemma") else r"blk.\1.ffn_norm"),
        *_NAMES,
    ]


def _stored(
    writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], type_: Type, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Add a tensor, and return what the file has of it, by the formats' definitions in ggml-quants.c."""
    values = np.ascontiguousarray(values, np.float32)
    if type_ in _BLOCK_BYTES:
        raw = _random_blocks(values.shape, type_, rng)
        writer.add_tensor(name, raw, raw_dtype=type_)
        return gguf.dequantize(raw, type_)
    if type_ == Type.F32:
        writer.add_tensor(name, values)
        return values
    writer.add_tensor(name, gguf.quantize(values, type_), raw_dtype=type_)
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    if type_ == Type.Q8_0:
        scale = np.abs(blocks).max(-1, keepdims=True) / 127
        numbers = _rounded(blocks / np.where(scale == 0, 1, scale))
    else:
        assert type_ == Type.Q4_0
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
        scale = largest / -8
        numbers = np.trunc(blocks / np.where(scale == 0, 1, scale) + np.float32(8.5)).clip(0, 15) - 8
    return (numbers * scale.astype(np.float16).astype(np.float32)).reshape(values.shape).astype(np.float32)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.trunc(values + np.copysign(np.float32(0.5), values))


def _random_blocks(shape: tuple[int, ...], type_: Type, rng: np.random.Generator) -> NDArray[np.uint8]:
    size = _BLOCK_BYTES[type_]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), np.uint8)
    scale = np.array([0.0007], np.float16).view(np.uint8)
    if type_ == Type.Q6_K:
        raw[..., -2:] = scale
    else:
        raw[..., 0:2], raw[..., 2:4] = scale, scale
    return raw.reshape(*shape[:-1], -1)
