"""Models of Hugging Face's own cache on a machine that makes no request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from argosy_fetcher.errors import Offline
from argosy_fetcher.progress import Progress
from argosy_fetcher.pull import PulledModel, find_cached_model, find_model, pull_model
from argosy_fetcher.source_uri import parse
from hub_server import HubServer
from hub_sources import MODEL
from model_files import other_files, served_files

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with HubServer() as hub:
        hub.add_model(MODEL, {**served_files(), **other_files()})
        yield hub


@pytest.fixture
def folder(hub: HubServer, tmp_path: Path) -> Path:
    """The repository's folder in a cache that huggingface_hub has filled."""
    snapshot_download(MODEL, cache_dir=tmp_path / "hub", endpoint=hub.endpoint, token=False)
    return tmp_path / "hub" / "models--org--model"


def pull(tmp_path: Path, uri: str = f"hf://{MODEL}", **settings: str) -> PulledModel:
    environment = {"ARGOSY_MODELS_DIR": str(tmp_path / "store"), "HF_HOME": str(tmp_path), **settings}
    return pull_model(parse(uri), progress=Progress(), environment={"HF_HUB_OFFLINE": "1", **environment})


def test_a_complete_model_is_served_where_it_is(folder: Path, tmp_path: Path) -> None:
    commit = (folder / "refs" / "main").read_text()
    for uri in (f"hf://{MODEL}", f"hf://{MODEL}@main", f"hf://{MODEL}@{commit}"):
        with closing(pull(tmp_path, uri)) as model:
            assert (model.path, model.revision) == (folder / "snapshots" / commit, commit)
            assert {name: (model.path / name).read_bytes() for name in served_files()} == served_files()
    assert not (tmp_path / "store").exists()
    assert (folder / "snapshots" / commit / SHARD).exists()


def test_with_requests_the_cache_is_no_store(folder: Path, tmp_path: Path) -> None:
    environment = {"ARGOSY_MODELS_DIR": str(tmp_path / "store"), "HF_HOME": str(tmp_path)}
    assert find_model(parse(f"hf://{MODEL}"), environment=environment) is None
    assert find_model(parse(f"hf://{MODEL}"), environment={**environment, "ARGOSY_OFFLINE": "1"}) is not None


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARD])
def test_an_incomplete_model_is_not_served(folder: Path, tmp_path: Path, name: str) -> None:
    (link,) = folder.glob(f"snapshots/*/{name}")
    link.resolve().unlink()  # the link stays
    with pytest.raises(Offline, match="is not in the model store"):
        pull(tmp_path)


def test_links_must_not_leave_the_repository_s_folder(folder: Path, tmp_path: Path) -> None:
    (link,) = folder.glob("snapshots/*/config.json")
    elsewhere = tmp_path / "hub" / "config.json"
    link.resolve().rename(elsewhere)
    link.unlink()
    link.symlink_to(elsewhere)
    with pytest.raises(Offline):
        pull(tmp_path)
    elsewhere.replace(folder / "blobs" / "moved")
    link.unlink()
    link.symlink_to(folder / "blobs" / "moved")
    pull(tmp_path).close()


@pytest.mark.parametrize("ref", ["", "../../x", "g" * 40, "a" * 40])
def test_a_revision_that_the_cache_does_not_have_is_not_served(
    folder: Path, tmp_path: Path, ref: str
) -> None:
    (folder / "refs" / "main").write_text(ref)
    with pytest.raises(Offline):
        pull(tmp_path)
    with pytest.raises(Offline):
        pull(tmp_path, f"hf://{MODEL}@v2")


def test_loops_of_links_are_no_models(folder: Path, tmp_path: Path) -> None:
    (link,) = folder.glob("snapshots/*/config.json")
    link.unlink()
    link.symlink_to(link)
    assert find_cached_model(tmp_path / "hub", MODEL, "") is None
    os.rename(folder, tmp_path / "hub" / "other")
    folder.symlink_to(folder)
    assert find_cached_model(tmp_path / "hub", MODEL, "") is None
