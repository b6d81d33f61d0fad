"""Write the page of model types: `python -m model_types FILE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import MODEL_MAPPING

from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.transformers_config import EncoderConfig, TransformersConfig
from argosy_engine.models.config_file import parse_config
from argosy_engine.models.loader import complete_config
from encoder_checkpoints import ENCODER_TYPES, encoder_config
from transformers_checkpoints import (
    MODEL_TYPES,
    WRAPPER_TYPES,
    architecture_of,
    small_config,
    small_wrapper_config,
)

_HEAD = """\
# Model types

What an engine makes of each `model_type` in config.json. Tests hold a small random checkpoint of each against
transformers' greedy tokens: in batches, in chunks over the prefix cache, and preempted; or, of an encoder, against its
vectors. *argosy* is the engine's own code, with FP8, tensor, expert and pipeline parallelism, pooling
and every attention backend that can compute the layers; *transformers* is [transformers' modelling
code](../supported-models.md#other-architectures) over the same KV cache, with tensor parallelism by its plans where it
has one, and [pooling](../pooling.md) but of models for images. Attention is over all tokens, a window or chunks, or
over their latents, as the tests' configs ask for; other configs of a type may ask for less or more. Kimi K2's type,
`kimi_k2`, counts as `deepseek_v3`. Encoders embed, classify and rerank; they have a row for the architecture without a
head. What a family lacks of this is told
in [models](../supported-models.md#what-an-engine-loads).

| `model_type` | architecture | code | layers |
|---|---|---|---|
"""


def row_of(model_type: str) -> str:
    """Return the line of the table for a model type."""
    if model_type in ENCODER_TYPES:
        return _encoder_row(model_type)
    is_wrapper = model_type in WRAPPER_TYPES
    small = small_wrapper_config(model_type) if is_wrapper else small_config(model_type)
    architecture = architecture_of(model_type)
    try:
        config = complete_config(parse_config({**small.to_dict(), "architectures": [architecture]}, {}, {}))
    except ConfigError as error:
        reason = str(error).partition(": ")[2].partition("; serve another")[0].partition(" (")[0]
        return f"| `{model_type}` | `{architecture}` | refused: {reason} | |"
    code = "transformers" if isinstance(config, TransformersConfig) else "argosy"
    return f"| `{model_type}` | `{architecture}` | {code} | {', '.join(_kept(config))} |"


def _encoder_row(model_type: str) -> str:
    small = encoder_config(model_type)
    classes: Any = MODEL_MAPPING
    architecture = classes[type(small)].__name__
    config = complete_config(parse_config({**small.to_dict(), "architectures": [architecture]}, {}, {}))
    assert isinstance(config, EncoderConfig)
    kinds = {"all tokens" if window is None else "a window on both sides" for window in config.windows}
    layers = ", ".join(sorted(kinds)) or "as transformers computes it, prompt by prompt"
    return f"| `{model_type}` | `{architecture}` | transformers, encoder | {layers} |"


def _kept(config: ModelConfig) -> Iterator[str]:
    layers = [layer for layer in config.attention_layers if isinstance(layer, AttentionParams)]
    if len(layers) < len(config.attention_layers):
        yield "latents"
    if any(layer.sliding_window is None and layer.chunk_size is None for layer in layers):
        yield "all tokens"
    if any(layer.sliding_window is not None for layer in layers):
        yield "a window"
    if any(layer.chunk_size is not None for layer in layers):
        yield "chunks"
    if config.state_layers:
        yield "states"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m model_types", description=__doc__)
    parser.add_argument("file", type=Path)
    file: Any = parser.parse_args(argv).file
    rows = [row_of(model_type) for model_type in (*MODEL_TYPES, *WRAPPER_TYPES, *ENCODER_TYPES)]
    file.write_text(_HEAD + "\n".join(rows) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
