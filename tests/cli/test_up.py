"""`argosy up`: the summary that it prints, and what it says to a supervisor of an earlier version."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.commands.up import summary
from argosy.local.control import FleetStatus, RouterStatus, ServiceStatus, StateDir, encode
from argosy.main import main

MANIFEST = """\
apiVersion: inference.argosy.dev/v1alpha1
kind: InferenceService
metadata: {name: tiny}
spec: {model: {source: builtin://tiny}}
"""


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
    manifest.write_text(MANIFEST)
    assert main(["up", "-f", str(manifest), "--state-dir", str(earlier_fleet.root)]) == 0
    assert capsys.readouterr().out.endswith("ready: http://127.0.0.1:8080/v1\n")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("sk-a name=a\nsk-b colour=red\nsk-c models=\n", ["line 2: unknown term 'colour'", "line 3: "]),
        ("sk-a x\n" * 12, ["line 1: ", "line 10: ", "2 more lines"]),
        ("", ["no key is accepted: it is empty"]),
        ("sk-a name=a weight=2\n# a comment\n", []),
    ],
)
def test_lines_whose_keys_the_router_refuses_are_named(
    earlier_fleet: StateDir, content: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, keys = earlier_fleet.root / "fleet.yaml", earlier_fleet.root / "keys"
    manifest.write_text(MANIFEST)
    keys.write_text(content)
    flags = ["--state-dir", str(earlier_fleet.root), "--api-keys-file", str(keys)]
    assert main(["up", "-f", str(manifest), *flags]) == 0
    error = capsys.readouterr().err
    assert "sk-" not in error
    assert [each for each in told if f"{keys}: {each}" not in error] == []
    assert ("the router refuses these keys" in error) == bool(told)
    assert "line 11" not in error
