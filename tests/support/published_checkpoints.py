"""Small random checkpoints in the layout in which hubs publish real ones.

Unlike `random_checkpoints`, whose files transformers writes, these have the config.json, the names and dtypes of
tensors, the tokenizer's files, the shards, and the files beside them that the repositories named here have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from small_tokenizers import byte_fallback_tokenizer

Shapes = dict[str, tuple[int, ...]]

_TEXT = [
    "The sea was calm and the lantern hung by the door.",
    "Once upon a time there was a small red house.",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "transformers_version": "4.51.0",
    "use_cache": True,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class PublishedCheckpoint:
    """
    Attributes:
        shapes: computes each tensor's shape, by its published name, from the config.
        shards: number of safetensors files; with one there is no index.
        unserved: files of the repository that an engine does not need.
        tokenizer_files: names of the tokenizer's files beside tokenizer.json and tokenizer_config.json.
    """

    repo_id: str
    config: Mapping[str, Any]
    shapes: Callable[[Mapping[str, Any]], Shapes]
    dtype: torch.dtype
    shards: int = 1
    unserved: tuple[str, ...] = ()
    tokenizer_files: tuple[str, ...] = ()
    generation_config: Mapping[str, Any] | None = None
    has_byte_fallback: bool = False

    def write(self, folder: Path) -> None:
        """Write the repository's files to an empty directory."""
        _write_json(folder / "config.json", self.config)
        if self.generation_config is not None:
            _write_json(folder / "generation_config.json", self.generation_config)
        _write_tokenizer(folder, self)
        tensors = _random_tensors(self.shapes(self.config), self.dtype)
        if self.config.get("tie_word_embeddings") and "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        _write_tensors(folder, tensors, self.shards)
        for name in self.unserved:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(f"{name} of {self.repo_id}: not to be fetched\n".encode() * 50)


