"""`argosy why` of the local fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from argosy.commands import cluster
from argosy.commands.cluster import local_diagnosis
from argosy.diagnosis import render
from argosy.errors import OK, CommandError
from argosy.local.control import FleetStatus, ReplicaStatus, RouterStatus, ServiceStatus


def test_the_only_service_of_a_local_fleet_needs_no_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ServiceStatus(
        key="default/tiny", model="tiny", desired=1, revision="r", replicas=(replica("Routable"),)
    )
    other = msgspec.structs.replace(local, key="default/other")
    router = RouterStatus(url="http://127.0.0.1:8080/v1", is_ready=True)
    services = (local,)
    monkeypatch.setattr(
        cluster, "current_status", lambda _, **__: FleetStatus(pid=1, router=router, services=services)
    )
    assert cluster.why(["--state-dir", str(tmp_path)]) == OK
    services = (local, other)
    with pytest.raises(CommandError, match="name a service; there are: other, tiny"):
        cluster.why(["--state-dir", str(tmp_path)])


def replica(phase: Any, reason: str = "", *, is_current: bool = True, restarts: int = 0) -> ReplicaStatus:
    return ReplicaStatus(
        name="tiny-0",
        service="default/tiny",
        revision="r",
        is_current=is_current,
        phase=phase,
        reason=reason,
        restarts=restarts,
        pid=7,
    )


@pytest.mark.parametrize(
    ("replicas", "router_ready", "name", "state", "words"),
    [
        ([replica("Routable")], True, "ready", "done", ["http://127.0.0.1:8080/v1", "'tiny'"]),
        ([replica("Routable"), replica("Ready")], True, "routable", "waiting", ["not synced"]),
        ([replica("Routable")], False, "routable", "failed", ["the port is taken", "log of router"]),
        ([replica("Starting")], True, "loaded", "waiting", ["loads the model", "log of tiny-0"]),
        (
            [replica("Routable", is_current=False), replica("BackOff", "exit code 2", restarts=3)],
            True,
            "process",
            "failed",
            ["exit code 2, 3 restarts", "log of tiny-0", "argosy logs tiny-0", "started again by itself"],
        ),
        (
            [replica("BackOff", "exited with code 2; the next `argosy up` starts it again")],
            True,
            "process",
            "failed",
            ["correct what its last lines name, and `argosy up -f FILE`. `argosy logs"],
        ),
        ([], True, "process", "waiting", ["none has started yet"]),
        (
            [replica("Routable", is_current=False), replica("Starting")],
            True,
            "loaded",
            "waiting",
            ["note: clients are served meanwhile: 1 replica is routable, none of the newest revision"],
        ),
    ],
)
def test_a_local_fleet(
    replicas: list[ReplicaStatus], router_ready: bool, name: str, state: str, words: list[str]
) -> None:
    local = ServiceStatus(key="default/tiny", model="tiny", desired=1, revision="r", replicas=tuple(replicas))
    router = RouterStatus(
        url="http://127.0.0.1:8080/v1",
        is_ready=router_ready,
        reason="" if router_ready else "the port is taken",
    )
    status = FleetStatus(pid=1, router=router, services=(local,))
    found = local_diagnosis(status, local, lambda process: [f"log of {process}"])
    text = render(found)
    assert (found.links[-1].name, found.links[-1].state) == (name, state), text
    assert all(word in text for word in words), text


def test_the_way_back_from_a_halted_rollout_of_a_local_fleet_is_told() -> None:
    local = ServiceStatus(
        key="default/tiny",
        model="tiny",
        desired=1,
        revision="r",
        reason="RolloutHalted: tiny-0 does not become ready (exit code 1)",
        replicas=(replica("Routable", is_current=False), replica("BackOff", "exit code 1")),
    )
    router = RouterStatus(url="http://127.0.0.1:8080/v1", is_ready=True)
    status = FleetStatus(pid=1, router=router, services=(local,))
    remedy = local_diagnosis(status, local, lambda _: []).links[-1].remedy
    assert "`argosy up -f FILE` with the previous manifest" in remedy
    assert "started again by itself" not in remedy


def test_a_service_that_is_scaled_to_zero_here() -> None:
    local = ServiceStatus(key="default/tiny", model="tiny", desired=0, revision="r")
    status = FleetStatus(pid=1, router=RouterStatus(url="u", is_ready=True), services=(local,))
    found = local_diagnosis(status, local, lambda _: [])
    assert (found.links[-1].state, found.links[-1].detail) == ("stopped", "spec.replicas is 0")
    assert not found.is_served
