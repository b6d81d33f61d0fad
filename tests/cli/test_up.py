"""`argosy up`: the summary that it prints, and what it says to a supervisor of an earlier version."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.commands.up import summary
from argosy.local.control_messages import FleetStatus, RouterStatus, ServiceStatus, encode
from argosy.local.state_dir import StateDir
from argosy.main import main


def test_services_of_one_model_are_listed_separately() -> None:
    router = RouterStatus(url="http://127.0.0.1:8080", is_ready=True)
    services = tuple(
        ServiceStatus(key=key, model="chat", desired=1, revision="r")
        for key in ("default/chat", "default/next")
    )
    lines = summary(FleetStatus(pid=1, router=router, services=services)).splitlines()
    assert lines[1:] == ["  chat  0/1 replicas", "  chat (next)  0/1 replicas"]


@pytest.fixture
def earlier_fleet(tmp_path: Path) -> Iterator[StateDir]:
    """A fleet that is ready, of a supervisor that does not report which key its router requires."""
    status = FleetStatus(pid=1, router=RouterStatus(url="http://127.0.0.1:8080", is_ready=True))
    reply = json.loads(encode(status))
    del reply["router"]["api_key_fingerprint"]
    state = StateDir(tmp_path / "state")
    state.create()
    listener = state.listen()

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the end of the test
                return
            with connection:
                connection.makefile("rb").readline()
                connection.sendall(json.dumps(reply).encode() + b"\n")

    thread = threading.Thread(target=answer)
    thread.start()
    yield state
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


def test_a_key_that_is_not_reported_is_not_compared(
    earlier_fleet: StateDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARGOSY_ROUTER_API_KEY", "sesame")
    manifest = earlier_fleet.root / "fleet.yaml"
    manifest.write_text(
        "apiVersion: inference.argosy.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: tiny}\n"
        "spec: {model: {source: builtin://tiny}}\n"
    )
    assert main(["up", "-f", str(manifest), "--state-dir", str(earlier_fleet.root)]) == 0
    assert capsys.readouterr().out.endswith("ready: http://127.0.0.1:8080/v1\n")
