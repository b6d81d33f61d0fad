"""Making room: which models go when another one does not fit, and which stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from argosy_fetcher.disk import MARGIN_BYTES, FreeSpace, SharedLock
from argosy_fetcher.errors import NoSpace
from argosy_fetcher.progress import Progress
from argosy_fetcher.pull import PulledModel, open_store, pull_model
from argosy_fetcher.source_uri import parse
from argosy_fetcher.store import Store, make_room
from argosy_fetcher.store_index import LAST_USE
from named_sources import publish_tiny, serve_names
from recorded_progress import RecordedProgress

NOW = 2_000_000_000.0
HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_names(monkeypatch, tmp_path)


def pull(name: str, hours_ago: float) -> PulledModel:
    """Pull a model that was used then. It can be held again."""
    publish_tiny(name)
    model = pull_model(parse(f"hf://{name}"), progress=Progress())
    model.close()
    then = NOW - hours_ago * HOUR_S
    os.utime(model.path / LAST_USE, (then, then))
    return model


class Disk:
    """A disk on which nothing but the store's models takes room."""

    def __init__(self, store: Store, capacity: int) -> None:
        self._store = store
        self._capacity = capacity

    def free(self) -> int:
        return self._capacity - sum(model.size for model in self._store.list())


def make(num_bytes: int, capacity: int, source: str = "hf://acme/new") -> tuple[list[str], list[str]]:
    """Return what is left, and the notes."""
    store, notes = open_store(None), list[str]()
    make_room(
        store, num_bytes, source=source, min_age=HOUR_S, note=notes.append,
        now=lambda: NOW, free=Disk(store, capacity).free,
    )  # fmt: skip
    return [model.source.rpartition("/")[2] for model in store.list()], notes


def stored() -> tuple[int, int]:
    """Return the size of one model, and a capacity at which the disk is full."""
    models = open_store(None).list()
    return models[0].size, sum(model.size for model in models) + MARGIN_BYTES


def test_what_was_used_longest_ago_goes_first_and_no_more_than_needed() -> None:
    for name, hours in (("a", 2), ("b", 9), ("c", 5)):
        pull(f"acme/{name}", hours)
    size, full = stored()
    assert make(0, full)[0] == ["a", "b", "c"]
    left, notes = make(size, full)
    assert left == ["a", "c"]
    assert notes == [f"removed hf://acme/b ({size / (1 << 20):.1f} MiB, unused for 9.0 h) to make room"]
    assert make(2 * size, full)[0] == ["a"]


def test_what_is_held_or_was_just_used_stays() -> None:
    held = pull("acme/held", 9)
    pull("acme/new", 9)
    pull("acme/used", 0.5)
    pull("acme/old", 2)
    size, full = stored()
    with SharedLock(held.path / LAST_USE):
        assert make(size, full)[0] == ["held", "new", "used"]


def test_nothing_goes_if_it_would_not_be_enough() -> None:
    pull("acme/old", 9)
    pull("acme/used", 0.5)
    size, full = stored()
    assert make(2 * size, full) == (["old", "used"], [])


def test_a_disk_that_does_not_tell_its_room_is_left_alone() -> None:
    pull("acme/old", 9)
    store = open_store(None)
    make_room(store, 1, source="", min_age=0.0, note=lambda _: None, now=lambda: NOW, free=lambda: None)
    assert len(store.list()) == 1


def test_a_pull_makes_room_only_if_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    old = pull("acme/old", 9)
    os.utime(old.path / LAST_USE, (0, 0))
    _, full = stored()
    disk = Disk(open_store(None), full)
    for module in ("argosy_fetcher.store", "argosy_fetcher.disk"):
        monkeypatch.setattr(f"{module}.free_bytes", lambda _: disk.free())
    publish_tiny("acme/tiny")
    uri = parse("hf://acme/tiny")
    with pytest.raises(NoSpace):
        pull_model(uri, progress=Progress())
    shown = RecordedProgress()
    pull_model(uri, progress=shown, make_room_after=0.0).close()
    assert [model.source for model in open_store(None).list()] == ["hf://acme/tiny"]
    assert [note for note in shown.notes if "to make room" in note]


def test_the_age_counts_from_the_last_time_that_a_model_was_seen_held() -> None:
    held, old = pull("acme/held", 9), pull("acme/old", 5)
    with SharedLock(held.path / LAST_USE):  # by an engine that sees the store read-only
        make(0, stored()[1])
    size, full = stored()
    assert make(size, full)[0] == ["held"]
    assert not old.path.exists()
    os.utime(held.path / LAST_USE, (0, 0))
    assert make(size, size + MARGIN_BYTES)[0] == []


def test_a_share_of_the_disk_stays_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A node whose disk is nearly full evicts its pods."""
    disk = os.statvfs(tmp_path)
    total = disk.f_blocks * disk.f_frsize
    assert FreeSpace(percent=15.0).of(disk) == int(total * 0.15)
    assert FreeSpace(percent=15.0, max_bytes=total // 100).of(disk) == max(total // 100, MARGIN_BYTES)
    publish_tiny("acme/tiny")
    monkeypatch.setattr("argosy_fetcher.disk.free_bytes", lambda _: 1 << 30)
    uri = parse("hf://acme/tiny")
    with pytest.raises(NoSpace, match=r"2\.0 GiB must stay free; make room"):
        pull_model(uri, progress=Progress(), min_free=FreeSpace(num_bytes=2 << 30))
    with pytest.raises(NoSpace, match=rf"{tmp_path} is all that this fetch may take models from"):
        pull_model(uri, progress=Progress(), min_free=FreeSpace(num_bytes=2 << 30), make_room_after=0.0)
    pull_model(uri, progress=Progress(), min_free=FreeSpace(num_bytes=900 << 20)).close()
