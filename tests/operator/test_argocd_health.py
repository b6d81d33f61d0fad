"""The health check for Argo CD, run as Lua 5.1 over resources as the operator leaves them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import isvc_object
from harness import edit_engine, is_ready, new_cluster, settled
from virtual_time import virtual_time

lupa = pytest.importorskip("lupa", reason="needs lupa, of the group `test`")
SCRIPT = (Path(__file__).parents[2] / "deploy" / "argocd" / "health.lua").read_text()


def health(obj: dict[str, Any]) -> tuple[str, str]:
    """Status and message, as Argo CD asks for them: the resource is the global `obj`."""
    runtime = lupa.lua51.LuaRuntime(register_eval=False, register_builtins=False)
    runtime.globals()["obj"] = runtime.table_from(obj, recursive=True)
    found = runtime.execute(SCRIPT)
    return found["status"], found["message"]


def test_a_resource_that_no_operator_has_seen_is_progressing() -> None:
    cluster = new_cluster()
    cluster.create(isvc_object())
    assert health(cluster.isvc()) == ("Progressing", "waiting for the operator")
    bare = {each: value for each, value in cluster.isvc().items() if each != "status"}
    assert health(bare)[0] == "Progressing"


@virtual_time
async def test_healthy_once_replicas_are_routable_and_progressing_before() -> None:
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        assert is_ready(cluster)
        assert health(cluster.isvc()) == ("Healthy", "ReplicasRoutable: 2/2 replicas routable")
        edit_engine(cluster, threads=2)
        assert health(cluster.isvc()) == ("Progressing", "waiting for the operator"), "of an older generation"
        seen = set()
        cluster.listeners.append(lambda kind, event, obj: seen.add(health(cluster.isvc())[0]))
        await operator.settle()
        assert seen == {"Progressing", "Healthy"}
        assert health(cluster.isvc())[0] == "Healthy"


@virtual_time
async def test_a_service_without_replicas_is_healthy() -> None:
    async with settled(isvc_object(replicas=0)) as (cluster, _):
        status, message = health(cluster.isvc())
        assert status == "Healthy", "a sync waits for every other one"
        assert message.startswith("Stopped: spec.replicas is 0: requests are refused")


@virtual_time
async def test_an_edit_that_no_replica_has_tried_is_suspended() -> None:
    scaling = {"maxReplicas": 1, "minReplicas": 0, "idleSeconds": 60}
    async with settled(isvc_object(scaling=scaling)) as (cluster, operator):
        await asyncio.sleep(100)
        operator.router.load = msgspec.structs.replace(operator.router.load, idle_s=90.0)
        await asyncio.sleep(20)
        await operator.settle()
        assert health(cluster.isvc())[0] == "Healthy"
        edit_engine(cluster, threads=2)
        await operator.settle()
        status, message = health(cluster.isvc())
        assert (status, message.split(":")[0]) == ("Suspended", "Untried")


@virtual_time
async def test_without_routers_it_stays_progressing() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        operator.router.set(synced=False)
        edit_engine(cluster, threads=2)
        await operator.settle()
        assert health(cluster.isvc())[0] == "Progressing"


@virtual_time
async def test_what_needs_a_person_is_degraded() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        cluster.broken_images.add("wrong")
        edit_engine(cluster, image="wrong")
        await operator.settle()
        status, message = health(cluster.isvc())
        assert status == "Degraded"
        assert "pod tiny-engine-" in message


@virtual_time
async def test_a_change_that_is_held_back_is_suspended() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        cluster.edit("tiny", lambda spec: spec.update(paused=True))
        await operator.settle()
        assert health(cluster.isvc())[0] == "Healthy", "nothing is held back"
        edit_engine(cluster, threads=2)
        await operator.settle()
        assert health(cluster.isvc())[0] == "Suspended"


@virtual_time
async def test_a_canary_that_waits_for_a_person_is_suspended_and_a_failed_one_degraded() -> None:
    canary = {"steps": [{"weight": 0, "hold": True}, {"weight": 10}]}
    async with settled(isvc_object(replicas=2, rollout={"canary": canary})) as (cluster, operator):
        edit_engine(cluster, threads=2)
        await operator.settle()
        status, message = health(cluster.isvc())
        assert (status, message.split(":")[0]) == ("Suspended", "CanaryHeld")
        action = {"type": "Abort", "revision": cluster.isvc()["status"]["rollout"]["revision"]}
        cluster.edit("tiny", lambda spec: spec["rollout"]["canary"].update(action=action))
        await operator.settle()
        status, message = health(cluster.isvc())
        assert (status, message.split(":")[0]) == ("Degraded", "CanaryFailed")
