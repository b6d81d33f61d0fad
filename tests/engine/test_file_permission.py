"""Models whose files the engine's user may not read: what is said of them, and what helps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from argosy_engine.checkpoint.model_folder import check_folder, resolve_model
from argosy_engine.checkpoint.weights import SafetensorsWeights
from argosy_engine.errors import ConfigError
from argosy_engine.models.config_file import load_model_config
from unprivileged import reachable_folder, unprivileged

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder() -> Iterator[Path]:
    with reachable_folder() as parent:
        path = parent / "tiny"
        shutil.copytree(resolve_model("builtin://tiny"), path, copy_function=shutil.copy)
        yield path
        path.chmod(0o755)


def refusal(folder: Path) -> str:
    """What a load says as another user."""

    def load() -> None:
        path = resolve_model(str(folder))
        load_model_config(path)
        SafetensorsWeights(path, torch.float32, torch.device("cpu"), prefix="model.")

    with unprivileged(), pytest.raises(ConfigError) as raised:
        load()
    return str(raised.value)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_load_says_which_file_may_not_be_read_and_what_helps(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    told = refusal(folder)
    assert f"cannot read {folder / name}: permission denied to user" in told
    assert f"chmod -R a+rX {folder}" in told
    assert "damaged" not in told


def test_a_folder_that_may_not_be_entered_is_told(folder: Path) -> None:
    folder.chmod(0)
    assert "permission denied to user" in refusal(folder)


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_the_check_of_a_folder_tells_permission_from_damage(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    with unprivileged(), pytest.raises(ConfigError) as raised:
        check_folder(folder)
    assert f"{name}: permission denied to user" in str(raised.value)
    assert "damaged" not in str(raised.value)
