"""WeightReader: tensors of a safetensors checkpoint, single file or sharded, memory-mapped.

Safetensors is the only format: it cannot carry code. Every tensor is read when the model takes it, so peak memory is
the model plus one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from argosy_engine.errors import ConfigError
from argosy_engine.models.config import ModelConfig, read_json
from argosy_engine.models.layers import Linear


class WeightReader:
    """
    Raises (from every method):
        ConfigError: the checkpoint lacks a tensor, or a file is not safetensors.
    """

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.num_bytes = 0
        self._files = {name: path / file for name, file in _index(path).items()}
        self._open: dict[Path, safe_open] = {}
        for file in set(self._files.values()):
            self._open[file] = _open_file(file)

    def take(self, name: str) -> torch.Tensor:
        """The tensor, converted to the engine's dtype on its device."""
        file = self._files.get(name)
        if file is None:
            raise ConfigError(f"the checkpoint has no tensor {name!r}; is it of another architecture?")
        tensor = self._open[file].get_tensor(name).to(device=self.device, dtype=self.dtype)
        self.num_bytes += tensor.nbytes
        return tensor

    def linear(self, names: Sequence[str], bias: bool) -> Linear:
        """One projection, or several fused along their outputs."""
        weights = [self.take(name + ".weight") for name in names]
        biases = [self.take(name + ".bias") for name in names] if bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return Linear(weight, torch.cat(biases) if biases else None)


class DummyWeights(WeightReader):
    """Random weights of the right shapes, for benchmarks without a checkpoint."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype = dtype
        self.device = device
        self.num_bytes = 0
        self._shapes = _shapes(config)
        self._generator = torch.Generator().manual_seed(seed % (1 << 63))

    def take(self, name: str) -> torch.Tensor:
        kind = name.rsplit(".", 2)
        shape = self._shapes[name if name in self._shapes else ".".join(kind[-2:])]
        if len(shape) == 1:
            tensor = torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        else:
            tensor = torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5
        tensor = tensor.to(device=self.device, dtype=self.dtype)
        self.num_bytes += tensor.nbytes
        return tensor


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, q = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    inner = config.intermediate_size
    matrices = {
        "q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        "embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden),
    }  # fmt: skip
    vectors = {
        "input_layernorm": hidden, "post_attention_layernorm": hidden, "norm": hidden,
        "q_norm": config.head_dim, "k_norm": config.head_dim,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return shapes | {f"{name}.weight": (size,) for name, size in vectors.items()}


def _index(path: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or any("/" in str(file) for file in weight_map.values()):
            raise ConfigError(f"{index} is malformed")
        return weight_map
    if single.is_file():
        with _open_file(single) as file:
            return dict.fromkeys(file.keys(), single.name)
    raise ConfigError(f"{path} has no model.safetensors; other weight formats are not loaded")


def _open_file(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
