"""Events: which changes are reported, counting of equal ones, and the bound of their rate."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from builders import NOW, isvc, isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import Operator, is_ready, living_pods, new_cluster
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError
from argosy_operator.names import EVENTS, PODS
from argosy_operator.reconcile.reporter import EVENT_BURST, EVENT_REFILL_SECONDS, EVENT_RESERVE, EventRecorder
from argosy_operator.status.report import Event, events_between, events_of_change
from argosy_resource.rollout import RolloutStatus
from argosy_resource.scaling import ScalingStatus
from argosy_resource.types import Condition, ConditionStatus, InferenceServiceStatus


def condition(kind: str, status: ConditionStatus, reason: str, message: str = "m") -> Condition:
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=NOW)


FINE = condition("Degraded", "False", "AsExpected")
CRASH = condition("Degraded", "True", "CrashLoopBackOff", "pod p: no config.json")
READY = condition("Ready", "True", "ReplicasRoutable")
NOT_READY = condition("Ready", "False", "Starting")
NO_NODE = condition("WorkloadReady", "False", "Unschedulable", "pod p: 0/2 nodes are available")
HALTED = condition("Progressing", "False", "RolloutHalted")


@pytest.mark.parametrize(
    ("name", "before", "after", "expected"),
    [
        ("nothing changed", [FINE, READY], [FINE, READY], []),
        ("trouble", [FINE], [CRASH], [("Warning", "CrashLoopBackOff", "pod p: no config.json")]),
        ("trouble from the start", [], [CRASH], [("Warning", "CrashLoopBackOff", "pod p: no config.json")]),
        ("the same trouble", [CRASH], [condition("Degraded", "True", "CrashLoopBackOff", "other")], []),
        ("other trouble", [condition("Degraded", "True", "Unschedulable")], [CRASH],
         [("Warning", "CrashLoopBackOff", "pod p: no config.json")]),
        ("the next attempt of the same trouble", [CRASH], [condition("Degraded", "True", "ContainerExited")], []),
        ("trouble ends", [CRASH], [condition("Degraded", "False", "AsExpected", "")],
         [("Normal", "Recovered", "CrashLoopBackOff is over")]),
        ("ready", [NOT_READY], [READY], [("Normal", "ReplicasRoutable", "m")]),
        ("not ready any more", [READY], [NOT_READY], [("Warning", "Starting", "m")]),
        ("not ready because of a change", [READY], [condition("Ready", "False", "RollingOut")],
         [("Normal", "RollingOut", "m")]),
        ("not ready, and Degraded says why", [FINE, READY],
         [CRASH, condition("Ready", "False", "CrashLoopBackOff")],
         [("Warning", "CrashLoopBackOff", "pod p: no config.json")]),
        ("not ready yet", [], [NOT_READY], []),
        ("not ready for another reason", [NOT_READY], [condition("Ready", "False", "RollingOut")], []),
        ("scaled to zero", [READY], [condition("Ready", "True", "ScaledToZero")],
         [("Normal", "ScaledToZero", "m")]),
        ("paused", [], [condition("Progressing", "False", "Paused")], [("Normal", "Paused", "m")]),
        ("halted", [condition("Progressing", "True", "RollingOut")], [HALTED], [("Warning", "RolloutHalted", "m")]),
        ("replaces in place", [], [condition("Progressing", "True", "NoGPUForSurge")],
         [("Normal", "NoGPUForSurge", "m")]),
        ("no node takes it", [condition("WorkloadReady", "False", "Starting")], [NO_NODE],
         [("Normal", "Unschedulable", "pod p: 0/2 nodes are available")]),
        ("no node takes it still", [NO_NODE], [condition("WorkloadReady", "False", "Unschedulable", "0/3 nodes")], []),
        ("no node has taken it for long", [FINE, NO_NODE], [condition("Degraded", "True", "Unschedulable"), NO_NODE],
         [("Warning", "Unschedulable", "m")]),
        ("no node takes it, and it was ready", [READY], [condition("Ready", "False", "Unschedulable"), NO_NODE],
         [("Warning", "Unschedulable", "m")]),
        ("no node takes the surge", [], [condition("Progressing", "True", "NoGPUForSurge"), NO_NODE],
         [("Normal", "NoGPUForSurge", "m")]),
        ("no volume", [], [condition("WorkloadReady", "False", "VolumesNotMounted")],
         [("Warning", "VolumesNotMounted", "m")]),
        ("stopped", [READY], [condition("Ready", "True", "Stopped")], [("Normal", "Stopped", "m")]),
        ("a common rollout", [], [condition("Progressing", "True", "RollingOut")], []),
    ],
)  # fmt: skip
def test_news(
    name: str, before: list[Condition], after: list[Condition], expected: list[tuple[str, str, str]]
) -> None:
    assert [(each.type, each.reason, each.message) for each in events_between(before, after)] == expected, (
        name
    )


def events(cluster: FakeKubernetes) -> list[Object]:
    return [obj for (kind, _, _), obj in cluster.objects.items() if kind is EVENTS]


@virtual_time
async def test_a_crash_and_a_recovery_are_reported_once_each() -> None:
    cluster = new_cluster()
    cluster.broken_images.add("broken:1")
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec["engine"].update(image="broken:1"))
        await operator.settle()
        cluster.broken_images.clear()
        await operator.settle()
    found = [(each["type"], each["reason"], each["count"]) for each in events(cluster)]
    assert sorted(found) == [
        ("Normal", "Recovered", 1),
        ("Normal", "ReplicasRoutable", 2),
        ("Normal", "RollingOut", 1),
        ("Warning", "ImagePullBackOff", 1),
        ("Warning", "RolloutHalted", 1),
    ]
    about = {(each["involvedObject"]["kind"], each["involvedObject"]["uid"]) for each in events(cluster)}
    assert about == {("InferenceService", cluster.isvc()["metadata"]["uid"])}
    assert all(each["metadata"]["namespace"] == "team" for each in events(cluster))


@virtual_time
async def test_a_replica_without_a_node_has_an_event_at_once_and_none_at_rest() -> None:
    cluster = new_cluster()
    cluster.room = 0
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        (found,) = events(cluster)
        assert (found["type"], found["reason"], found["count"]) == ("Normal", "Unschedulable", 1)
        assert "pod tiny-engine-" in found["message"]
        assert "0/1 nodes are available: 1 Insufficient cpu." in found["message"]
        before = len(cluster.writes)
        await asyncio.sleep(200)
        assert cluster.writes[before:] == []


@virtual_time
async def test_refused_events_cost_nothing_but_themselves() -> None:
    cluster = new_cluster()
    apply = cluster.apply

    async def refuse(manifest: Object) -> Object:
        if manifest["kind"] == "Event":
            raise ApiError("PATCH", 403, "events are forbidden")
        return await apply(manifest)

    cluster.apply = refuse  # type: ignore[method-assign]
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert events(cluster) == []


@virtual_time
async def test_a_flapping_service_is_held_to_a_rate() -> None:
    cluster = FakeKubernetes()
    recorder = EventRecorder(cluster, now=lambda: NOW)
    flood = [Event("Warning", "Flaps", str(number)) for number in range(3 * EVENT_BURST)]
    flaps, calm = isvc("flaps").metadata, isvc("calm").metadata
    await recorder.post(flaps, flood)
    await recorder.post(calm, flood[:1])
    names = [each["involvedObject"]["name"] for each in events(cluster)]
    assert (names.count("flaps"), names.count("calm")) == (EVENT_BURST, 1)
    await asyncio.sleep(EVENT_REFILL_SECONDS + 1)
    await recorder.post(flaps, flood)
    assert len(events(cluster)) == EVENT_BURST + 2 - 1, "an equal event is counted, not added"
    assert max(each["count"] for each in events(cluster)) == 2


@virtual_time
async def test_what_is_normal_leaves_room_for_warnings() -> None:
    cluster = FakeKubernetes()
    recorder = EventRecorder(cluster, now=lambda: NOW)
    busy = isvc("busy").metadata
    await recorder.post(busy, [Event("Normal", "Scaled", str(number)) for number in range(3 * EVENT_BURST)])
    await recorder.post(busy, [Event("Warning", "NodeLost", str(number)) for number in range(EVENT_BURST)])
    reasons = [each["reason"] for each in events(cluster)]
    assert (reasons.count("Scaled"), reasons.count("NodeLost")) == (
        EVENT_BURST - EVENT_RESERVE,
        EVENT_RESERVE,
    )


def scaled(wanted: int) -> InferenceServiceStatus:
    return InferenceServiceStatus(
        scaling=ScalingStatus(wanted=wanted, reason="Concurrency", message="90 sequences", time=NOW)
    )


def canary(step: int, revision: str = "r2") -> InferenceServiceStatus:
    return InferenceServiceStatus(
        rollout=RolloutStatus(phase="Analyzing", revision=revision, step=step, steps=3)
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (scaled(1), scaled(4), [("Normal", "Scaled", "from 1 to 4 replicas: 90 sequences")]),
        (scaled(4), scaled(4), []),
        (InferenceServiceStatus(), scaled(4), []),
        (scaled(4), InferenceServiceStatus(), []),
        (canary(1), canary(2), [("Normal", "CanaryStep", "revision r2: step 2 of 3")]),
        (canary(2), canary(2), []),
        (canary(2), canary(1, "r3"), []),
        (InferenceServiceStatus(), canary(1), []),
    ],
    ids=[
        "scaled",
        "at rest",
        "the first number",
        "scaling was removed",
        "a canary's next step",
        "the same step",
        "another canary, whose start is told by its condition",
        "a canary starts",
    ],
)
def test_numbers_and_steps_that_change(
    before: InferenceServiceStatus, after: InferenceServiceStatus, expected: list[tuple[str, str, str]]
) -> None:
    assert [(each.type, each.reason, each.message) for each in events_of_change(before, after)] == expected


@virtual_time
async def test_a_resource_that_cannot_be_read_has_one_warning() -> None:
    """The API server refuses it today; one that was stored under an older definition is there all the same."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        cluster.edit("tiny", lambda spec: spec.update(replicas="two"))
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec.update(replicas="three"))
        await operator.settle()
    ((kind, reason),) = {(each["type"], each["reason"]) for each in events(cluster)}
    assert (kind, reason) == ("Warning", "InvalidSpec")
    assert len(events(cluster)) == 1


@virtual_time
async def test_scaling_by_load_is_told() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling={"maxReplicas": 4, "metrics": {"concurrency": 8}}))
        await operator.settle()
        operator.router.each = msgspec.structs.replace(operator.router.each, requests=16)
        await asyncio.sleep(20)
        await operator.settle()
    told = [each["message"] for each in events(cluster) if each["reason"] == "Scaled"]
    assert told
    assert told[0].startswith("from 1 to ")


def posted(cluster: FakeKubernetes, kind: str) -> set[str]:
    """Reasons of the events of this type."""
    found = (obj for key, obj in cluster.objects.items() if key[0] is EVENTS)
    return {obj["reason"] for obj in found if obj["type"] == kind}


@virtual_time
async def test_a_replica_that_is_lost_without_an_edit_is_a_warning() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec["engine"].update(threads=2))
        await operator.settle()
        assert "RollingOut" in posted(cluster, "Normal")
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        await operator.settle()
        assert not posted(cluster, "Warning"), "an edit"
        cluster.remove((PODS, "team", living_pods(cluster)[0]["metadata"]["name"]))
        await operator.settle()
        assert posted(cluster, "Warning") == {"WaitingForReplicas"}
        assert is_ready(cluster), "it was replaced"
