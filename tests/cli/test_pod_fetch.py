"""`argosy models pull` as an init container: progress port, termination message, SIGTERM, and a failure's last line."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from obstore.exceptions import GenericError

from argosy.commands import models
from argosy.diagnosis import is_unreachable
from argosy.main import main
from argosy_fetcher.errors import TransientError
from argosy_fetcher.progress import Progress
from argosy_fetcher.sources.hub import HubModel, unreachable
from argosy_fetcher.sources.object_store import Bucket, explain
from argosy_fetcher.store import Store
from argosy_protocol.reports import ModelProgress
from hub_repositories import files_under
from hub_server import HubServer
from named_sources import TINY, publish_tiny, serve_names
from processes import free_port

DEADLINE_S = 60.0


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_model("acme/tiny", files_under(TINY))
        yield hub


def test_it_leaves_a_message_about_what_it_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    serve_names(monkeypatch, tmp_path / "models")
    log = tmp_path / "termination-log"
    monkeypatch.setattr(models.write_termination_message, "__defaults__", (log,))
    source = publish_tiny("acme/tiny")
    arguments = ["models", "pull", "hf://acme/tiny", "--progress-port", str(free_port())]
    assert main(arguments) == 0
    assert not log.exists()  # this is no pod
    log.write_text("x" * 4096)
    assert main(arguments) == 0
    assert log.read_text() == f"hf://acme/tiny revision {source.revision[:12]}: already stored"
    assert main([*arguments, "--download-dir", str(tmp_path / "other")]) == 0
    assert log.read_text().startswith(f"hf://acme/tiny revision {source.revision[:12]}: 6.2 MiB fetched in ")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_port_that_is_taken_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_names(monkeypatch, tmp_path)
    publish_tiny("acme/tiny")
    from argosy_fetcher.progress_server import ProgressServer

    with ProgressServer(0, lambda: ModelProgress(source="", phase="done")) as other:
        assert main(["models", "pull", "acme/tiny", "--progress-port", str(other.port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("argosy models: cannot listen on 0.0.0.0:")
    assert "--progress-port" in line


def start(hub: HubServer, store: Path, port: int, **environment: str) -> subprocess.Popen[str]:
    command = ["models", "pull", "hf://acme/tiny", "--download-dir", str(store), "--progress-port", str(port)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "ARGOSY_"))}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "argosy", *command],
        env=kept | {"HF_ENDPOINT": hub.endpoint, "HOME": str(store), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_progress_is_reported_and_sigterm_keeps_what_has_arrived(hub: HubServer, tmp_path: Path) -> None:
    hub.bytes_per_s = 100_000.0
    port = free_port()
    process = start(hub, tmp_path, port)
    try:
        report = _wait_for_bytes(process, port)
        assert (report.source, report.phase) == ("hf://acme/tiny", "fetching")
        assert report.fetched_bytes < report.total_bytes
        assert report.revision == hub.repositories["acme/tiny"].refs["main"]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert errors.splitlines()[-1] == "argosy: stopped by SIGTERM; what has arrived is kept"
    (partial,) = Store(tmp_path).list_partial()
    assert partial.size > 0


def _wait_for_bytes(process: subprocess.Popen[str], port: int) -> ModelProgress:
    while process.poll() is None:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/progress", timeout=DEADLINE_S)
        except httpx.TransportError:
            continue  # it does not listen yet
        report = msgspec.json.decode(answer.content, type=ModelProgress)
        if report.phase == "fetching" and report.fetched_bytes > 0:
            return report
    raise AssertionError(process.communicate())


def test_the_last_line_of_a_failure_is_its_message(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["acme/tiny"].gate = "list"
    process = start(hub, tmp_path, free_port())
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, output) == (1, "")
    assert errors.splitlines()[-1].startswith("argosy models: hf://acme/tiny")
    assert "HF_TOKEN" in errors.splitlines()[-1]


def test_a_secret_that_is_missing_is_said_to_be(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "credentials").mkdir()
    process = start(hub, tmp_path, free_port(), ARGOSY_CREDENTIALS_DIR=str(tmp_path / "credentials"))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert "the Secret of spec.model.secretRef is missing or empty" in errors.splitlines()[-1]
    assert hub.requests() == []


def test_a_failure_says_what_to_change_in_the_manifest(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add_model("acme/private", files_under(TINY), is_private=True)
    log, secret = tmp_path / "termination-log", tmp_path / "secret"
    monkeypatch.setattr(models.write_termination_message, "__defaults__", (log,))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "ARGOSY_OFFLINE", "ARGOSY_CREDENTIALS_DIR"):
        monkeypatch.delenv(name, raising=False)

    def failure(model: str, *more: str) -> str:
        log.write_text("")
        store = ["--download-dir", str(tmp_path / "store")]
        assert main(["models", "pull", model, *store, "--progress-port", str(free_port()), *more]) == 1
        return log.read_text()

    told = failure("hf://acme/private")
    assert told.startswith("hf://acme/private does not exist on ")
    assert told.endswith("the Secret that spec.model.secretRef names; none is named")
    secret.mkdir()
    (secret / "HF_TOKN").write_text("hf_a_token")
    monkeypatch.setenv("ARGOSY_CREDENTIALS_DIR", str(secret))
    told = failure("hf://acme/private")
    assert told.endswith("the Secret of spec.model.secretRef; it has HF_TOKN")
    assert "hf_a_token" not in told
    told = failure("hf://acme/tiny", "--max-size", "1M")
    assert "6.2 MiB must be stored, and at most 1.0 MiB may be; raise spec.model.cache.sizeLimit" in told
    assert weights(hub) == 0
    told = failure("hf://acme/tiny", "--min-free", str(shutil.disk_usage(tmp_path).total))
    assert told.endswith("give the claim more room, or the model another spec.model.cache")
    assert "secretRef" not in failure("hf://acme/tiny@no-such-revision")


HUB_MODEL = HubModel("https://hub.example", "acme/tiny", "", None)
BUCKET = Bucket("s3://b/tiny", "b", "s3", "https://s3.example", is_anonymous=True)
UNANSWERED: dict[str, list[Exception]] = {
    "hub": [
        unreachable(HUB_MODEL, OSError("[Errno -3] Temporary failure in name resolution")),
        unreachable(HUB_MODEL, socket.gaierror(socket.EAI_NONAME, "unknown")),
        unreachable(HUB_MODEL, OSError("timed out"), "cdn.example"),
    ],
    "bucket": [
        explain(GenericError(f"HTTP error: error sending request\n\nDebug source:\n{said}"), BUCKET, None)
        for said in ("Temporary failure in name resolution", "Name or service not known")
    ],
}


@pytest.mark.parametrize("source", UNANSWERED)
def test_a_source_that_gives_no_answer_is_known_by_its_message(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setattr(models.write_termination_message, "__defaults__", (log,))
    for error in UNANSWERED[source]:
        log.write_text("")
        given_up = TransientError(f"hf://acme/tiny: gave up after 9 failures in a row: {error}")
        assert is_unreachable(str(given_up)), error
        with (
            pytest.raises(TransientError, match="in a cluster, look at its DNS"),
            models.pod_fetch("hf://acme/tiny", free_port(), Progress()),
        ):
            raise given_up
        assert "egress that NetworkPolicies allow, or name a mirror in the Secret" in log.read_text()
    assert not is_unreachable("s3://b: http://s3 does not answer as an object store; check AWS_ENDPOINT_URL")


def weights(hub: HubServer) -> int:
    return sum(seen.path.endswith(".safetensors") for seen in hub.requests("content"))


def test_how_long_another_fetch_may_stand_still_is_a_duration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ARGOSY_LOCK_IDLE", raising=False)
    assert models.lock_idle_after() == 600.0
    monkeypatch.setenv("ARGOSY_LOCK_IDLE", "3m")
    assert models.lock_idle_after() == 180.0
    for value in ("soon", "0s"):
        monkeypatch.setenv("ARGOSY_LOCK_IDLE", value)
        assert main(["models", "pull", "acme/tiny"]) == 2
        assert "ARGOSY_LOCK_IDLE" in capsys.readouterr().err
