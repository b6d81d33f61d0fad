"""Rollouts that find no quota, memory or node for an additional replica, and what the status says of them."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from typing import Any

import pytest
from builders import isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import (
    Operator,
    condition,
    deployment,
    edit_engine,
    is_ready,
    living_pods,
    new_cluster,
    num_routable,
    watch_routable,
)
from virtual_time import virtual_time

from argosy_operator.desired.rollout import NUDGE_SECONDS, ROOM_SECONDS
from argosy_operator.names import EVENTS, INFERENCE_SERVICES, NUDGE_ANNOTATION

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
CANARY = {"canary": {"steps": [{"weight": 20, "pauseSeconds": 60}]}, "progressDeadlineSeconds": 600}


def now() -> str:
    time = START + datetime.timedelta(seconds=asyncio.get_running_loop().time())
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def with_quota(pods: int) -> FakeKubernetes:
    """A cluster whose namespace may have so many pods, those that terminate included."""
    cluster = new_cluster()
    cluster.now = now
    set_quota(cluster, pods)
    return cluster


def set_quota(cluster: FakeKubernetes, pods: int) -> None:
    cluster.has_quota = lambda name: len(cluster.pods()) < pods


def without_room(words: str, replicas: int) -> FakeKubernetes:
    """A cluster whose nodes take so many replicas."""
    cluster = new_cluster()
    cluster.now = now

    def lacks(pod: Object) -> str:
        taken = sum("nodeName" in each["spec"] for each in cluster.pods())
        return words if taken >= replicas else ""

    cluster.lacks = lacks
    return cluster


async def pass_time(cluster: FakeKubernetes, seconds: int) -> None:
    for _ in range(seconds):
        await asyncio.sleep(1)
        cluster.step()


async def until(cluster: FakeKubernetes, what: Callable[[], bool], seconds: int) -> None:
    for _ in range(seconds):
        if what():
            return
        await pass_time(cluster, 1)
    raise AssertionError(f"not within {seconds} s")


def watch_reasons(cluster: FakeKubernetes, kind: str) -> list[tuple[str, str]]:
    """A list that gets status and reason of a condition with each change of the service."""
    found: list[tuple[str, str]] = []

    def note(changed: Any, event: str, obj: Object) -> None:
        if changed is INFERENCE_SERVICES and cluster.condition(kind):
            found.append(condition(cluster, kind))

    cluster.listeners.append(note)
    return found


def warnings(cluster: FakeKubernetes) -> set[str]:
    return {
        obj["reason"] for key, obj in cluster.objects.items() if key[0] is EVENTS and obj["type"] == "Warning"
    }


@virtual_time
async def test_a_full_quota_replaces_in_place_where_another_replica_serves() -> None:
    cluster = with_quota(3)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=3))
        await operator.settle()
        assert is_ready(cluster)
        old = {pod["metadata"]["name"] for pod in living_pods(cluster)}
        lowest, progress = watch_routable(cluster), watch_reasons(cluster, "Progressing")
        edit_engine(cluster, threads=2)
        await until(cluster, lambda: not is_ready(cluster), 5)
        await until(
            cluster, lambda: is_ready(cluster) and condition(cluster, "Progressing")[1] == "Complete", 600
        )
    assert not old & {pod["metadata"]["name"] for pod in living_pods(cluster)}
    assert min(lowest) == 2
    assert ("True", "NoRoomForSurge") in progress
    assert ("True", "WaitingForCapacity") not in progress
    assert condition(cluster, "Degraded") == ("False", "AsExpected")


@virtual_time
async def test_a_full_quota_and_one_replica_stall_and_the_ways_out_are_named() -> None:
    cluster = with_quota(1)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        edit_engine(cluster, threads=2)
        await pass_time(cluster, 5)
        assert condition(cluster, "Progressing") == ("False", "WaitingForCapacity")
        assert condition(cluster, "Stalled") == ("True", "WaitingForCapacity")
        assert condition(cluster, "Reconciling")[0] == "False"
        assert condition(cluster, "Ready") == ("False", "WaitingForCapacity")
        assert condition(cluster, "Routable")[0] == "True", "the old replica serves"
        for kind in ("Ready", "Stalled"):
            message = cluster.condition(kind)["message"]
            assert "exceeded quota: team" in message
            assert "raise the quota, or set rollout.maxUnavailable to 1" in message
        assert "WaitingForCapacity" in warnings(cluster)
        cluster.edit("tiny", lambda spec: spec.update(rollout={"maxUnavailable": 1}))
        await until(cluster, lambda: is_ready(cluster), 300)
        assert condition(cluster, "Stalled") == ("False", "AsExpected")


@virtual_time
async def test_a_quota_that_is_raised_late_is_noticed_soon() -> None:
    """The ReplicaSet controller waits ever longer."""
    cluster = with_quota(1)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        edit_engine(cluster, threads=2)
        await pass_time(cluster, 700)
        assert len(living_pods(cluster)) == 1
        set_quota(cluster, 2)
        await until(cluster, lambda: len(living_pods(cluster)) == 2, NUDGE_SECONDS + 5)
        await until(cluster, lambda: is_ready(cluster), 100)
        await operator.settle()
        assert NUDGE_ANNOTATION not in deployment(cluster)["metadata"]["annotations"]


@virtual_time
async def test_a_refused_rollout_is_written_no_more_often_than_it_is_asked_again() -> None:
    cluster = with_quota(1)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        edit_engine(cluster, threads=2)
        await pass_time(cluster, 60)
        before = len(cluster.writes)
        await pass_time(cluster, 10 * NUDGE_SECONDS)
        assert 9 <= len(cluster.writes) - before <= 11
        assert {kind for _, kind, _ in cluster.writes[before:]} == {"Deployment"}


@pytest.mark.parametrize("is_quota", [True, False], ids=["quota", "gpu"])
@virtual_time
async def test_a_revert_of_a_rollout_without_room_recovers(is_quota: bool) -> None:
    cluster = with_quota(1) if is_quota else new_cluster(gpus=1)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(**({} if is_quota else {"resources": {"gpu": {}}})))
        await operator.settle()
        (old,) = living_pods(cluster)
        edit_engine(cluster, threads=2)
        await pass_time(cluster, 60)
        assert condition(cluster, "Progressing")[1] == "WaitingForCapacity"
        assert "rollout.maxUnavailable to 1" in cluster.condition("Ready")["message"]
        cluster.edit("tiny", lambda spec: spec["engine"].pop("threads"))
        await until(cluster, lambda: is_ready(cluster), 60)
        await operator.settle()
        assert [pod["metadata"]["uid"] for pod in living_pods(cluster)] == [old["metadata"]["uid"]]
        for kind in ("Stalled", "Degraded"):
            assert condition(cluster, kind) == ("False", "AsExpected")


@virtual_time
async def test_a_new_service_whose_pods_are_refused_is_stalled_until_they_are_not() -> None:
    cluster = with_quota(0)
    async with Operator(cluster, now=now):
        cluster.create(isvc_object())
        await pass_time(cluster, 10)
        assert condition(cluster, "Progressing") == ("False", "FailedCreate")
        assert condition(cluster, "Stalled") == ("True", "FailedCreate")
        await pass_time(cluster, 500)
        set_quota(cluster, 1)
        await until(cluster, lambda: is_ready(cluster), NUDGE_SECONDS + 30)


@pytest.mark.parametrize("words", ["Insufficient memory", "node(s) didn't match pod anti-affinity rules"])
@virtual_time
async def test_without_a_node_for_a_surge_replicas_are_replaced_in_place_after_the_deadline(
    words: str,
) -> None:
    cluster = without_room(words, 2)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        assert is_ready(cluster)
        lowest = watch_routable(cluster)
        edit_engine(cluster, threads=2)
        await pass_time(cluster, ROOM_SECONDS - 20)
        assert condition(cluster, "Progressing") == ("True", "NoRoomForSurge")
        message = cluster.condition("Progressing")["message"]
        assert words in message
        assert f"within {ROOM_SECONDS} s" in message
        assert min(lowest) == 2, "an autoscaler may add a node"
        await until(cluster, lambda: is_ready(cluster), 400)
        assert min(lowest) == 1
        assert condition(cluster, "Degraded") == ("False", "AsExpected")


@virtual_time
async def test_one_replica_without_a_node_for_its_successor_waits_and_says_so() -> None:
    cluster = without_room("Insufficient memory", 1)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        edit_engine(cluster, threads=2)
        await pass_time(cluster, 2 * ROOM_SECONDS)
        assert condition(cluster, "Progressing") == ("True", "WaitingForCapacity")
        assert (
            "make room, or add a node, or set rollout.maxUnavailable to 1"
            in cluster.condition("Ready")["message"]
        )
        assert num_routable(cluster) == 1


@virtual_time
async def test_a_gate_that_keeps_a_replica_from_the_scheduler_is_named() -> None:
    cluster = new_cluster()
    cluster.is_gated = lambda pod: True
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        assert condition(cluster, "WorkloadReady") == ("False", "SchedulingGated")
        assert condition(cluster, "Ready") == ("False", "SchedulingGated")
        assert "kueue.x-k8s.io/admission" in cluster.condition("Ready")["message"]
        await pass_time(cluster, 2 * ROOM_SECONDS)
        assert condition(cluster, "Degraded") == ("False", "AsExpected"), "a queue may be long"


@virtual_time
async def test_a_canary_whose_replicas_the_quota_refuses_fails_with_the_reason() -> None:
    cluster = with_quota(2)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=2, rollout=CANARY))
        await operator.settle()
        edit_engine(cluster, threads=2)
        await pass_time(cluster, 60)
        assert condition(cluster, "Progressing") == ("True", "CanaryStarting")
        assert condition(cluster, "Degraded") == ("True", "FailedCreate")
        assert "exceeded quota: team" in cluster.condition("Degraded")["message"]
        assert "exceeded quota: team" in cluster.isvc()["status"]["rollout"]["message"]
        await pass_time(cluster, 600)
        assert condition(cluster, "Progressing") == ("False", "CanaryFailed")
        assert "exceeded quota: team" in cluster.condition("Progressing")["message"]
        assert num_routable(cluster) == 2


@virtual_time
async def test_a_canary_goes_on_soon_after_the_quota_was_raised() -> None:
    cluster = with_quota(2)
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=2, rollout=CANARY))
        await operator.settle()
        edit_engine(cluster, threads=2)
        await pass_time(cluster, 500)
        assert len(living_pods(cluster)) == 2
        set_quota(cluster, 4)
        await until(cluster, lambda: len(living_pods(cluster)) == 3, NUDGE_SECONDS + 5)
