"""Pulling a model by its URI: the store that is used, when the source is asked, and what keeps a model there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from argosy_fetcher.errors import FetchError, InvalidSource, ModelInUse, ModelNotFound, Offline
from argosy_fetcher.progress import Silent
from argosy_fetcher.pull import PulledModel, find_model, is_offline, open_store, pull_headers, pull_model
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.registry import SOURCES, open_source
from named_sources import PUBLISHED, publish_tiny, serve_names
from recorded_progress import RecordedProgress

URI = parse("hf://acme/tiny")


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_names(monkeypatch, tmp_path)


def pull(refresh: bool = False, environment: Mapping[str, str] | None = None) -> PulledModel:
    return pull_model(URI, progress=Silent(), refresh=refresh, environment=environment)


def test_a_second_pull_asks_nobody(tmp_path: Path) -> None:
    source = publish_tiny("acme/tiny")
    first = pull()
    assert first.path.is_relative_to(tmp_path)
    assert (first.source, first.revision) == ("hf://acme/tiny", source.revision)
    PUBLISHED.clear()  # opening the source would fail
    progress = RecordedProgress()
    second = pull_model(URI, progress=progress)
    assert (second.path, second.revision) == (first.path, first.revision)
    assert (progress.revision, progress.events[-1]) == (first.revision, "end")


def test_a_refresh_follows_a_branch_that_has_moved() -> None:
    source = publish_tiny("acme/tiny")
    before = pull()
    source.revision = "f" * 40
    assert pull().revision == before.revision
    assert pull(refresh=True).revision == "f" * 40
    assert pull().revision == "f" * 40


def test_a_model_that_is_pulled_stays_until_it_is_closed() -> None:
    publish_tiny("acme/tiny")
    model = pull()
    store = open_store(None)
    (stored,) = store.list()
    with pytest.raises(ModelInUse):
        store.remove(stored)
    model.close()
    store.remove(stored)
    assert find_model(URI) is None


def test_finding_makes_no_request() -> None:
    source = publish_tiny("acme/tiny")
    assert find_model(URI) is None
    assert source.num_snapshots == 0
    pull().close()
    found = find_model(URI)
    assert found is not None
    assert source.num_snapshots == 1


@pytest.mark.parametrize("name", ["ARGOSY_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_only_the_store_is_used(name: str, tmp_path: Path) -> None:
    source = publish_tiny("acme/tiny")
    environment = {name: "1", "ARGOSY_MODELS_DIR": str(tmp_path)}
    with pytest.raises(Offline, match="hf://acme/tiny is not in the model store"):
        pull(environment=environment)
    with pytest.raises(Offline, match="hf://acme/tiny is not in the store"):
        pull_headers(URI, tmp_path, progress=Silent(), environment=environment)
    assert source.num_snapshots == 0
    fetched = pull()
    assert pull(environment=environment).path == fetched.path
    assert pull(refresh=True, environment=environment).path == fetched.path
    assert source.num_snapshots == 1


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("0", False), ("", False)])
def test_offline_mode_is_switched_on_by_a_word_for_yes(value: str, expected: bool) -> None:
    assert is_offline({"ARGOSY_OFFLINE": value}) == expected


def test_a_directory_wins_over_the_environment(tmp_path: Path) -> None:
    publish_tiny("acme/tiny")
    model = pull_model(URI, progress=Silent(), download_dir=str(tmp_path / "other"))
    assert model.path.is_relative_to(tmp_path / "other")
    assert find_model(URI) is None
    assert find_model(URI, download_dir=str(tmp_path / "other")) is not None


def test_headers_leave_the_store_as_it_is(tmp_path: Path) -> None:
    source = publish_tiny("acme/tiny")
    directory = tmp_path / "headers"
    directory.mkdir()
    pull_headers(URI, directory, progress=Silent())
    assert source.num_bytes < sum(map(len, source.content.values())) / 2
    assert find_model(URI) is None


def test_errors_of_a_source_are_passed_on() -> None:
    with pytest.raises(ModelNotFound, match="hf://acme/tiny: no such repository"):
        pull()


def test_local_sources_are_not_opened() -> None:
    with pytest.raises(InvalidSource, match="file:///x is not fetched"):
        open_source(parse("file:///x"), {})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "s3", "no_such_package.client:Source")
    with pytest.raises(
        FetchError, match=r"s3:// needs the package 'no_such_package': pip install 'argosy\[fetch\]'"
    ):
        open_source(parse("s3://bucket/x"), {})
