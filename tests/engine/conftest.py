"""Checkpoints, engines and a server that several engine tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.structured import compile_queue
from engine_processes import worker_path
from processes import Server, free_port, running
from served_engine import SHARED, SHARED_ENV

compile_queue.PATIENCE = 5.0  # the machine also runs other tests

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2-bias": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False, "num_key_value_heads": 4}),
}


@pytest.fixture
def bare_workers() -> Iterator[None]:
    """Let the processes that a test starts have workers without a model. A private Ray passes it on to its own."""
    with worker_path(is_bare=True):
        yield


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (directory, reference model): a small random checkpoint in Hugging Face's layout."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def make(name: str) -> tuple[Path, torch.nn.Module]:
        if name not in made:
            config_class, model_class, extra = ARCHITECTURES[name]
            torch.manual_seed(7)
            model = model_class(config_class(**{**SHAPE, **extra})).eval()
            with torch.no_grad():
                for parameter in model.parameters():  # biases start at zero: give every parameter a say
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[name] = (path, model)
        return made[name]

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of the model that ships."""
    return Tokenizer(resolve_model("builtin://tiny"))


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    """The chat template of the model that ships."""
    loaded = ChatTemplate.load(resolve_model("builtin://tiny"))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The model that ships, served for tests that only send requests; see `served_engine`."""
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "log"
    with running([*SHARED, "--port", str(port)], log, port=port, env=SHARED_ENV) as up:
        yield up
