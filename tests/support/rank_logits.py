"""Logits of one of the ranks that share a model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import torch

from argosy_engine.attention.selector import AttentionNeeds, select_backend
from argosy_engine.model_configs.sharding import WHOLE, Sharding
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model, plan_weights
from attention_cases import model_inputs
from thread_ranks import ThreadCommunicator

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TOKENS = random.Random(5).choices(range(2, 300), k=70)


def logits_of(
    path: Path,
    communicator: ThreadCommunicator | None = None,
    sharding: Sharding = WHOLE,
    load_format: Literal["auto", "dummy"] = "auto",
) -> torch.Tensor:
    """Logits [T, vocab_size] of one sequence in two steps, as one rank gets them."""
    config = load_model_config(path)
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
    assert loaded.elements == plan_weights(config, torch.float32, sharding).elements
    num_blocks = -(-len(TOKENS) // BLOCK_SIZE)
    for layer in loaded.model.attention_layers:
        layer.bind(torch.zeros(layer.kv_cache_shape(num_blocks, BLOCK_SIZE)))
    steps = []
    for start, stop in ((0, len(TOKENS) - 1), (len(TOKENS) - 1, len(TOKENS))):
        inputs = model_inputs(TOKENS[start:stop], start, torch.arange(num_blocks).unsqueeze(0), BLOCK_SIZE)
        steps.append(loaded.model.logits(loaded.model.forward(inputs)))
    return torch.cat(steps)
