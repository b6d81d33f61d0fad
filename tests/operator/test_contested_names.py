"""Services that claim one name, and canaries, which may share it."""

from __future__ import annotations

from builders import isvc_object
from harness import (
    Operator,
    deployment,
    is_ready,
    new_cluster,
)
from virtual_time import virtual_time

from argosy_operator.names import INFERENCE_SERVICES
from argosy_protocol.fleet import Canary, decode_fleet


@virtual_time
async def test_the_older_service_keeps_a_contested_name() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object("first", model={"source": "builtin://tiny", "servedName": "chat"}))
        late = isvc_object("second", model={"source": "builtin://tiny", "servedName": "chat"})
        late["metadata"]["creationTimestamp"] = "2025-06-01T00:00:00Z"
        cluster.create(late)
        await operator.settle()
        assert is_ready(cluster, "first")
        conflict = cluster.condition("Ready", "second")
        assert (conflict["status"], conflict["reason"]) == ("False", "NameConflict")
        assert "team/first" in conflict["message"]
        cluster.remove((INFERENCE_SERVICES, "team", "first"))
        await operator.settle()
    assert is_ready(cluster, "second")


@virtual_time
async def test_a_service_and_its_canary_may_serve_the_same_name() -> None:
    cluster = new_cluster()
    model = {"source": "builtin://tiny", "servedName": "chat"}
    canary = {"service": "next", "weight": 10}
    async with Operator(cluster) as operator:
        cluster.create(isvc_object("next", model=model))
        late = isvc_object("stable", model=model)
        late["metadata"]["creationTimestamp"] = "2025-06-01T00:00:00Z"
        cluster.create(late)
        await operator.settle()
        assert cluster.condition("Ready", "stable")["reason"] == "NameConflict"
        cluster.edit("stable", lambda spec: spec.update(router={"canary": canary}))
        await operator.settle()
        assert is_ready(cluster, "stable")
        assert is_ready(cluster, "next")
        cluster.edit("stable", lambda spec: spec.pop("router"))
        await operator.settle()
        assert cluster.condition("Ready", "stable")["reason"] == "NameConflict"


@virtual_time
async def test_a_canary_may_come_and_go() -> None:
    cluster = new_cluster()
    canary = {"service": "next", "weight": 10}

    def degraded() -> str:
        reason: str = cluster.condition("Degraded", "stable")["reason"]
        return reason

    async with Operator(cluster) as operator:
        cluster.create(isvc_object("stable", router={"canary": canary}))
        await operator.settle()
        assert is_ready(cluster, "stable")
        assert degraded() == "CanaryNotFound"
        before = deployment(cluster, "stable")["metadata"]["generation"]
        cluster.create(isvc_object("next"))
        await operator.settle()
        assert degraded() == "AsExpected"
        published = decode_fleet(cluster.fleet()).services
        entry = next(each for each in published if each.name == "stable")
        assert entry.canary == Canary(service="next", weight=10)
        cluster.remove((INFERENCE_SERVICES, "team", "next"))
        await operator.settle()
        assert degraded() == "CanaryNotFound"
        assert deployment(cluster, "stable")["metadata"]["generation"] == before, "no pod is touched"
