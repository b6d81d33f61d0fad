"""Fetching a whole model: what is fetched, when requests are made, and what ends in the store."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from archives import tar_of
from argosy_fetcher.disk import disk_errors
from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    ModelNotFound,
    NoSpace,
    Offline,
    TransientError,
    UnsupportedModel,
)
from argosy_fetcher.model_fetch import FetchedModel, fetch_model
from argosy_fetcher.retry import RetryPolicy
from argosy_fetcher.source import Digest, RemoteFile, check_path
from argosy_fetcher.store import Store
from argosy_fetcher.transfer import TransferSettings
from argosy_protocol.reports import Phase
from model_files import CONFIG, other_files, served_files
from recorded_progress import RecordedProgress
from scripted_source import COMMIT, Read, ScriptedSource, Stop

QUICK = TransferSettings(part_bytes=256, retry=RetryPolicy(wait=lambda event, seconds: None))


def published(path: Path) -> dict[str, bytes]:
    """The files of a model's directory but the store's own."""
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".argosy")}


def test_a_model_is_fetched_with_what_is_served_and_nothing_else(tmp_path: Path) -> None:
    source = ScriptedSource({**other_files(), **served_files()})
    progress = RecordedProgress()
    model = fetch_model(source, Store(tmp_path), progress=progress, settings=QUICK)
    assert published(model.path) == served_files()
    assert source.paths_read() == set(served_files())
    assert model == FetchedModel(model.path, "hf://acme/tiny", COMMIT)
    assert model.path.name == COMMIT
    assert progress.events == ["resolved", "begin", "end"]
    assert progress.total == progress.received == sum(map(len, served_files().values()))
    assert progress.present == 0


def test_each_byte_is_requested_once(tmp_path: Path) -> None:
    source = ScriptedSource(served_files())
    fetch_model(source, Store(tmp_path), settings=QUICK)
    assert source.num_bytes == sum(map(len, served_files().values()))
    assert len({(read.path, read.start) for read in source.reads}) == len(source.reads)


def test_the_manifest_names_source_revision_and_digests(tmp_path: Path) -> None:
    source = ScriptedSource(served_files())
    model = fetch_model(source, Store(tmp_path), settings=QUICK)
    manifest = json.loads((model.path / ".argosy-model.json").read_text())
    assert (manifest["source"], manifest["revision"]) == ("hf://acme/tiny", COMMIT)
    assert {file["path"]: file["size"] for file in manifest["files"]} == {
        path: len(content) for path, content in served_files().items()
    }
    assert all(file["digest"]["algorithm"] == "sha256" for file in manifest["files"])
    assert "fetched_at" in manifest


def test_a_second_start_makes_no_request(tmp_path: Path) -> None:
    first = fetch_model(ScriptedSource(served_files()), Store(tmp_path), settings=QUICK)
    source, progress = ScriptedSource(served_files()), RecordedProgress()
    assert fetch_model(source, Store(tmp_path), progress=progress, settings=QUICK) == first
    assert (source.num_snapshots, source.reads) == (0, [])
    assert progress.events == ["resolved", "begin", "end"]
    assert progress.present == progress.total > 0


def test_a_commit_is_found_by_its_own_name(tmp_path: Path) -> None:
    first = fetch_model(ScriptedSource(served_files()), Store(tmp_path), settings=QUICK)
    by_commit = ScriptedSource(served_files(), requested_revision=COMMIT)
    assert fetch_model(by_commit, Store(tmp_path), settings=QUICK) == first
    assert by_commit.num_snapshots == 0


def test_a_branch_stays_pinned_until_it_is_refreshed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = fetch_model(ScriptedSource(served_files()), store, settings=QUICK)
    moved = ScriptedSource(served_files(seed=1), revision="f" * 40)
    assert fetch_model(moved, store, settings=QUICK) == first
    second = fetch_model(moved, store, refresh=True, settings=QUICK)
    assert second.revision == "f" * 40
    assert published(second.path) == served_files(seed=1)
    assert fetch_model(ScriptedSource({}), store, settings=QUICK) == second
    assert published(first.path) == served_files()


def test_refreshing_an_unmoved_branch_fetches_nothing(tmp_path: Path) -> None:
    first = fetch_model(ScriptedSource(served_files()), Store(tmp_path), settings=QUICK)
    source = ScriptedSource(served_files())
    assert fetch_model(source, Store(tmp_path), refresh=True, settings=QUICK) == first
    assert (source.num_snapshots, source.reads) == (1, [])


def test_offline_only_the_store_is_asked(tmp_path: Path) -> None:
    source = ScriptedSource(served_files())
    with pytest.raises(Offline, match=r"acme/tiny is not in the model store .*ARGOSY_OFFLINE"):
        fetch_model(source, Store(tmp_path), offline=True, requested="acme/tiny", settings=QUICK)
    assert source.num_snapshots == 0
    first = fetch_model(source, Store(tmp_path), settings=QUICK)
    assert fetch_model(ScriptedSource({}), Store(tmp_path), offline=True, refresh=True) == first


def test_an_unserved_architecture_is_refused_before_weights_are_fetched(tmp_path: Path) -> None:
    class NotServed(Exception): ...

    def check_config(config: dict[str, Any]) -> None:
        assert config == CONFIG
        raise NotServed

    source = ScriptedSource(served_files())
    with pytest.raises(NotServed):
        fetch_model(source, Store(tmp_path), check_config=check_config, settings=QUICK)
    assert source.paths_read() == {"config.json"}


@pytest.mark.parametrize("error", [ModelNotFound("no acme"), AccessDenied("gated")])
def test_errors_of_the_source_are_passed_on(tmp_path: Path, error: FetchError) -> None:
    source = ScriptedSource(served_files())
    source.snapshot_failures = [error]
    with pytest.raises(type(error)) as raised:
        fetch_model(source, Store(tmp_path), settings=QUICK)
    assert raised.value is error
    assert source.num_snapshots == 1


def test_listing_is_tried_again_after_transient_errors(tmp_path: Path) -> None:
    source = ScriptedSource(served_files())
    source.snapshot_failures = [TransientError("503"), ConnectionResetError("reset")]
    fetch_model(source, Store(tmp_path), settings=QUICK)
    assert source.num_snapshots == 3


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([RemoteFile("config.json", -1)], "size"),
        ([RemoteFile("config.json", 1 << 50)], "size"),
        ([RemoteFile("config.json", 2, Digest("sha256", "a" * 40))], "wrong length"),
        ([RemoteFile("config.json", 2, Digest("sha256", "../../etc/passwd" * 4))], "digest"),
        ([RemoteFile("config.json", 2), RemoteFile("config.json", 3)], "twice"),
        ([RemoteFile("config.json", 2, version="v" * 5000)], "version"),
        ([RemoteFile("x" * 5000, 2)], "name is too long"),
        ([RemoteFile("\ud800", 2)], "surrogates"),
        ([RemoteFile(f"{number}.safetensors", 2) for number in range(10_001)], "more than 10000 files"),
    ],
)
def test_invalid_lists_of_files_are_refused(tmp_path: Path, files: list[RemoteFile], reason: str) -> None:
    source = ScriptedSource({})
    source.files = tuple(files)
    with pytest.raises(FetchError, match=rf"hf://acme/tiny: .*invalid list of files: .*{reason}"):
        fetch_model(source, Store(tmp_path), settings=QUICK)
    assert source.reads == []


def test_a_screenshot_of_macos_beside_a_model_does_no_harm(tmp_path: Path) -> None:
    screenshot = check_path("Screenshot 2026-01-01 at 3.04.05\u202fPM.png")
    source = ScriptedSource({**served_files(), screenshot: b"png"})
    assert published(fetch_model(source, Store(tmp_path), settings=QUICK).path) == served_files()


@pytest.mark.parametrize("path", ["a\u202eb", "a\x00", "a\n", "a\ud800", "a\u200bb"])
def test_invisible_characters_in_names_are_refused(path: str) -> None:
    with pytest.raises(UnsupportedModel, match="unsafe name"):
        check_path(path)


@pytest.mark.parametrize("revision", ["", "..", "a/b", ".argosy-partial-x", "-x", "a" * 129, "a\n"])
def test_revisions_that_are_no_names_are_refused(tmp_path: Path, revision: str) -> None:
    source = ScriptedSource(served_files(), revision=revision)
    with pytest.raises(FetchError, match="invalid list of files"):
        fetch_model(source, Store(tmp_path / "store"), settings=QUICK)
    assert Store(tmp_path / "store").list() == ()


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/x.safetensors", "a\\b.safetensors", ".argosy.safetensors"]
)
def test_shards_with_unsafe_names_are_refused(tmp_path: Path, name: str) -> None:
    index = json.dumps({"weight_map": {"w": name}}).encode()
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors.index.json": index, name: b"x"}
    with pytest.raises(UnsupportedModel, match="safe"):
        fetch_model(ScriptedSource(files), Store(tmp_path / "store"), settings=QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_full_disk_is_noticed_before_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1 MiB blocks: 65 of them are free, and 64 MiB are not to be used
    nearly_full = os.statvfs_result((1 << 20, 1 << 20, 1000, 65, 65, 1000, 1000, 1000, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: nearly_full)
    source = ScriptedSource(served_files(shard_bytes=400_000))
    with pytest.raises(
        NoSpace, match=r"hf://acme/tiny: 1\.1 MiB more .* 65\.0 MiB free, .*argosy models prune"
    ):
        fetch_model(source, Store(tmp_path), settings=QUICK)
    assert not any(path.endswith(".safetensors") for path in source.paths_read())
    assert fetch_model(ScriptedSource(served_files()), Store(tmp_path), settings=QUICK).revision == COMMIT


@pytest.mark.parametrize("place", ["/proc/argosy-models", "a-file/models"])
def test_a_store_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").touch()
    source = ScriptedSource(served_files())
    with pytest.raises(FetchError, match=r"hf://acme/tiny: cannot use .*ARGOSY_MODELS_DIR"):
        fetch_model(source, Store(tmp_path / place), settings=QUICK)
    assert source.num_snapshots == 0


def test_a_store_of_another_user_is_an_error_that_names_the_user(tmp_path: Path) -> None:
    user = rf"\(for user {os.geteuid()}, group {os.getegid()}\)"
    with (
        pytest.raises(FetchError, match=rf"cannot use /models/a: Permission denied {user}; choose"),
        disk_errors("hf://acme/tiny", tmp_path),
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/models/a")


def test_a_damaged_model_is_fetched_again(tmp_path: Path) -> None:
    model = fetch_model(ScriptedSource(served_files()), Store(tmp_path), settings=QUICK)
    (model.path / "tokenizer.json").unlink()
    source = ScriptedSource(served_files())
    assert fetch_model(source, Store(tmp_path), settings=QUICK) == model
    assert published(model.path) == served_files()


def test_another_snapshot_of_the_same_revision_starts_afresh(tmp_path: Path) -> None:
    def stop_late(read: Read) -> Stop | None:
        is_last = read.path.startswith("model-00003") and read.start > 256
        return Stop(0, FetchError("gone")) if is_last else None

    source = ScriptedSource(served_files())
    source.on_read = stop_late
    with pytest.raises(FetchError, match="gone"):
        fetch_model(source, Store(tmp_path), settings=QUICK)
    changed = ScriptedSource(served_files(seed=1))
    model = fetch_model(changed, Store(tmp_path), settings=QUICK)
    assert published(model.path) == served_files(seed=1)


def test_models_without_digests_are_checked_by_size_alone(tmp_path: Path) -> None:
    source = ScriptedSource(served_files(), algorithm=None)
    assert published(fetch_model(source, Store(tmp_path), settings=QUICK).path) == served_files()


def test_two_sources_do_not_share_a_model(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = fetch_model(ScriptedSource(served_files()), store, settings=QUICK)
    other = ScriptedSource(served_files(seed=1), name="s3://acme/tiny")
    second = fetch_model(other, store, settings=QUICK)
    assert first.path != second.path
    assert published(second.path) == served_files(seed=1)


def test_a_fetch_that_waits_for_another_tells_its_phases(tmp_path: Path) -> None:
    source, store = ScriptedSource(served_files()), Store(tmp_path)
    waits = threading.Event()

    class Waiting(RecordedProgress):
        def enter(self, phase: Phase) -> None:
            super().enter(phase)
            if phase == "waiting":
                waits.set()

    progress = Waiting()
    with ThreadPoolExecutor(1) as threads:
        with store.lock(source.name, lambda: None):
            fetched = threads.submit(fetch_model, source, store, progress=progress, settings=QUICK)
            assert waits.wait(60)
            assert progress.phases == ["waiting"]
        fetched.result()
    assert progress.phases == ["waiting", "resolving"]
    assert progress.events == ["resolved", "begin", "end"]


def test_a_fetch_that_waits_for_one_without_progress_names_it(tmp_path: Path) -> None:
    source, store = ScriptedSource(served_files()), Store(tmp_path)
    told = threading.Event()

    class Waiting(RecordedProgress):
        def note(self, text: str) -> None:
            super().note(text)
            if "no progress" in text:
                told.set()

    progress = Waiting()
    with ThreadPoolExecutor(1) as threads:
        with store.lock(source.name, lambda: None):
            fetched = threads.submit(
                fetch_model, source, store, progress=progress, settings=QUICK, idle_after_s=0.01
            )
            assert told.wait(60)
            assert progress.phases == ["waiting", "blocked"]
        fetched.result()
    assert (
        f"a process that calls itself {socket.gethostname()[:63]} (process {os.getpid()}) holds the lock"
        in progress.notes[1]
    )
    assert progress.phases == ["waiting", "blocked", "resolving"]
    assert progress.events == ["resolved", "begin", "end"]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_fetch_shows_those_who_wait_that_it_makes_progress(
    is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy_fetcher.disk.MARK_INTERVAL_S", 0.0)
    files = {"model.tar": tar_of(served_files())} if is_packed else served_files()
    source = ScriptedSource(files, packing={"model.tar": "tar"} if is_packed else {})
    marked: dict[str, list[bool]] = {"fetching": [], "unpacking": []}
    store = Store(tmp_path)
    with store.lock(source.name, lambda: None):
        (lock,) = tmp_path.glob("*/.argosy-lock")

    class Looking(RecordedProgress):
        def advance(self, num_bytes: int) -> None:
            super().advance(num_bytes)
            phase = "unpacking" if "unpacking" in self.phases else "fetching"
            marked[phase].append(lock.stat().st_mtime > 1e9)
            os.utime(lock, (1e9, 1e9))

    one_at_a_time = TransferSettings(part_bytes=256, max_parts_in_flight=1)
    fetch_model(source, store, progress=Looking(), settings=one_at_a_time)
    assert len(marked["fetching"]) > 1
    assert all(marked["fetching"])
    assert (len(marked["unpacking"]) > 1) == is_packed
    assert all(marked["unpacking"])


def test_offline_a_model_is_found_without_its_endpoint(tmp_path: Path) -> None:
    """An engine in a pod has neither the Secret nor the variables with which its model was fetched."""
    now = [1000.0]
    store = Store(tmp_path, now=lambda: now[0])
    plain, blue, green = "s3://models/tiny", "http://blue:9000", "http://green:9000"
    for endpoint in (blue, green):
        now[0] += 1.0
        fetch_model(
            ScriptedSource(served_files(), name=f"{plain}?endpoint={endpoint}"), store, settings=QUICK
        )

    def found(name: str, revision: str = "main") -> str:
        source = ScriptedSource({}, name=name, requested_revision=revision)
        return fetch_model(source, store, offline=True).source

    assert found(plain) == f"{plain}?endpoint={green}"
    now[0] += 1.0
    assert found(f"{plain}?endpoint={blue}") == f"{plain}?endpoint={blue}"
    assert found(plain) == f"{plain}?endpoint={blue}"  # the last used
    assert found(f"{plain}?endpoint=http://red") == f"{plain}?endpoint={blue}"  # this one is not stored
    for name, revision in ((plain, "other"), ("s3://models/ti", "main")):
        with pytest.raises(Offline):
            found(name, revision)
    asked = ScriptedSource({}, name=plain)
    asked.snapshot_failures.append(ModelNotFound("none"))
    with pytest.raises(ModelNotFound):  # where requests are allowed the source is asked
        fetch_model(asked, store, settings=QUICK)
