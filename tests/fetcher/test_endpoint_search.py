"""A model of a mirror or of a bucket's endpoint, found offline by a program that does not know the endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy_fetcher.errors import Offline
from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.progress import Progress
from argosy_fetcher.pull import find_model, pull_model
from argosy_fetcher.source_uri import parse
from argosy_fetcher.store import Store
from argosy_fetcher.store_index import StoredModel
from bucket_server import forget_cloud
from model_files import served_files
from scripted_source import ScriptedSource


class Clock:
    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def __call__(self) -> float:
        self.time += 60.0
        return self.time


def add(store: Store, name: str, requested_revision: str = "") -> StoredModel:
    """Fetch a model, and return what was added."""
    before = store.list()
    fetch_model(ScriptedSource(served_files(), name=name, requested_revision=requested_revision), store)
    (added,) = [model for model in store.list() if model.source not in {known.source for known in before}]
    return added


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("s3://bucket/tiny?endpoint=http://minio:9000", "s3://bucket/tiny"),
        ("gs://bucket/tiny?endpoint=http://store:4443", "gs://bucket/tiny/"),
        ("hf://acme/tiny?endpoint=https://mirror", "hf://acme/tiny"),
    ],
)
def test_offline_the_endpoint_need_not_be_known(
    stored: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_cloud(monkeypatch)
    model = add(Store(tmp_path), stored)
    offline = {"ARGOSY_MODELS_DIR": str(tmp_path), "ARGOSY_OFFLINE": "1"}
    pulled = pull_model(parse(asked), progress=Progress(), environment=offline)
    assert (pulled.path, pulled.source) == (model.path, stored)
    pulled.close()
    assert find_model(parse(asked), environment=offline) == Store(tmp_path).list()[0]
    assert find_model(parse(asked), environment={"ARGOSY_MODELS_DIR": str(tmp_path)}) is None


def test_the_endpoint_that_was_used_last_wins(tmp_path: Path) -> None:
    store = Store(tmp_path, now=Clock())
    first = add(store, "s3://bucket/tiny?endpoint=http://a")
    second = add(store, "s3://bucket/tiny?endpoint=http://b")
    assert store.find_at_any_endpoint("s3://bucket/tiny", "") == second
    store.hold(first.path).close()
    found = store.find_at_any_endpoint("s3://bucket/tiny", "")
    assert found is not None
    assert found.source == first.source


@pytest.mark.parametrize("name", ["s3://bucket/tin", "s3://bucket/tiny/more", "s3://other/tiny"])
def test_other_names_are_not_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_cloud(monkeypatch)
    add(Store(tmp_path), "s3://bucket/tiny?endpoint=http://a")
    environment = {"ARGOSY_MODELS_DIR": str(tmp_path), "ARGOSY_OFFLINE": "1"}
    with pytest.raises(Offline):
        pull_model(parse(name), progress=Progress(), environment=environment)


def test_another_revision_is_not_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add(store, "hf://acme/tiny?endpoint=https://mirror", "v1")
    assert store.find_at_any_endpoint("hf://acme/tiny", "v1") == model
    assert store.find_at_any_endpoint("hf://acme/tiny", model.revision) == model
    assert store.find_at_any_endpoint("hf://acme/tiny", "v2") is None


def pull(store: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str = "", *, fetch: bool = True) -> str:
    """Pull as fetch-model does, or as an engine that makes no request; returns the name of what was found."""
    name = "hf://acme/tiny" + (f"?endpoint={endpoint}" if endpoint else "")
    source = ScriptedSource(served_files(), name=name)
    monkeypatch.setattr("argosy_fetcher.pull.open_source", lambda uri, credentials: source)
    environment = {"ARGOSY_MODELS_DIR": str(store), "HF_ENDPOINT": endpoint}
    environment |= {} if fetch else {"ARGOSY_OFFLINE": "1"}
    pulled = pull_model(parse("hf://acme/tiny"), progress=Progress(), environment=environment)
    pulled.close()
    return pulled.source


def test_an_engine_loads_what_was_just_fetched_although_the_default_endpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = "hf://acme/tiny?endpoint=https://mirror"
    assert pull(tmp_path, monkeypatch) == "hf://acme/tiny"
    assert pull(tmp_path, monkeypatch, "https://mirror") == mirror
    with Store(tmp_path).hold(Store(tmp_path).list()[0].path):  # another engine's use changes nothing
        assert pull(tmp_path, monkeypatch, fetch=False) == mirror
        assert pull(tmp_path, monkeypatch) == "hf://acme/tiny"  # in the store already, and meant now
        assert pull(tmp_path, monkeypatch, fetch=False) == "hf://acme/tiny"
    assert pull(tmp_path, monkeypatch, "https://mirror", fetch=False) == mirror


def test_an_endpoint_that_has_no_model_here_does_not_hide_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(tmp_path, monkeypatch)
    assert pull(tmp_path, monkeypatch, "https://mirror", fetch=False) == "hf://acme/tiny"
