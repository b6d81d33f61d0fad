"""The summary that `argosy up` prints."""

from __future__ import annotations

from argosy.commands.up import summary
from argosy.local.control_messages import FleetStatus, RouterStatus, ServiceStatus


def test_services_of_one_model_are_listed_separately() -> None:
    router = RouterStatus(url="http://127.0.0.1:8080", is_ready=True)
    services = tuple(
        ServiceStatus(key=key, model="chat", desired=1, revision="r")
        for key in ("default/chat", "default/next")
    )
    lines = summary(FleetStatus(pid=1, router=router, services=services)).splitlines()
    assert lines[1:] == ["  chat  0/1 replicas", "  chat (next)  0/1 replicas"]
