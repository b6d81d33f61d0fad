"""Files that Hugging Face's own cache on this machine already has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from argosy_fetcher.source import RemoteFile
from hub_server import HubServer
from hub_sources import MODEL, file_of, hub_source

FILES = {"config.json": b'{"a": 1}', "model.safetensors": b"weights" * 1000}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with HubServer() as hub:
        hub.add_model(MODEL, FILES)
        yield hub


def fill(hub: HubServer, cache: Path) -> None:
    for path in FILES:
        hf_hub_download(MODEL, path, cache_dir=cache, endpoint=hub.endpoint, token=False)


def test_files_of_the_cache_are_found_by_their_hashes(hub: HubServer, tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    fill(hub, cache)
    for credentials in ({"HF_HUB_CACHE": str(cache)}, {"HF_HOME": str(tmp_path)}):
        source = hub_source(hub, **credentials)
        for file in source.snapshot().files:
            found = source.local_copy(file)
            assert found is not None
            assert not found.is_symlink()
            assert found.read_bytes() == FILES[file.path]


def test_files_that_the_cache_lacks_are_not_found(hub: HubServer, tmp_path: Path) -> None:
    fill(hub, tmp_path)
    source = hub_source(hub, HF_HUB_CACHE=str(tmp_path))
    config = file_of(source.snapshot(), "config.json")
    found = source.local_copy(config)
    assert found is not None
    assert source.local_copy(RemoteFile("config.json", config.size, config.digest, "e" * 40)) is None
    assert source.local_copy(RemoteFile("config.json", config.size)) is None
    assert hub_source(hub, HF_HUB_CACHE=str(tmp_path / "none")).local_copy(config) is None
    assert hub_source(hub, "org/other", HF_HUB_CACHE=str(tmp_path)).local_copy(config) is None
    with found.open("ab") as file:
        file.write(b"!")
    assert source.local_copy(config) is None


def test_what_is_no_regular_file_is_not_taken(hub: HubServer, tmp_path: Path) -> None:
    source = hub_source(hub, HF_HUB_CACHE=str(tmp_path))
    config = file_of(source.snapshot(), "config.json")
    blob = tmp_path / "models--org--model" / "blobs" / config.version
    blob.mkdir(parents=True)
    assert source.local_copy(config) is None
    blob.rmdir()
    blob.symlink_to(blob)
    assert source.local_copy(config) is None
    blob.unlink()
    blob.symlink_to(tmp_path / "none")
    assert source.local_copy(config) is None


def test_a_blob_that_models_share_is_found_through_its_link(hub: HubServer, tmp_path: Path) -> None:
    source = hub_source(hub, HF_HUB_CACHE=str(tmp_path))
    config = file_of(source.snapshot(), "config.json")
    shared = tmp_path / "blobs" / "ab" / "shared"
    shared.parent.mkdir(parents=True)
    shared.write_bytes(FILES["config.json"])
    blob = tmp_path / "models--org--model" / "blobs" / config.version
    blob.parent.mkdir(parents=True)
    blob.symlink_to(shared)
    assert source.local_copy(config) == shared.resolve()
