"""Logits of one of the ranks that share a model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import msgspec
import torch

from argosy_engine.attention.selector import AttentionNeeds, select_backend
from argosy_engine.checkpoint.shards import checkpoint_elements
from argosy_engine.checkpoint.stored_tensors import with_stored_experts, with_stored_layers
from argosy_engine.model_configs.model_use import AS_IT_IS, ModelUse
from argosy_engine.model_configs.sharding import WHOLE, Sharding
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import complete_config, load_model, plan_weights
from attention_cases import bind_sequence, sequence_inputs
from thread_ranks import ThreadCommunicator

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TOKENS = random.Random(5).choices(range(2, 300), k=70)


def logits_of(
    path: Path,
    communicator: ThreadCommunicator | None = None,
    sharding: Sharding = WHOLE,
    load_format: Literal["auto", "dummy"] = "auto",
    use: ModelUse = AS_IT_IS,
) -> torch.Tensor:
    """Logits [T, vocab_size] of one sequence in two steps, as one rank gets them; states of a model that pools."""
    config = complete_config(load_model_config(path, use), sharding.size)
    own = [params.of_rank(sharding.size) for params in config.attention_layers]
    backend = select_backend(AttentionNeeds("cpu", "float32", BLOCK_SIZE, own))
    loaded = load_model(
        path,
        config,
        dtype=torch.float32,
        device=CPU,
        attention_backend=backend.name,
        max_positions=512,
        load_format=load_format,
        seed=3,
        sharding=sharding,
        communicator=communicator,
    )
    if not isinstance(config, TransformersConfig):  # whose names are not the checkpoint's
        planned = config
        if load_format == "dummy" and config.quantization is not None and not config.quantization.has_fp8:
            planned = msgspec.structs.replace(config, quantization=None)
        if load_format != "dummy":
            planned = with_stored_layers(with_stored_experts(path, config), checkpoint_elements(path))
        assert loaded.elements == plan_weights(planned, torch.float32, sharding).elements
    model, count = loaded.model, len(TOKENS)
    bind_sequence(model, count, BLOCK_SIZE)
    steps = []
    for start, stop in ((0, count - 1), (count - 1, count)):
        inputs = sequence_inputs(model, TOKENS[start:stop], start, count, BLOCK_SIZE)
        head = model.logits if config.pooling is None else model.last_hidden_state
        steps.append(head(model.forward(inputs)))
    return torch.cat(steps)
