"""Selection of the files that are served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.selection import is_served_name, select
from argosy_fetcher.source import RemoteFile, Snapshot
from model_files import CONFIG, other_files, served_files

SMALL = {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}"}


def selected(files: dict[str, bytes], source: str = "hf://acme/tiny") -> list[str]:
    snapshot = Snapshot(source, "c0", tuple(RemoteFile(path, len(data)) for path, data in files.items()))
    return [file.path for file in select(snapshot, lambda file: files[file.path])]


def index(*names: Any) -> bytes:
    return json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(names)}}).encode()


def test_shards_of_the_index_are_selected_and_nothing_else() -> None:
    files = {
        **other_files(),
        **served_files(),
        "model.safetensors": b"a duplicate",
        "extra.safetensors": b"x",
    }
    assert set(selected(files)) == set(served_files())


def test_small_files_come_first() -> None:
    paths = selected(served_files())
    assert paths[0] == "config.json"
    assert [path.endswith(".safetensors") for path in paths] == [False] * 6 + [True] * 3


def test_shared_shards_are_selected_once() -> None:
    files = {
        **SMALL,
        "model.safetensors.index.json": index("a.safetensors", "a.safetensors"),
        "a.safetensors": b"",
    }
    assert selected(files).count("a.safetensors") == 1


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (["model.safetensors", "pytorch_model.bin", "consolidated.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "other.safetensors"], ["model.safetensors"]),
        (
            ["model.safetensors", "original/model.safetensors", "adapter_model.safetensors"],
            ["model.safetensors"],
        ),
    ],
)
def test_weights_without_an_index(weights: list[str], expected: list[str]) -> None:
    assert selected({**SMALL, **dict.fromkeys(weights, b"x")}) == [*SMALL, *expected]


@pytest.mark.parametrize(
    "name",
    [
        "tekken.json",
        "tokenizer.model",
        "tokenizer.model.v3",
        "tokenizer.model.v7m1",
        "tiktoken.model",
        "q.tiktoken",
    ],
)
def test_each_form_of_tokenizer_is_fetched(name: str) -> None:
    files = {"config.json": SMALL["config.json"], name: b"x", "model.safetensors": b"x"}
    assert sorted(selected(files)) == sorted(files)
    assert is_served_name(name)
    others = {f"old/{name}": b"x", f"{name}.bak": b"x"}
    assert sorted(selected({**SMALL, **files, **others})) == sorted({**SMALL, **files})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json; give a model in Hugging Face's layout"),
        (
            {"tiny/config.json": b"{}"},
            r"has no config.json, but 'tiny' has: download it \(hf download acme/tiny ",
        ),
        (
            {"tiny-q4.gguf": b""},
            "has no config.json; it has GGUF files, of which one is served; there are Q4: hf://acme/tiny:QUANT",
        ),
        ({"adapter_config.json": b"{}"}, "it is an adapter: serve the model that it adapts"),
        (
            {"config.json": b"{}", "model.safetensors": b""},
            r"has no tokenizer.json; write one with transformers",
        ),
        (
            {"config.json": b"{}", "model.safetensors": b"", "vocab.json": b"{}", "old/tekken.json": b"{}"},
            r"has no tokenizer.json; its vocabulary becomes one with transformers",
        ),
        (SMALL, "has no model.safetensors; the upload is incomplete"),
        (
            {**SMALL, "pytorch_model.bin": b"", "x.pt": b""},
            r"has no model.safetensors but \.bin, \.pt files; only safetensors are served.*use a revision",
        ),
        ({**SMALL, "consolidated.safetensors": b""}, "has no model.safetensors"),
        (
            {**SMALL, "model-00001-of-00002.safetensors": b"", "model-00002-of-00002.safetensors": b""},
            r"has no model.safetensors and no model.safetensors.index.json .* its 2 safetensors files",
        ),
        (
            {**SMALL, "a.safetensors": b"", "adapter_model.safetensors": b"", "original/a.safetensors": b""},
            r"has no model.safetensors, only 'a.safetensors', .*rename it to model.safetensors",
        ),
        ({**SMALL, "model.safetensors.index.json": index("a.safetensors")}, "lacks a.safetensors"),
        ({**SMALL, "model.safetensors.index.json": b"{}"}, "has no weight_map"),
        ({**SMALL, "model.safetensors.index.json": b'{"weight_map": []}'}, "has no weight_map"),
        ({**SMALL, "model.safetensors.index.json": index(7)}, "names '7'"),
        ({**SMALL, "model.safetensors.index.json": index("sub/a.safetensors")}, "names 'sub/a.safetensors'"),
        ({**SMALL, "model.safetensors.index.json": index("pytorch_model.bin")}, "names 'pytorch_model.bin'"),
        ({**SMALL, "config.json": b"{"}, "config.json is not JSON"),
        ({**SMALL, "config.json": b"\xff\xfe"}, "config.json is not JSON"),
        ({**SMALL, "config.json": b"[]"}, "config.json is not a JSON object"),
        ({**SMALL, "config.json": b"[" * 100_000}, "config.json is not JSON"),
        ({**SMALL, "config.json": b'{"vocab_size": %s}' % (b"9" * 5000)}, "config.json is not JSON"),
    ],
)
def test_models_that_are_not_served_are_refused(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^hf://acme/tiny.*{message}"):
        selected(files)


@pytest.mark.parametrize(
    ("source", "folder", "incomplete"),
    [
        ("hf://acme/tiny", "serve DIRECTORY/FOLDER", "use another revision"),
        ("s3://bucket/acme?endpoint=http://x", "s3://bucket/acme/FOLDER", "upload all of it again"),
        ("oci://host/acme", "push that folder as the model", "use another tag"),
        ("https://host/acme/SHA256SUMS", "> SHA256SUMS), and give its URL", "upload all of it again"),
    ],
)
def test_a_remedy_is_one_that_the_source_allows(source: str, folder: str, incomplete: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        selected({"tiny/config.json": b"{}"}, source)
    assert str(refusal.value).endswith(folder)
    with pytest.raises(UnsupportedModel) as refusal:
        selected(SMALL, source)
    assert str(refusal.value).endswith(incomplete)


def test_a_config_with_infinities_is_accepted() -> None:
    files = {**SMALL, "config.json": b'{"time_step_limit": [0.0, Infinity]}', "model.safetensors": b"x"}
    assert "model.safetensors" in selected(files)


def test_served_names() -> None:
    assert all(map(is_served_name, served_files()))
    names = {path.rpartition("/")[2] for path in other_files()}
    assert not any(map(is_served_name, names))
