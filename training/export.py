"""Write a trained network as a Hugging Face model folder (bfloat16), with tokenizer and template."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from network import Shape
from tokenizer import END, PAD

TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(folder: Path, shape: Shape, tensors: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Overwrite `folder`'s config, tokenizer, template and weights; other files in it stay."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    _write(
        folder / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": end,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": shape.intermediate_size,
            "layer_types": ["full_attention"] * shape.layers,
            "max_position_embeddings": shape.max_positions,
            "max_window_layers": shape.layers,
            "model_type": "qwen3",
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "pad_token_id": pad,
            "rms_norm_eps": shape.rms_eps,
            "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
            "rope_theta": shape.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": shape.vocab_size,
        },
    )
    _write(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad},
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "errors": "replace",
            "model_max_length": shape.max_positions,
            "pad_token": PAD,
            "split_special_tokens": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
