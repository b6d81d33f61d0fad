"""The built-in model with two of its layers and random weights, for engines whose kernels are interpreted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from argosy_engine.checkpoint.model_folder import resolve_model

NUM_LAYERS = 2


def write_shallow_model(path: Path) -> Path:
    """Write the config and the tokenizer to a new directory; load it with `load_format="dummy"`."""
    shutil.copytree(resolve_model("builtin://tiny"), path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "layer_types": config["layer_types"][:NUM_LAYERS]}
    config["max_window_layers"] = NUM_LAYERS
    (path / "config.json").write_text(json.dumps(config))
    return path
