"""Rollouts over time: edits without a routable gap, GPUs for the surge, and replacements that fail."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from builders import isvc_object
from fake_kubernetes import Object
from harness import (
    Operator,
    edit_engine,
    is_ready,
    new_cluster,
    num_routable,
    settled,
    watch_routable,
)
from virtual_time import virtual_time

from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, REVISION_LABEL


@virtual_time
async def test_edit_rolls_without_a_routable_gap() -> None:
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        before = {pod["metadata"]["labels"][REVISION_LABEL] for pod in cluster.pods()}
        routable = watch_routable(cluster)
        edit_engine(cluster, threads=2)
        await asyncio.sleep(0.1)
        assert not is_ready(cluster), "Ready ends with the edit, before the rollout"
        await operator.settle()
    after = {pod["metadata"]["labels"][REVISION_LABEL] for pod in cluster.pods()}
    assert before.isdisjoint(after)
    assert min(routable) >= 2
    assert is_ready(cluster)
    assert cluster.isvc()["status"]["observedGeneration"] == 2


@virtual_time
async def test_rapid_edits_and_a_revert_keep_what_serves() -> None:
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        routable = watch_routable(cluster)
        for threads in (2, 3, 4, 5):
            cluster.edit("tiny", lambda spec, threads=threads: spec["engine"].update(threads=threads))
            await asyncio.sleep(0.5)
            cluster.step()
        cluster.edit("tiny", lambda spec: spec["engine"].pop("threads"))
        await operator.settle()
    assert min(routable) >= 2
    assert is_ready(cluster)
    assert len(cluster.pods()) == 2


@virtual_time
async def test_no_gpu_for_a_surge_replaces_in_place_and_goes_back() -> None:
    cluster = new_cluster(gpus=2)
    reasons: list[str] = []
    surges: list[int] = []

    def note(kind: Any, event: str, obj: Object) -> None:
        if kind is INFERENCE_SERVICES:
            reasons.append(cluster.condition("Progressing").get("reason", ""))
        if kind is DEPLOYMENTS:
            surges.append(obj["spec"]["strategy"]["rollingUpdate"]["maxSurge"])

    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2, resources={"gpu": {}}))
        await operator.settle()
        assert is_ready(cluster)
        cluster.listeners.append(note)
        edit_engine(cluster, threads=2)
        await operator.settle()
    assert "NoGPUForSurge" in reasons
    assert reasons[-1] == "Complete"
    assert [surge for surge, _ in itertools.groupby(surges)] == [1, 0, 1], "it must not flap"
    assert is_ready(cluster)
    assert len(cluster.pods()) == 2


@virtual_time
async def test_one_spare_gpu_is_enough_for_a_rollout_without_a_gap() -> None:
    """The GPU of a replica that terminates is not free yet; that is no reason to give up the surge."""
    async with settled(isvc_object(replicas=3, resources={"gpu": {}}), gpus=4) as (cluster, operator):
        routable = watch_routable(cluster)
        edit_engine(cluster, threads=2)
        await operator.settle()
    assert min(routable) >= 3
    assert is_ready(cluster)


@virtual_time
async def test_a_broken_change_keeps_the_old_replicas() -> None:
    cluster = new_cluster()
    cluster.broken_images.add("broken:1")
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        edit_engine(cluster, image="broken:1")
        await operator.settle()
        ready = cluster.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "RolloutHalted")
        assert cluster.condition("Routable")["status"] == "True"
        assert num_routable(cluster) == 2
        cluster.edit("tiny", lambda spec: spec["engine"].pop("image"))
        await operator.settle()
    assert is_ready(cluster)
    assert cluster.condition("Degraded")["status"] == "False"
