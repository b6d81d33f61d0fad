"""Pulling a model by its URI: the store that is used, when the source is asked, and what keeps a model there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from archives import tar_of
from argosy_fetcher.errors import (
    FetchError,
    InvalidSource,
    ModelInUse,
    ModelNotFound,
    ModelRemoved,
    Offline,
)
from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.progress import Progress
from argosy_fetcher.pull import PulledModel, find_model, is_offline, open_store, pull_headers, pull_model
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.registry import SOURCES, open_source
from argosy_fetcher.store import ModelHold, Store, hold_model
from named_sources import PUBLISHED, publish_tiny, serve_names
from recorded_progress import RecordedProgress
from scripted_source import ScriptedSource

URI = parse("hf://acme/tiny")


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_names(monkeypatch, tmp_path)


def pull(refresh: bool = False, environment: Mapping[str, str] | None = None) -> PulledModel:
    return pull_model(URI, progress=Progress(), refresh=refresh, environment=environment)


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


def test_a_model_that_is_removed_before_it_is_held_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = publish_tiny("acme/tiny")
    store = open_store(None)
    removals = [1]

    def hold(path: Path) -> ModelHold | None:
        if removals:
            removals.pop()
            (stored,) = store.list()
            store.remove(stored)
        return hold_model(path)

    monkeypatch.setattr("argosy_fetcher.pull.hold_model", hold)
    progress = RecordedProgress()
    model = pull_model(URI, progress=progress)
    assert (model.path / "config.json").is_file()
    assert model.hold is not None
    assert source.num_snapshots == 2
    assert "removed it from the store; fetching it again" in progress.notes[0]
    model.close()
    removals += [1, 2, 3]
    with pytest.raises(ModelRemoved, match="again and again"):
        pull()


def test_a_pruned_revision_is_fetched_again_where_a_branch_is_pinned_to_it() -> None:
    source = publish_tiny("acme/tiny")
    first = pull()
    first.close()
    source.revision = "e" * 40
    pull_model(parse("hf://acme/tiny@v2"), progress=Progress()).close()  # keeps the source's pins
    store = open_store(None)
    store.remove(next(model for model in store.list() if model.path == first.path))

    progress = RecordedProgress()
    with pytest.raises(Offline):
        pull_model(
            URI, progress=progress, environment={"ARGOSY_OFFLINE": "1", "ARGOSY_MODELS_DIR": str(store.root)}
        )
    assert progress.notes == []
    source.revision = "f" * 40
    pinned = ScriptedSource(source.content, revision=first.revision)
    PUBLISHED[f"acme/tiny@{first.revision}"] = pinned
    progress = RecordedProgress()
    again = pull_model(URI, progress=progress)
    again.close()
    assert again.revision == first.revision
    assert f"fetching {first.revision} again, to which it is pinned" in progress.notes[0]

    store.remove(next(model for model in store.list() if model.path == first.path))
    PUBLISHED[f"acme/tiny@{first.revision}"] = ModelNotFound("no such revision")
    progress = RecordedProgress()
    assert pull_model(URI, progress=progress).revision == "f" * 40
    assert f"{first.revision} is not there any more; taking what it is now" in progress.notes[1]


@pytest.mark.parametrize(
    ("uri", "name", "requested"),
    [
        ("s3://bucket/tiny", "s3://bucket/tiny?endpoint=http://127.0.0.1:9", ""),
        ("gs://bucket/tiny", "gs://bucket/tiny", ""),
        ("oci://docker.io/tiny:v1", "oci://docker.io/library/tiny", "v1"),
        (f"oci://host.example/tiny@sha256:{'a' * 64}", "oci://host.example/tiny", f"sha256-{'a' * 64}"),
        ("https://host/tiny/SHA256SUMS", "https://host/tiny/SHA256SUMS", ""),
    ],
)
def test_a_stored_model_needs_no_client(
    uri: str, name: str, requested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"ARGOSY_MODELS_DIR": str(tmp_path), "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    with closing(open_source(parse(uri), environment)) as source:
        assert (source.name, source.requested_revision) == (name, requested)
    files = publish_tiny("acme/tiny").content
    stored = fetch_model(ScriptedSource(files, name=name, requested_revision=requested), Store(tmp_path))
    for scheme in SOURCES:
        monkeypatch.setitem(SOURCES, scheme, "no_such_package.client:Source")
    with closing(pull_model(parse(uri), progress=Progress(), environment=environment)) as model:
        assert model.path == stored.path


def test_without_weights_config_and_tokenizer_are_fetched_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = publish_tiny("acme/tiny")
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr("atexit.register", lambda *call, **options: at_exit.append(partial(*call, **options)))
    model = pull_model(URI, progress=Progress(), has_weights=False)
    model.close()
    names = {path.name for path in model.path.iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    assert names == source.paths_read()
    assert find_model(URI) is None
    for call in at_exit:
        call()
    assert not model.path.exists()
    with closing(pull()) as whole, closing(pull_model(URI, progress=Progress(), has_weights=False)) as model:
        assert model.path == whole.path


def test_without_weights_an_archive_is_fetched_whole() -> None:
    files = publish_tiny("acme/tiny").content
    PUBLISHED["acme/tiny"] = ScriptedSource({"m.tar": tar_of(files)}, packing={"m.tar": "tar"})
    with closing(pull_model(URI, progress=Progress(), has_weights=False)) as model:
        assert (model.path / "model.safetensors").is_file()


def test_finding_makes_no_request() -> None:
    source = publish_tiny("acme/tiny")
    assert find_model(URI) is None
    assert source.num_snapshots == 0
    pull().close()
    found = find_model(URI)
    assert found is not None
    assert source.num_snapshots == 1


@pytest.mark.parametrize("name", ["ARGOSY_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_only_the_store_is_used(name: str, tmp_path: Path) -> None:
    source = publish_tiny("acme/tiny")
    environment = {name: "1", "ARGOSY_MODELS_DIR": str(tmp_path)}
    with pytest.raises(Offline, match="hf://acme/tiny is not in the model store"):
        pull(environment=environment)
    with pytest.raises(Offline, match="hf://acme/tiny is not in the store"):
        pull_headers(URI, tmp_path, progress=Progress(), environment=environment)
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
    model = pull_model(URI, progress=Progress(), download_dir=str(tmp_path / "other"))
    assert model.path.is_relative_to(tmp_path / "other")
    assert find_model(URI) is None
    assert find_model(URI, download_dir=str(tmp_path / "other")) is not None


def test_headers_leave_the_store_as_it_is(tmp_path: Path) -> None:
    source = publish_tiny("acme/tiny")
    directory = tmp_path / "headers"
    directory.mkdir()
    pull_headers(URI, directory, progress=Progress())
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
        FetchError,
        match=r"s3:// needs the package 'no_such_package': `pip install '\.\[fetch\]'` in the checkout",
    ):
        open_source(parse("s3://bucket/x"), {})
