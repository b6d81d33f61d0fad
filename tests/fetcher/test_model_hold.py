"""Holding a model: what keeps it in the store, and when its use is noted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from argosy_fetcher.errors import ModelInUse, ModelRemoved
from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.store import ModelHold, Store, hold_model
from argosy_fetcher.store_index import StoredModel
from model_files import served_files
from scripted_source import ScriptedSource


def stored(store: Store) -> StoredModel:
    fetch_model(ScriptedSource(served_files()), store)
    (model,) = store.list()
    return model


def age(model: StoredModel) -> None:
    os.utime(model.path / ".argosy-used", (1.0, 1.0))


def held(model: StoredModel) -> ModelHold:
    hold = hold_model(model.path)
    assert hold is not None
    return hold


def test_a_model_is_used_until_it_is_let_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = stored(store)
    hold = held(model)
    age(model)
    with pytest.raises(ModelInUse):
        store.remove(model)
    hold.close()
    assert store.list()[0].last_used_at > model.last_used_at - 1.0
    age(model)
    hold.close()  # again: nothing happens
    assert store.list()[0].last_used_at == 1.0
    store.remove(model)


def test_the_use_is_noted_again_and_again(tmp_path: Path) -> None:
    model = stored(Store(tmp_path))
    times = iter(range(1000, 1_000_000_000))
    many_notes = threading.Event()

    def now() -> float:
        time = next(times)
        if time >= 1003:
            many_notes.set()
        return float(time)

    hold = hold_model(model.path, touch_interval_s=0.0, now=now)
    assert hold is not None
    with hold:
        assert many_notes.wait(60)
    assert Store(tmp_path).list()[0].last_used_at >= 1003.0


def test_a_removed_model_is_an_error_and_another_directory_is_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    model = stored(store)
    store.remove(model)
    with pytest.raises(ModelRemoved, match="was removed; start again to fetch it"):
        hold_model(model.path)
    assert hold_model(tmp_path) is None


def test_without_locks_a_model_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stored(Store(tmp_path))

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert hold_model(model.path) is None
