"""`argosy up` with models that have to be fetched: once, before replicas start or go, and with the command's errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_fleet import LocalFleet

from argosy.commands import up
from argosy_fetcher.errors import AccessDenied, ModelInUse
from argosy_fetcher.pull import open_store
from named_sources import PUBLISHED, TINY, publish_tiny, serve_names
from scripted_source import Read, Stop


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_names(monkeypatch, tmp_path / "models")


def arguments(fleet: LocalFleet, replica: str) -> str:
    """Return what the replica's engine was started with."""
    return next(
        line
        for line in fleet.state.log_file(replica).read_text().splitlines()
        if line.startswith("arguments")
    )


def test_a_model_is_fetched_once_and_replicas_get_its_directory(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    source = publish_tiny("acme/tiny")
    fleet.manifest(model={"source": "hf://acme/tiny"}, replicas=2)
    assert fleet.start() == 0
    (stored,) = open_store(None).list()
    for replica in (fleet.replica_name(0), fleet.replica_name(1)):
        assert f"'serve', '{stored.path}'" in arguments(fleet, replica)
    errors = capfd.readouterr().err
    assert f"hf://acme/tiny: revision {source.revision}" in errors
    assert "fetched 6.2 MiB in " in errors
    before = [replica.pid for replica in fleet.replicas()]
    PUBLISHED.clear()  # opening the source would fail
    assert fleet.up() == 0
    assert [replica.pid for replica in fleet.replicas()] == before
    assert source.num_snapshots == 1


def test_a_model_that_cannot_be_fetched_starts_nothing(
    own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    PUBLISHED["acme/gated"] = AccessDenied("hf://acme/gated is gated; accept its terms")
    own_fleet.manifest(model={"source": "hf://acme/gated"})
    assert own_fleet.start() == 1
    assert capfd.readouterr().err.splitlines()[-1] == "argosy up: hf://acme/gated is gated; accept its terms"
    assert own_fleet.state.connect() is None


def test_an_architecture_that_is_not_served_changes_nothing(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet.manifest()
    assert fleet.start() == 0
    (before,) = fleet.replicas()
    source = publish_tiny("acme/bert", architectures=["BertModel"])
    fleet.manifest(model={"source": "hf://acme/bert"})
    assert fleet.up() == 1
    assert "architecture BertModel is not supported" in capfd.readouterr().err.splitlines()[-1]
    assert source.paths_read() == {"config.json"}
    assert fleet.replicas() == (before,)


@pytest.mark.parametrize(
    ("missing", "config", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("model.safetensors", None, "it has no model.safetensors"),
        ("README.md", {"architectures": ["BertModel"]}, "architecture BertModel is not supported"),
    ],
)
def test_a_folder_that_cannot_be_loaded_changes_nothing(
    missing: str,
    config: dict[str, Any] | None,
    message: str,
    tmp_path: Path,
    fleet: LocalFleet,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fleet.manifest()
    assert fleet.start() == 0
    (before,) = fleet.replicas()
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, copy_function=shutil.copy)
    (folder / missing).unlink(missing_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    fleet.manifest(model={"source": f"file://{folder}"})
    assert fleet.up() == 2
    error = capfd.readouterr().err
    assert error.startswith(f"argosy up: default/{fleet.service}: ")
    assert message in error
    assert error.endswith("; nothing was changed\n")
    assert fleet.replicas() == (before,)

    fleet.manifest(
        model={"source": f"file://{folder}"}, replicas=0
    )  # what is not served may wait for its files
    assert fleet.up() == 0


def test_a_layout_that_cannot_divide_the_model_changes_nothing(
    own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    own_fleet.manifest(parallelism={"tensor": 3})
    assert own_fleet.start() == 2
    error = capfd.readouterr().err
    assert error.startswith("argosy up: default/tiny: --tensor-parallel-size 3 cannot divide this model: ")
    assert error.endswith(
        "(in the manifest --tensor-parallel-size is spec.parallelism.tensor); nothing was changed\n"
    )
    assert own_fleet.state.connect() is None


def test_a_layout_is_checked_before_weights_are_fetched_and_of_a_stored_model(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    source = publish_tiny("acme/tiny")
    fleet.manifest(model={"source": "hf://acme/tiny"}, parallelism={"tensor": 3})
    assert fleet.start() == 1
    assert "--tensor-parallel-size 3 cannot divide this model" in capfd.readouterr().err
    assert source.paths_read() == {"config.json"}

    fleet.manifest(model={"source": "hf://acme/tiny"})
    assert fleet.start() == 0
    before = fleet.replicas()
    fleet.manifest(model={"source": "hf://acme/tiny"}, parallelism={"tensor": 3})
    assert fleet.up() == 2
    assert "--tensor-parallel-size 3 cannot divide this model" in capfd.readouterr().err
    assert fleet.replicas() == before


def test_a_folder_is_checked_before_anything_is_fetched(
    own_fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    source = publish_tiny("acme/tiny")
    own_fleet.manifest(model={"source": "hf://acme/tiny"})
    folder = own_fleet.root / "empty"
    folder.mkdir()
    second = yaml.safe_load(own_fleet.file.read_text())
    second["metadata"]["name"], second["spec"]["model"]["source"] = "folder", f"file://{folder}"
    own_fleet.file.write_text(own_fleet.file.read_text() + "---\n" + yaml.safe_dump(second))
    assert own_fleet.start() == 2
    assert "default/folder: " in capfd.readouterr().err
    assert source.num_snapshots == 0
    assert own_fleet.state.connect() is None


def test_an_edit_fetches_before_the_old_replicas_go(fleet: LocalFleet) -> None:
    fleet.manifest()
    assert fleet.start() == 0
    (before,) = fleet.replicas()
    seen = []

    def look(read: Read) -> Stop | None:
        if not seen:
            seen.extend(fleet.replicas())
        return None

    publish_tiny("acme/tiny").on_read = look
    fleet.manifest(model={"source": "hf://acme/tiny"})
    assert fleet.up() == 0
    assert [(replica.name, replica.phase) for replica in seen] == [(before.name, "Routable")]
    assert [replica.name for replica in fleet.replicas()] == [fleet.replica_name(1)]


def test_a_model_with_fields_for_clusters_is_served(
    fleet: LocalFleet, capfd: pytest.CaptureFixture[str]
) -> None:
    publish_tiny("acme/tiny")
    cache = {"type": "claim", "claimName": "models"}
    fleet.manifest(model={"source": "hf://acme/tiny", "cache": cache})
    assert fleet.start() == 0
    assert (
        f"default/{fleet.service}: without effect on this machine: spec.model.cache (this machine's store is used)"
    ) in capfd.readouterr().err.splitlines()


def test_what_serves_nothing_is_not_fetched(fleet: LocalFleet) -> None:
    for spec in ({"replicas": 0}, {"paused": True}):
        fleet.manifest(model={"source": "hf://acme/none"}, **spec)
        assert fleet.up("--port", str(fleet.port)) == 0
    assert open_store(None).list() == ()


def test_a_model_stays_from_its_fetch_to_the_start_of_its_engine(
    own_fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_tiny("acme/tiny")
    own_fleet.manifest(model={"source": "hf://acme/tiny"})
    start = up.start_supervisor
    refused = []

    def try_to_remove(*arguments: Any) -> None:
        store = open_store(None)
        try:
            store.remove(store.list()[0])
        except ModelInUse as error:
            refused.append(error)
        start(*arguments)

    monkeypatch.setattr(up, "start_supervisor", try_to_remove)
    assert own_fleet.start() == 0
    assert len(refused) == 1
