"""Folders of models with missing and damaged files: what `argosy doctor` says of them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from argosy_engine.api.doctor import main as doctor
from argosy_engine.checkpoint.model_folder import check_folder, resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.errors import ConfigError
from argosy_engine.frontend.async_llm import AsyncLLM

INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
NESTED = b'{"a":' + b"[" * 100_000
"""More lists within lists than a parser follows."""
NO_TEXT = b'{"\xff": 1}'


@pytest.fixture(params=["one file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tiny model, in one file or in three."""
    path = tmp_path / "tiny"
    shutil.copytree(resolve_model("builtin://tiny"), path, copy_function=shutil.copy)
    if request.param == "shards":
        tensors = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        names = sorted(tensors)
        weight_map = {}
        for number, shard in enumerate(SHARDS):
            part = {name: tensors[name] for name in names[number::3]}
            save_file(part, path / shard)
            weight_map |= dict.fromkeys(part, shard)
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def weights(folder: Path) -> Path:
    """The second shard, or the only file."""
    return sorted(folder.glob("*.safetensors"))[:2][-1]


def write_header(file: Path, header: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer.json; write one"),
    "only Mistral's tokenizer": (
        lambda path: (path / "tokenizer.json").rename(path / "tekken.json"),
        "tekken.json cannot be read by mistral-common",
    ),
    "empty tokenizer": (lambda path: cut(path / "tokenizer.json", 0), "tokenizer.json is damaged"),
    "cut tokenizer": (lambda path: cut(path / "tokenizer.json", 1000), "tokenizer.json is damaged"),
    "nested tokenizer": (
        lambda path: (path / "tokenizer.json").write_bytes(NESTED),
        "tokenizer.json is damaged",
    ),
    "tokenizer that is no text": (
        lambda path: (path / "tokenizer.json").write_bytes(NO_TEXT),
        "tokenizer.json is damaged",
    ),
    "huge tokenizer": (
        lambda path: os.truncate(path / "tokenizer.json", 100 << 30),
        "tokenizer.json has 107374182400 bytes, more than 268435456",
    ),
    "no weights": (lambda path: weights(path).unlink(), ".safetensors"),
    "empty weights": (lambda path: cut(weights(path), 0), "safetensors is cut off or damaged"),
    "cut header": (lambda path: cut(weights(path), 100), "safetensors is cut off or damaged"),
    "nested header": (
        lambda path: write_header(weights(path), NESTED),
        "safetensors is cut off or damaged",
    ),
    "header that is no text": (
        lambda path: write_header(weights(path), NO_TEXT),
        "safetensors is cut off or damaged",
    ),
    "cut weights": (lambda path: cut(weights(path), 100_000), "safetensors has 100000 bytes instead of "),
}


def test_a_whole_folder_is_fine(folder: Path) -> None:
    check_folder(folder)
    assert doctor([str(folder), "--device", "cpu"]) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_doctor_names_what_is_missing(fault: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = FAULTS[fault]
    name = weights(folder).name if "weights" in fault or "header" in fault else "tokenizer.json"
    damage(folder)
    assert doctor([str(folder), "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert name in captured.err
    assert message in captured.err


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("Qwen3ForCausalLM", "has no tokenizer.json"),
        ("T5ForConditionalGeneration", "T5For.* is not supported"),
    ],
)
async def test_a_server_reads_no_weights_without_a_tokenizer(
    architecture: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    started: list[object] = []

    async def start(*arguments: object, **_: object) -> None:
        started.append(arguments)
        raise ConfigError("the core was started")

    monkeypatch.setattr(AsyncMPClient, "start", start)
    with pytest.raises(ConfigError, match=message):
        await AsyncLLM.start(EngineArgs.of(model=str(folder), device="cpu"))
    assert started == []


def test_everything_that_is_missing_is_named_at_once(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    names = ["tokenizer.json", *(file.name for file in folder.glob("*.safetensors"))]
    for file in folder.glob("*.safetensors"):
        cut(file, 50_000)
    with pytest.raises(ConfigError) as refusal:
        check_folder(folder)
    assert all(name in str(refusal.value) for name in names)
    check_folder(folder, has_tokenizer=False, has_weights=False)


def test_a_shard_without_a_tensor_of_the_index_is_damaged(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / SHARDS[0])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[0]}}))
    with pytest.raises(ConfigError, match=r"00003\.safetensors lacks tensors that the index lists \(b\)"):
        check_folder(tmp_path, has_tokenizer=False)


def test_a_message_is_bounded(tmp_path: Path) -> None:
    weight_map = {f"layer.{number}": f"model-{number}.safetensors" for number in range(2000)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"; and 1994 more$") as refusal:
        check_folder(tmp_path, has_tokenizer=False)
    assert len(str(refusal.value)) < 1000


def test_names_of_tensors_cannot_move_the_cursor_nor_fill_the_screen(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / SHARDS[0])
    names = ["\x1b[2J\nb", "c" * 1000, "\ud800"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SHARDS[0])}))
    with pytest.raises(ConfigError) as refusal:
        check_folder(tmp_path, has_tokenizer=False)
    assert str(refusal.value).isprintable()
    assert "?[2J?b" in str(refusal.value)
    assert len(str(refusal.value)) < len(str(tmp_path)) + 400


@pytest.mark.parametrize(
    "name",
    ["\x1b[2J.safetensors", "\ud800.safetensors", "a" * 250 + ".safetensors", "é" * 125 + ".safetensors"],
)
def test_a_shard_whose_name_is_not_printable_or_too_long_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="with printable names of at most 255 bytes") as refusal:
        check_folder(tmp_path, has_tokenizer=False)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 2 * len(str(tmp_path)) + 400
