"""Decoders with Mamba-2 layers by our own code: what their configs and checkpoints may say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy_engine.model_configs.mamba_config import MambaHybridConfig
from argosy_engine.models.config_file import load_model_config
from transformers_checkpoints import write_checkpoint
from transformers_sweep import served

SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("granitemoehybrid", {}),
    ("bamba", {}),
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("model_type", "fields"), SHAPES, ids=[f"{each}-{i}" for i, (each, _) in enumerate(SHAPES)]
)
def test_greedy_tokens_are_those_of_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    found = served(write_checkpoint(model_type, tmp_path, **fields), tmp_path, model_impl="argosy")
    assert found[:2] == ("served", "")
    assert found.cached_tokens
    assert isinstance(load_model_config(tmp_path), MambaHybridConfig)
