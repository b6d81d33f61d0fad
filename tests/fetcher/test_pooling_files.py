"""Files of sentence-transformers, one of which is in a folder, and configs without weights: fetched from every kind of
source."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from archives import packed
from argosy_fetcher.errors import AccessDenied
from argosy_fetcher.model_fetch import fetch_configs, fetch_model
from argosy_fetcher.pull import find_cached_model
from argosy_fetcher.retry import RetryPolicy
from argosy_fetcher.selection import MAX_SMALL_FILE_BYTES
from argosy_fetcher.source import Packing
from argosy_fetcher.store import Store
from argosy_fetcher.transfer import TransferSettings
from hub_server import HubServer
from hub_sources import MODEL
from model_files import other_files, served_files
from scripted_source import ScriptedSource, Stop

SETTINGS = TransferSettings(part_bytes=256, retry=RetryPolicy(wait=lambda event, seconds: None))
POOLING = {"modules.json": b"[]", "1_Pooling/config.json": b'{"pooling_mode_lasttoken": true}'}
OTHERS = {
    "1_Pooling/model.py": b"import os",
    "2_Dense/config.json": b"{}",
    "2_Dense/model.safetensors": b"x",
    "Pooling/config.json": b"{}",
    "a/1_Pooling/config.json": b"{}",
}
SERVED = {**served_files(), **POOLING}
FILES = {**other_files(), **SERVED, **OTHERS}


def files_below(path: Path) -> dict[str, bytes]:
    found = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in found.items() if not name.startswith(".argosy")}


def test_a_model_has_the_file_in_its_folder(tmp_path: Path) -> None:
    store, source = Store(tmp_path), ScriptedSource(FILES)
    model = fetch_model(source, store, settings=SETTINGS)
    assert files_below(model.path) == SERVED
    assert source.paths_read() == set(SERVED)
    again = ScriptedSource(FILES)
    assert fetch_model(again, store, settings=SETTINGS) == model
    assert not again.reads
    (model.path / "1_Pooling" / "config.json").unlink()
    assert fetch_model(again, store, settings=SETTINGS) == model
    assert files_below(model.path) == SERVED
    (stored,) = store.list()
    assert stored.size == sum(map(len, SERVED.values()))


def test_an_interrupted_fetch_continues(tmp_path: Path) -> None:
    source = ScriptedSource(FILES)
    source.on_read = lambda read: Stop(0, AccessDenied("no")) if read.path.endswith(".safetensors") else None
    with pytest.raises(AccessDenied):
        fetch_model(source, Store(tmp_path), settings=SETTINGS)
    source.on_read = lambda read: None
    assert files_below(fetch_model(source, Store(tmp_path), settings=SETTINGS).path) == SERVED


@pytest.mark.parametrize("packing", ["tar+gzip", "tar+zstd"])
@pytest.mark.parametrize("folder", ["", "tiny/"])
def test_an_archive_has_it_as_well(packing: Packing, folder: str, tmp_path: Path) -> None:
    files = {f"{folder}{path}": content for path, content in FILES.items()}
    source = ScriptedSource(
        {"model.archive": packed(files, packing)}, name="oci://host/tiny", packing={"model.archive": packing}
    )
    assert files_below(fetch_model(source, Store(tmp_path), settings=SETTINGS).path) == SERVED


def test_configs_without_weights(tmp_path: Path) -> None:
    fetch_configs(ScriptedSource(FILES), tmp_path)
    assert files_below(tmp_path).items() >= POOLING.items()


def test_a_tokenizer_may_be_larger_than_what_is_read_to_choose_files(tmp_path: Path) -> None:
    large = {"tekken.json": b"x" * (MAX_SMALL_FILE_BYTES + 1)}
    fetch_configs(ScriptedSource({**FILES, **large}), tmp_path)
    assert files_below(tmp_path).items() >= large.items()


def test_hugging_faces_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with HubServer() as hub:
        hub.add_model(MODEL, SERVED)
        for path in SERVED:
            hf_hub_download(MODEL, path, cache_dir=tmp_path, endpoint=hub.endpoint, token=False)
        model = find_cached_model(tmp_path, MODEL, "main")
    assert model is not None
    assert model.size == sum(map(len, SERVED.values()))