def _decoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Gemma 3."""
    kind, hidden = config["model_type"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes |= _mlp_shapes(prefix + "mlp.", config)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if kind == "gemma3_text":
            shapes[prefix + "post_feedforward_layernorm.weight"] = (hidden,)
            shapes[prefix + "pre_feedforward_layernorm.weight"] = (hidden,)
        attention = prefix + "self_attn."
        for name, size in (("q", query), ("k", key), ("v", key)):
            shapes[f"{attention}{name}_proj.weight"] = (size, hidden)
            if kind == "qwen2":
                shapes[f"{attention}{name}_proj.bias"] = (size,)
            if name in "qk" and kind in ("qwen3", "qwen3_moe", "gemma3_text"):
                shapes[f"{attention}{name}_norm.weight"] = (head_dim,)
        shapes[attention + "o_proj.weight"] = (hidden, query)
    shapes["model.norm.weight"] = (hidden,)
    if kind == "qwen3" or not config.get("tie_word_embeddings", kind == "gemma3_text"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)  # Qwen3-0.6B stores the tied head too
    return shapes


def _mlp_shapes(prefix: str, config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    if config["model_type"] != "qwen3_moe":
        return _gated_shapes(prefix, hidden, config["intermediate_size"])
    shapes: Shapes = {prefix + "gate.weight": (config["num_experts"], hidden)}
    for index in range(config["num_experts"]):
        shapes |= _gated_shapes(f"{prefix}experts.{index}.", hidden, config["moe_intermediate_size"])
    return shapes


def _gated_shapes(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        prefix + "down_proj.weight": (hidden, inner),
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
    }


def _gpt2_shapes(config: Mapping[str, Any]) -> Shapes:
    """GPT-2 was saved from the base model, so that names lack a prefix, and with its causal masks."""
    hidden, positions = config["n_embd"], config["n_ctx"]
    shapes: Shapes = {"wte.weight": (config["vocab_size"], hidden), "wpe.weight": (positions, hidden)}
    for index in range(config["n_layer"]):
        prefix = f"h.{index}."
        shapes[prefix + "attn.bias"] = (1, 1, positions, positions)
        for name, sizes in (
            ("attn.c_attn", (hidden, 3 * hidden)),
            ("attn.c_proj", (hidden, hidden)),
            ("mlp.c_fc", (hidden, 4 * hidden)),
            ("mlp.c_proj", (4 * hidden, hidden)),
        ):
            shapes |= {f"{prefix}{name}.weight": sizes, f"{prefix}{name}.bias": sizes[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{prefix}{name}.weight": (hidden,), f"{prefix}{name}.bias": (hidden,)}
    return shapes | {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}


def _opt_shapes(config: Mapping[str, Any]) -> Shapes:
    """OPT was saved from the base model: names begin with `decoder.`, and the tied head is left out."""
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    shapes: Shapes = {
        "decoder.embed_tokens.weight": (config["vocab_size"], config["word_embed_proj_dim"]),
        "decoder.embed_positions.weight": (config["max_position_embeddings"] + 2, hidden),
        "decoder.final_layer_norm.weight": (hidden,),
        "decoder.final_layer_norm.bias": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"decoder.layers.{index}."
        for name, sizes in (
            ("self_attn.k_proj", (hidden, hidden)),
            ("self_attn.v_proj", (hidden, hidden)),
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.out_proj", (hidden, hidden)),
            ("self_attn_layer_norm", (hidden,)),
            ("fc1", (inner, hidden)),
            ("fc2", (hidden, inner)),
            ("final_layer_norm", (hidden,)),
        ):
            shapes |= {f"{prefix}{name}.weight": sizes, f"{prefix}{name}.bias": sizes[:1]}
    return shapes


PUBLISHED = {
    "llama": PublishedCheckpoint(
        "meta-llama/Llama-3.2-1B",
        {
            **_COMMON,
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        _decoder_shapes,
        torch.bfloat16,
        unserved=(
            ".gitattributes",
            "LICENSE.txt",
            "README.md",
            "USE_POLICY.md",
            "original/consolidated.00.pth",
            "original/params.json",
            "original/tokenizer.model",
        ),
        tokenizer_files=("special_tokens_map.json",),
        generation_config={
            "bos_token_id": 1,
            "do_sample": True,
            "eos_token_id": [2, 3],
            "temperature": 0.6,
            "top_p": 0.9,
            "transformers_version": "4.45.0.dev0",
        },
    ),
    "qwen2": PublishedCheckpoint(
        "Qwen/Qwen2.5-7B-Instruct",
        {
            **_COMMON,
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
        },
        _decoder_shapes,
        torch.bfloat16,
        shards=4,
        unserved=(".gitattributes", "LICENSE", "README.md"),
        tokenizer_files=("merges.txt", "vocab.json"),
        generation_config={"bos_token_id": 0, "do_sample": True, "eos_token_id": [2, 0], "top_k": 20},
    ),
    "qwen3": PublishedCheckpoint(
        "Qwen/Qwen3-0.6B",
        {
            **_COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
        },
        _decoder_shapes,
        torch.bfloat16,
        unserved=(".gitattributes", "LICENSE", "README.md"),
        tokenizer_files=("merges.txt", "vocab.json"),
        generation_config={"bos_token_id": 0, "do_sample": True, "eos_token_id": [2, 0], "top_k": 20},
    ),
    "qwen3-moe": PublishedCheckpoint(
        "Qwen/Qwen3-30B-A3B",
        {
            **_COMMON,
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "decoder_sparse_step": 1,
            "eos_token_id": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
        },
        _decoder_shapes,
        torch.bfloat16,
        shards=3,
        unserved=(".gitattributes", "LICENSE", "README.md"),
        tokenizer_files=("merges.txt", "vocab.json"),
        generation_config={"bos_token_id": 0, "do_sample": True, "eos_token_id": [2, 0], "top_k": 20},
    ),
    "gemma3": PublishedCheckpoint(
        "google/gemma-3-1b-it",
        {
            **_COMMON,
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "bos_token_id": 1,
            "cache_implementation": "hybrid",
            "eos_token_id": [2, 3],
            "final_logit_softcapping": None,
            "head_dim": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 32,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 32,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
        },
        _decoder_shapes,
        torch.bfloat16,
        unserved=(".gitattributes", "README.md"),
        tokenizer_files=("added_tokens.json", "special_tokens_map.json", "tokenizer.model"),
        generation_config={
            "bos_token_id": 1,
            "cache_implementation": "hybrid",
            "do_sample": True,
            "eos_token_id": [2, 3],
            "pad_token_id": 0,
            "top_k": 64,
            "top_p": 0.95,
        },
        has_byte_fallback=True,
    ),
    "mistral": PublishedCheckpoint(
        "mistralai/Mistral-7B-v0.3",
        {
            **_COMMON,
            "architectures": ["MistralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        _decoder_shapes,
        torch.bfloat16,
        shards=3,
        unserved=(
            ".gitattributes",
            "README.md",
            "consolidated.safetensors",
            "params.json",
            "tokenizer.model.v3",
        ),
        tokenizer_files=("special_tokens_map.json", "tokenizer.model"),
        generation_config={"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.42.0.dev0"},
        has_byte_fallback=True,
    ),
    "gpt2": PublishedCheckpoint(
        "openai-community/gpt2",
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 0,
            "embd_pdrop": 0.1,
            "eos_token_id": 0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 128,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 128,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 512,
        },
        _gpt2_shapes,
        torch.float32,
        unserved=(
            ".gitattributes",
            "64.tflite",
            "README.md",
            "flax_model.msgpack",
            "onnx/decoder_model.onnx",
            "pytorch_model.bin",
            "rust_model.ot",
            "tf_model.h5",
        ),
        tokenizer_files=("merges.txt", "vocab.json"),
        generation_config={"bos_token_id": 0, "eos_token_id": 0, "transformers_version": "4.26.0.dev0"},
    ),
    "opt": PublishedCheckpoint(
        "facebook/opt-125m",
        {
            "_name_or_path": "opt-125m",
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "eos_token_id": 2,
            "ffn_dim": 128,
            "hidden_size": 64,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 126,
            "model_type": "opt",
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "pad_token_id": 1,
            "prefix": "</s>",
            "torch_dtype": "float16",
            "transformers_version": "4.21.0.dev0",
            "use_cache": True,
            "vocab_size": 512,
            "word_embed_proj_dim": 64,
        },
        _opt_shapes,
        torch.float16,
        unserved=(
            ".gitattributes",
            "LICENSE.md",
            "README.md",
            "flax_model.msgpack",
            "pytorch_model.bin",
            "tf_model.h5",
        ),
        tokenizer_files=("merges.txt", "special_tokens_map.json", "vocab.json"),
        generation_config={
            "_from_model_config": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
    ),
}


def _random_tensors(shapes: Shapes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Draw tensors at whose scale the best logits differ clearly and every tensor matters."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 4:
            noise = torch.tril(torch.ones(shape))
        elif len(shape) == 1:
            noise = noise * 0.05 + float("norm" in name or ".ln_" in f".{name}") * (not name.endswith("bias"))
        else:
            is_table = any(part in name for part in ("embed", "wte", "wpe"))
            noise *= (0.4 if is_table else 2.0) * shape[-1] ** -0.5
        tensors[name] = noise.to(dtype)
    return tensors


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    per_shard = math.ceil(len(tensors) / shards)
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[index * per_shard : (index + 1) * per_shard]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index_file)


def _write_tokenizer(folder: Path, checkpoint: PublishedCheckpoint) -> None:
    tokenizer = byte_fallback_tokenizer() if checkpoint.has_byte_fallback else _byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"model_max_length": 1024, "tokenizer_class": "PreTrainedTokenizerFast"}
    if not checkpoint.has_byte_fallback:
        config |= {"eos_token": "<|im_end|>", "chat_template": _CHAT_TEMPLATE}
    _write_json(folder / "tokenizer_config.json", config)
    contents = {
        "added_tokens.json": {"<image_soft_token>": 511},
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        "vocab.json": tokenizer.get_vocab(with_added_tokens=False),
    }
    for name in checkpoint.tokenizer_files:
        if name in contents:
            _write_json(folder / name, contents[name])
        elif name == "merges.txt":
            merges = json.loads(tokenizer.to_str())["model"]["merges"]
            (folder / name).write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]))
        else:
            (folder / name).write_bytes(b"\n\x0e\n\x05<unk>" * 20)  # SentencePiece's, which no engine reads


def _byte_level_tokenizer() -> Tokenizer:
    """Build a tokenizer like GPT-2's, with the control tokens of chats as ids 0 to 3."""
    special = [
        AddedToken(text, special=True, normalized=False)
        for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom_id|>")
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
