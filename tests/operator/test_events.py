"""Events: which changes are reported, counting of equal ones, and the bound of their rate."""

from __future__ import annotations

import asyncio

import pytest
from builders import NOW, isvc, isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import Operator, new_cluster
from virtual_time import virtual_time

from argosy_operator.errors import ApiError
from argosy_operator.kinds import EVENTS
from argosy_operator.reconcile.event_recorder import EVENT_BURST, EVENT_REFILL_SECONDS, EventRecorder
from argosy_operator.status.events import Event, events_between
from argosy_resource.types import Condition, ConditionStatus


def condition(kind: str, status: ConditionStatus, reason: str, message: str = "m") -> Condition:
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=NOW)


FINE = condition("Degraded", "False", "AsExpected")
CRASH = condition("Degraded", "True", "CrashLoopBackOff", "pod p: no config.json")
READY = condition("Ready", "True", "ReplicasRoutable")
NOT_READY = condition("Ready", "False", "Starting")
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
    await recorder.post(isvc("flaps"), flood)
    await recorder.post(isvc("calm"), flood[:1])
    names = [each["involvedObject"]["name"] for each in events(cluster)]
    assert (names.count("flaps"), names.count("calm")) == (EVENT_BURST, 1)
    await asyncio.sleep(EVENT_REFILL_SECONDS + 1)
    await recorder.post(isvc("flaps"), flood)
    assert len(events(cluster)) == EVENT_BURST + 2 - 1, "an equal event is counted, not added"
    assert max(each["count"] for each in events(cluster)) == 2
