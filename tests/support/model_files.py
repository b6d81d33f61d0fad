"""Files of a model as a hub has them: what is served, and what must not be fetched. The weights are random bytes."""

from __future__ import annotations

import json
import random

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512}


def served_files(*, num_shards: int = 3, shard_bytes: int = 1000, seed: int = 0) -> dict[str, bytes]:
    """Return the served files of a model, by path."""
    rng = random.Random(seed)
    names = [f"model-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]
    index = {"weight_map": {f"layers.{number}.weight": name for number, name in enumerate(names)}}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{name: rng.randbytes(shard_bytes + number) for number, name in enumerate(names)},
    }


def other_files() -> dict[str, bytes]:
    """Return files beside a model's that are not served."""
    return {
        ".gitattributes": b"*.safetensors filter=lfs",
        "README.md": b"# Tiny",
        "consolidated.safetensors": b"x" * 3000,
        "original/consolidated.00.pth": b"pickle",
        "pytorch_model.bin": b"pickle",
        "training_args.bin": b"pickle",
        "onnx/model.onnx": b"onnx",
        "model.py": b"import os",
    }
