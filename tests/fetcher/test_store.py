"""The store: what is found, listed, held, removed and pruned."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy_fetcher.errors import FetchError, ModelInUse
from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.source import Chunk, RemoteFile
from argosy_fetcher.store import Store
from argosy_fetcher.store_index import StoredModel, choose_root, source_directory, write_ref
from argosy_fetcher.transfer import TransferSettings
from model_files import served_files
from recorded_progress import RecordedProgress
from scripted_source import COMMIT, Read, ScriptedSource, Stop

SIZE = sum(map(len, served_files().values()))
DAY = 86400.0


class FakeClock:
    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def __call__(self) -> float:
        return self.time


def add(
    store: Store, name: str = "hf://acme/tiny", revision: str = COMMIT, requested: str = "main"
) -> StoredModel:
    """Put a model into a store."""
    fetch_model(
        ScriptedSource(served_files(), name=name, revision=revision, requested_revision=requested), store
    )
    model = store.find(name, revision)
    assert model is not None
    return model


def interrupt(store: Store, name: str = "hf://acme/half") -> StoredModel:
    """Leave an interrupted fetch in a store."""

    def stop_late(read: Read) -> Stop | None:
        return Stop(0, FetchError("stopped")) if read.path == "model-00003-of-00003.safetensors" else None

    source = ScriptedSource(served_files(), name=name)
    source.on_read = stop_late
    with pytest.raises(FetchError, match="stopped"):
        fetch_model(source, store, settings=TransferSettings(max_parts_in_flight=1))
    (partial,) = (model for model in store.list_partial() if model.source == name)
    return partial


def test_an_absent_store_is_empty(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert store.find("hf://acme/tiny", "main") is None
    assert (store.list(), store.list_partial()) == ((), ())
    assert store.prune(max_bytes=0).removed == ()
    assert not store.root.exists()


def test_models_are_listed_with_size_and_last_use(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Store(tmp_path, now=clock)
    first = add(store)
    clock.time += DAY
    second = add(store, "s3://bucket/tiny")
    assert store.list() == (first, second)
    assert (first.size, first.last_used_at) == (SIZE, 1_800_000_000.0)
    assert first.requested_revisions == ("main",)
    assert second.last_used_at == 1_800_000_000.0 + DAY


def test_last_use_is_noted(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Store(tmp_path, now=clock)
    model = add(store)
    clock.time += DAY
    store.hold(model.path).close()
    assert [found.last_used_at for found in store.list()] == [clock.time]
    clock.time += DAY
    fetch_model(ScriptedSource({}), store)
    assert [found.last_used_at for found in store.list()] == [clock.time]


def test_a_read_only_store_serves_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = add(Store(tmp_path))

    def refuse(path: Path, times: tuple[float, float]) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    store = Store(tmp_path)
    assert fetch_model(ScriptedSource({}), store).path == model.path
    with store.hold(model.path):
        assert store.list() == (model,)


def test_other_things_in_the_directory_are_ignored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add(store)
    (tmp_path / "file").touch()
    (tmp_path / "hub").mkdir()
    (tmp_path / "models--acme--tiny").mkdir()
    (model.path.parent / "f00").mkdir()
    (model.path.parent / "link").symlink_to(model.path)
    (tmp_path / f"link-{'0' * 8}").symlink_to(model.path.parent)
    assert store.list() == (model,)
    store.prune(max_bytes=SIZE)
    assert store.list() == (model,)
    assert (tmp_path / "hub").is_dir()


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"{",
        b"[]",
        b'{"source": "hf://acme/tiny", "revision": "other", "files": [], "fetched_at": "2026-01-01T00:00:00Z"}',
        b'{"source": "hf://acme/tiny", "revision": "%b", "files": [{"path": "../../x", "size": 1}], '
        b'"fetched_at": "2026-01-01T00:00:00Z"}' % COMMIT.encode(),
        b'{"source": "hf://acme/tiny", "revision": "%b", "files": [{"path": "%b", "size": 1}], '
        b'"fetched_at": "2026-01-01T00:00:00Z"}' % (COMMIT.encode(), b"x" * 500),
        b"[" * 100_000,
    ],
)
def test_a_model_with_a_damaged_manifest_is_absent(tmp_path: Path, manifest: bytes) -> None:
    store = Store(tmp_path / "store")
    model = add(store)
    (tmp_path / "x").write_bytes(b"x")
    (model.path / ".argosy-model.json").write_bytes(manifest)
    assert store.find("hf://acme/tiny", "main") is None
    assert store.list() == ()


@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_a_model_with_a_damaged_file_is_absent(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    model = add(store)
    file = model.path / "model-00002-of-00003.safetensors"
    if damage == "remove":
        file.unlink()
    else:
        os.truncate(file, 10)
    assert store.find("hf://acme/tiny", COMMIT) is None


def test_a_model_of_another_source_in_the_same_directory_is_not_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add(store)
    manifest = msgspec.json.decode((model.path / ".argosy-model.json").read_bytes())
    manifest["source"] = "hf://evil/twin"
    (model.path / ".argosy-model.json").write_bytes(msgspec.json.encode(manifest))
    assert store.find("hf://acme/tiny", COMMIT) is None


@pytest.mark.parametrize("refs", [b"", b"[]", b'{"main": 1}', b'{"main": "../../etc"}', b'{"main": "gone"}'])
def test_damaged_pins_count_as_none(tmp_path: Path, refs: bytes) -> None:
    store = Store(tmp_path)
    model = add(store)
    (model.path.parent / ".argosy-refs.json").write_bytes(refs)
    assert store.find("hf://acme/tiny", "main") is None
    assert store.find("hf://acme/tiny", COMMIT) is not None


def test_the_number_of_pins_is_bounded(tmp_path: Path) -> None:
    model = add(Store(tmp_path))
    pins = {f"branch-{number}": COMMIT for number in range(300)}
    (model.path.parent / ".argosy-refs.json").write_bytes(msgspec.json.encode(pins))
    write_ref(model.path.parent, "hf://acme/tiny", "latest", COMMIT)
    found = Store(tmp_path).list()[0].requested_revisions
    assert len(found) == 256
    assert found[-1] == "latest"


@pytest.mark.parametrize("requested", ["..", ".", "", "../other", "a/b", ".argosy-partial-x"])
def test_requested_revisions_are_not_paths(tmp_path: Path, requested: str) -> None:
    store = Store(tmp_path)
    add(store, requested="v1")
    assert store.find("hf://acme/tiny", requested) is None


@pytest.mark.parametrize(
    ("source", "default", "others"),
    [
        ("hf://acme/tiny", "main", ["latest", "v1"]),
        ("oci://host/acme", "latest", ["main", "v1"]),
        ("s3://bucket/acme", "", ["main", "latest"]),
    ],
)
def test_no_revision_is_the_default_one(tmp_path: Path, source: str, default: str, others: list[str]) -> None:
    store = Store(tmp_path)
    first = add(store, source, requested=default)
    for requested in ("", default):
        found = store.find(source, requested)
        assert found is not None
        assert found.path == first.path
    assert [store.find(source, requested) for requested in others] == [None] * len(others)
    second = add(store, source, revision="second", requested="v2")
    store.pin(source, "", "second")
    found = store.find(source, default)
    assert found is not None
    assert found.path == second.path
    assert store.list()[0].requested_revisions == ()


@pytest.mark.parametrize("requested", ["", "main"])
def test_a_damaged_model_is_found_by_either_name_of_the_default_revision(
    tmp_path: Path, requested: str
) -> None:
    store = Store(tmp_path)
    model = add(store, "hf://acme/tiny", requested="main")
    (model.path / "tokenizer.json").unlink()
    assert store.find("hf://acme/tiny", requested) is None
    assert store.damaged_path("hf://acme/tiny", requested) == model.path


def test_what_cannot_be_read_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    model = add(store)
    opened = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path == model.path / ".argosy-model.json" and args == ("rb",):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opened(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        source = ScriptedSource(served_files())
        with pytest.raises(FetchError, match=r"the store cannot be read: .*Too many open files"):
            fetch_model(source, store)
        assert source.num_snapshots == 0
        assert (store.list(), store.list_damaged()) == ((), ())
    assert store.list() == (model,)


def test_a_damaged_model_that_is_in_use_is_not_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add(store)
    with store.hold(model.path):
        (model.path / "tokenizer.json").unlink()
        with pytest.raises(ModelInUse, match="hf://acme/tiny is damaged, and a running process uses it"):
            add(store)
        assert (model.path / "config.json").is_file()
    source = ScriptedSource(served_files())
    assert fetch_model(source, store).path == model.path
    assert source.reads == []  # what was fetched for nothing waited for its place


def test_damaged_models_are_listed_and_removed(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Store(tmp_path, now=clock)
    first, second = add(store), add(store, "hf://acme/other")
    (first.path / "tokenizer.json").unlink()
    (second.path / ".argosy-model.json").write_bytes(b"")
    assert store.list() == ()
    damaged = store.list_damaged()
    assert [(model.path, model.revision) for model in damaged] == [
        (second.path, COMMIT),
        (first.path, COMMIT),
    ]
    assert [model.source for model in damaged] == [second.path.parent.name, "hf://acme/tiny"]
    assert SIZE / 2 < damaged[1].size < 2 * SIZE
    store.remove(damaged[0])
    assert [model.path for model in store.prune(max_bytes=0).removed] == [first.path]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["unlink", "rename"])
def test_what_a_crash_during_publication_leaves_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = Store(tmp_path)
    real = getattr(Path, step)

    def crash(path: Path, *args: Any, **options: Any) -> Any:
        if path.name in ("leftover", f".argosy-partial-{COMMIT}"):
            raise KeyboardInterrupt
        return real(path, *args, **options)

    partial = tmp_path / source_directory("hf://acme/tiny") / f".argosy-partial-{COMMIT}"

    def add_leftover(read: Read) -> None:
        if partial.exists():
            (partial / "leftover").touch()

    source = ScriptedSource(served_files())
    source.on_read = add_leftover
    with monkeypatch.context() as patch:
        patch.setattr(Path, step, crash)
        with pytest.raises(KeyboardInterrupt):
            fetch_model(source, store)
    assert store.list() == ()
    assert (partial / "leftover").exists() == (step == "unlink")
    again, progress = ScriptedSource(served_files()), RecordedProgress()
    model = fetch_model(again, store, progress=progress)
    assert again.reads == []
    assert progress.events == ["resolved", "begin", "end"]
    found = {path.name: path.read_bytes() for path in model.path.iterdir() if path.name[:7] != ".argosy"}
    assert found == served_files()


def test_revisions_share_the_files_that_are_the_same(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = add(store)
    changed = {**served_files(), "tokenizer_config.json": b'{"changed": 1}'}
    source = ScriptedSource(changed, revision="second")
    second = fetch_model(source, store, refresh=True)
    assert source.paths_read() == {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}
    shard = "model-00001-of-00003.safetensors"
    assert (first.path / shard).samefile(second.path / shard)
    pruned = store.prune(max_bytes=0)
    assert [model.path for model in pruned.removed] == [first.path, second.path]


def test_a_sibling_with_other_content_is_not_taken(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = add(store)
    shard = first.path / "model-00001-of-00003.safetensors"
    shard.write_bytes(b"x" * shard.stat().st_size)
    second = fetch_model(ScriptedSource(served_files(), revision="second"), store, refresh=True)
    assert (second.path / shard.name).read_bytes() == served_files()[shard.name]


def test_pruning_counts_shared_files_once_and_frees_them_with_the_last_one(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Store(tmp_path / "store", now=clock)
    shard = "model-00001-of-00003.safetensors"
    first = add(store)
    clock.time += DAY
    fetch_model(ScriptedSource(served_files(), revision="second"), store, refresh=True)
    os.link(first.path / shard, tmp_path / "elsewhere")
    assert store.prune(max_bytes=2 * SIZE - 2000).removed == ()  # the shards count once
    pruned = store.prune(max_age=DAY / 2)
    assert [model.path for model in pruned.removed] == [first.path]
    read_first = len(served_files()["config.json"]) + len(served_files()["model.safetensors.index.json"])
    twin = len(
        served_files()["tokenizer_config.json"]
    )  # of another file, to which both of the second model link
    assert pruned.freed_bytes == read_first + twin
    assert store.prune(max_bytes=0).freed_bytes == SIZE - len(served_files()[shard]) - twin


def test_leftovers_of_interrupted_writes_are_deleted_after_a_day(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add(store)
    (model.path.parent / ".argosy-new-0123").touch()
    store.remove(model)
    assert model.path.parent.is_dir()
    later = Store(tmp_path, now=lambda: time.time() + 2 * DAY)
    with store.lock("hf://acme/tiny", lambda: None):
        later.prune()
        assert (model.path.parent / ".argosy-new-0123").exists()
    later.prune()
    assert list(tmp_path.iterdir()) == []


def test_a_model_in_use_is_not_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add(store)
    with store.hold(model.path), store.hold(model.path):
        with pytest.raises(ModelInUse, match=rf"hf://acme/tiny at {COMMIT}: a running process uses it"):
            store.remove(model)
        pruned = store.prune(max_bytes=0, max_age=0)
        assert (pruned.removed, [held.path for held in pruned.in_use]) == ((), [model.path])
        assert store.list() != ()
    store.remove(model)
    assert store.list() == ()
    assert list(tmp_path.iterdir()) == []


def test_a_removed_model_cannot_be_held(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add(store)
    store.remove(model)
    with pytest.raises(FetchError, match="was removed from the store"):
        store.hold(model.path)
    store.remove(model)  # again: nothing to do


def test_removing_one_revision_leaves_the_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = add(store), add(store, revision="second", requested="v2")
    store.remove(first)
    assert store.list() == (second,)
    assert store.find("hf://acme/tiny", "main") is None
    assert add(store).path == first.path
    assert store.find("hf://acme/tiny", "v2") == second


def test_interrupted_fetches_are_listed_apart_and_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    partial = interrupt(store)
    assert store.list() == ()
    assert (partial.source, partial.revision) == ("hf://acme/half", COMMIT)
    assert partial.size > 0
    assert store.find("hf://acme/half", COMMIT) is None
    assert store.find("hf://acme/half", partial.path.name) is None
    store.remove(partial)
    assert list(tmp_path.iterdir()) == []


def test_a_fetch_under_way_is_not_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Halting(ScriptedSource):
        def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
            if file.path.endswith(".safetensors"):
                has_begun.set()
                assert may_go_on.wait(60)
            yield from super().read(file, start, stop)

    source = Halting(served_files())
    thread = threading.Thread(target=fetch_model, args=(source, store))
    thread.start()
    try:
        assert has_begun.wait(60)
        (partial,) = store.list_partial()
        with pytest.raises(ModelInUse, match="a running process fetches it"):
            store.remove(partial)
        assert store.prune(max_bytes=0, max_age=0).removed == ()
    finally:
        may_go_on.set()
        thread.join()
    assert store.find("hf://acme/tiny", "main") is not None


def test_pruning_by_age(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Store(tmp_path, now=clock)
    old = add(store, "hf://acme/old")
    clock.time += 10 * DAY
    new = add(store, "hf://acme/new")
    assert store.prune(max_age=10 * DAY).removed == ()
    clock.time += 1
    assert store.prune(max_age=10 * DAY).removed == (old,)
    assert store.list() == (new,)


def test_pruning_by_size_takes_what_was_used_longest_ago(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Store(tmp_path, now=clock)
    models = []
    for number in range(4):
        clock.time += DAY
        models.append(add(store, f"hf://acme/{number}"))
    clock.time += DAY
    store.touch(models[0].path)
    assert store.prune(max_bytes=2 * SIZE).removed == (models[1], models[2])
    assert {model.path for model in store.list()} == {models[0].path, models[3].path}
    assert store.prune(max_bytes=2 * SIZE).removed == ()
    assert store.prune().removed == ()


def test_pruning_removes_interrupted_fetches(tmp_path: Path) -> None:
    store = Store(tmp_path)
    partial = interrupt(store)
    later = Store(tmp_path, now=lambda: partial.last_used_at + DAY)
    assert later.prune(max_age=2 * DAY).removed == ()
    assert [model.path for model in later.prune(max_age=DAY / 2).removed] == [partial.path]
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_interrupted_removals_are_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add(store)
    model.path.rename(model.path.parent / ".argosy-trash-0123")
    assert store.list() == ()
    store.prune()
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_which_a_directory_was_removed_is_fetched_into_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.remove(add(store))
    assert add(store).size == SIZE


def test_directory_names_are_readable_safe_and_distinct() -> None:
    assert source_directory("hf://Qwen/Qwen3-0.6B").startswith("hf-Qwen-Qwen3-0.6B-")
    names = [source_directory(name) for name in ("hf://a/b", "hf://a-b", "../..", "", "x" * 500, "é" * 300)]
    assert len(set(names)) == len(names)
    assert all(len(name) < 100 and "/" not in name and name[0].isalnum() for name in names)


@pytest.mark.parametrize(
    ("option", "environ", "root"),
    [
        ("/a", {"ARGOSY_MODELS_DIR": "/b", "HF_HOME": "/c"}, "/a"),
        (None, {"ARGOSY_MODELS_DIR": "/b", "HF_HOME": "/c"}, "/b"),
        (None, {"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/argosy"),
        (None, {"ARGOSY_MODELS_DIR": "", "HF_HOME": "", "XDG_CACHE_HOME": "/d"}, "/d/argosy/models"),
        (None, {}, "/home/user/.cache/argosy/models"),
        (None, {"XDG_CACHE_HOME": "relative"}, "/home/user/.cache/argosy/models"),
        ("~/m", {}, "/home/user/m"),
    ],
)
def test_location_of_the_store(
    option: str | None, environ: dict[str, str], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    assert choose_root(option, environ) == Path(root)
