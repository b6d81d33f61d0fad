"""Models that come as archives: fetched, unpacked, and complete or absent."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from archives import packed, tar_of
from argosy_fetcher.errors import FetchError, HashMismatch, UnsupportedModel
from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.retry import RetryPolicy
from argosy_fetcher.source import Packing
from argosy_fetcher.store import Store
from argosy_fetcher.transfer import TransferSettings
from model_files import CONFIG, other_files, served_files
from recorded_progress import RecordedProgress
from scripted_source import Read, ScriptedSource, Stop

SETTINGS = TransferSettings(part_bytes=1000, retry=RetryPolicy(wait=lambda event, seconds: None))
NAME = "oci://registry.acme/tiny"


def published(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".argosy")}


def archived(files: dict[str, bytes], packing: Packing = "tar+gzip") -> ScriptedSource:
    return ScriptedSource(
        {"model.archive": packed(files, packing)}, name=NAME, packing={"model.archive": packing}
    )


@pytest.mark.parametrize("packing", ["tar", "tar+gzip", "tar+zstd"])
def test_an_archive_is_unpacked_and_deleted(tmp_path: Path, packing: Packing) -> None:
    files = {f"tiny/{path}": content for path, content in {**other_files(), **served_files()}.items()}
    source, progress = archived(files, packing), RecordedProgress()
    model = fetch_model(source, Store(tmp_path), progress=progress, settings=SETTINGS)
    assert published(model.path) == served_files()
    assert not list(model.path.rglob("*archive*"))
    assert not [path for path in model.path.iterdir() if path.is_dir()]
    assert progress.events == ["resolved", "begin", "end"]
    assert progress.phases == ["resolving", "unpacking"]
    assert progress.received == progress.total == source.num_bytes
    assert Store(tmp_path).list()[0].size == sum(map(len, served_files().values()))


def test_layers_and_plain_files_make_one_model(tmp_path: Path) -> None:
    files = served_files()
    small = {f"models/{path}": content for path, content in files.items() if len(content) < 500}
    weights = {f"models/{path}": content for path, content in files.items() if f"models/{path}" not in small}
    source = ScriptedSource(
        {
            "layer-0": tar_of(
                {"etc/passwd": b"root", "models/config.json": b"old", "models/pytorch_model.bin": b""}
            ),
            "models/config.json": small.pop("models/config.json"),
            "layer-1": packed(small, "tar+gzip"),
            "layer-2": tar_of(weights),
            "models/README.md": b"not fetched",
        },
        name=NAME,
        packing={"layer-0": "tar", "layer-1": "tar+gzip", "layer-2": "tar"},
    )
    model = fetch_model(source, Store(tmp_path), settings=SETTINGS)
    assert published(model.path) == files
    assert "models/README.md" not in source.paths_read()


def test_an_interrupted_archive_is_continued(tmp_path: Path) -> None:
    source = archived(served_files(shard_bytes=5000), "tar")
    source.on_read = lambda read: Stop(0, FetchError("stopped")) if read.start >= 10_000 else None
    one_at_a_time = TransferSettings(1000, 1)
    with pytest.raises(FetchError, match="stopped"):
        fetch_model(source, Store(tmp_path), settings=one_at_a_time)
    rest = archived(served_files(shard_bytes=5000), "tar")
    model = fetch_model(rest, Store(tmp_path), settings=one_at_a_time)
    assert published(model.path) == served_files(shard_bytes=5000)
    assert min(read.start for read in rest.reads) == 10_000


def test_an_unserved_architecture_is_refused_and_its_archive_deleted(tmp_path: Path) -> None:
    def check_config(config: dict[str, Any]) -> None:
        assert config == CONFIG
        raise UnsupportedModel("not served")

    with pytest.raises(UnsupportedModel, match="not served"):
        fetch_model(archived(served_files()), Store(tmp_path), check_config=check_config, settings=SETTINGS)
    assert [model.size for model in Store(tmp_path).list_partial()] == [0]  # its refusal


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": b""}, "there is no config.json in it"),
        ({"../config.json": b"{}"}, "unsafe name"),
        ({path: data for path, data in served_files().items() if "00002" not in path}, "lacks model-00002"),
        (
            {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b""},
            "has no model.safetensors",
        ),
    ],
)
def test_archives_without_a_model_are_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        fetch_model(archived(files), Store(tmp_path), settings=SETTINGS)
    assert Store(tmp_path).list() == ()


def test_an_archive_with_wrong_content_is_not_unpacked(tmp_path: Path) -> None:
    source = archived(served_files())
    content = bytearray(source.content["model.archive"])
    content[-20] ^= 1
    source.content["model.archive"] = bytes(content)
    with pytest.raises(HashMismatch, match=r"the content of model\.archive"):
        fetch_model(source, Store(tmp_path), settings=SETTINGS)
    assert Store(tmp_path).list() == ()


def test_cuts_do_not_matter_to_archives(tmp_path: Path) -> None:
    def cut(read: Read) -> Stop | None:
        return Stop(100) if read.number < 20 else None

    source = archived(served_files())
    source.on_read = cut
    assert published(fetch_model(source, Store(tmp_path), settings=SETTINGS).path) == served_files()


def test_a_missing_package_is_noticed_before_the_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what an import of it then finds
    source = archived(served_files(), "tar")
    source.files = tuple(structs.replace(file, packing="tar+zstd") for file in source.files)
    with pytest.raises(FetchError, match="archives with zstd need a package"):
        fetch_model(source, Store(tmp_path), settings=SETTINGS)
    assert source.reads == []


def test_a_refused_archive_is_not_fetched_again_by_the_next_attempt(tmp_path: Path) -> None:
    def refuse(config: dict[str, Any]) -> None:
        raise UnsupportedModel("the architecture is not supported")

    store, first, second = Store(tmp_path), archived(served_files()), archived(served_files())
    with pytest.raises(UnsupportedModel):
        fetch_model(first, store, settings=SETTINGS, check_config=refuse)
    assert first.paths_read()
    with pytest.raises(UnsupportedModel, match=r"the architecture is not supported .*--refresh"):
        fetch_model(second, store, settings=SETTINGS, check_config=refuse)
    assert not second.paths_read()
    (partial,) = store.list_partial()
    assert partial.size < 4096
    fetch_model(second, store, settings=SETTINGS, refresh=True)
    assert not store.list_partial()


def test_a_refusal_ends_after_a_day(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(UnsupportedModel):
        fetch_model(archived({"tiny/README": b"no model"}), store, settings=SETTINGS)
    (record,) = tmp_path.rglob(".argosy-refused")
    os.utime(record, (0, 0))
    again = archived({"tiny/README": b"no model"})
    with pytest.raises(UnsupportedModel):
        fetch_model(again, store, settings=SETTINGS)
    assert again.paths_read()
