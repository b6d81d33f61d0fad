"""Which old replicas a rollout removes at once, and when it had better not."""

from __future__ import annotations

from typing import Any

import pytest
from builders import gate_condition, pod, pod_object

from argosy_operator.desired.rollout import failed_replicas, unavailable_without
from argosy_operator.observation import Observation
from argosy_operator.pod import Pod, Problem, read_pod

OLD, NEW = "old", "new"
CRASHES: dict[str, Any] = {"problem": Problem("CrashLoopBackOff", "back-off"), "is_backing_off": True}
EXITED: dict[str, Any] = {"problem": Problem("ContainerExited", "last exit: Error, code 255")}
NO_GPU = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


def never_served(name: str = "a", **state: Any) -> Pod:
    return pod(name, OLD, ready=False, gate="", **state)


def names(*pods: Pod) -> list[str]:
    return [each.name for each in failed_replicas(Observation(pods=pods), NEW)]


@pytest.mark.parametrize(
    ("state", "has_failed"),
    [
        ({}, False),
        ({**CRASHES, "restarts": 1}, True),
        ({"problem": Problem("ImagePullBackOff", "no image"), "is_backing_off": True}, True),
        ({"problem": Problem("ErrImageNeverPull", "no image")}, True),
        ({"unschedulable": NO_GPU, "node": ""}, True),
        ({**EXITED, "restarts": 0}, False),
        ({**EXITED, "restarts": 1}, False),
        ({**EXITED, "restarts": 2}, True),
        ({"problem": Problem("OOMKilled", "last exit"), "restarts": 1}, False),
        ({"problem": Problem("CrashLoopBackOff", "its node w-1: back-off")}, True),
    ],
    ids=[
        "starts",
        "backs off",
        "no image",
        "image is not loaded",
        "no node",
        "has ended just now",
        "starts once more",
        "ends again and again",
        "out of memory once",
        "a worker backs off",
    ],
)
def test_a_replica_that_never_served_has_failed_if_it_does_not_come_up(
    state: dict[str, Any], has_failed: bool
) -> None:
    assert names(never_served(**state)) == (["a"] if has_failed else [])
    assert names(pod("a", OLD, ready=True, gate="", **state)) == [], "its containers are ready"
    assert names(pod("a", OLD, ready=False, gate="False", **state)) == [], "it has served"


@pytest.mark.parametrize(
    ("message", "is_removed"),
    [
        (NO_GPU, True),
        ("0/1 nodes are available: 1 Too many pods.", True),
        ("0/1 nodes are available: 1 cannot allocate all claims.", True),
        ("a scheduler of its own has no room", True),
        (f"{NO_GPU} 1 node(s) had untolerated taint {{a: b}}.", True),
        ("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", False),
        (
            "0/2 nodes are available: 1 node(s) had untolerated taint {a: b}, 1 node(s) were unschedulable.",
            False,
        ),
        ('0/2 nodes are available: persistentvolumeclaim "x" not found.', False),
        ("", False),
    ],
)
def test_one_that_served_gives_its_place_only_to_a_successor_that_may_use_it(
    message: str, is_removed: bool
) -> None:
    served = pod("a", OLD, ready=False, gate="True", **CRASHES)
    waiting = pod("b", NEW, ready=False, gate="", node="", unschedulable=message)
    assert names(served, waiting) == (["a"] if is_removed else [])
    assert names(served, waiting, pod("c", OLD)) == [], "another one serves"


@pytest.mark.parametrize("container", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize("reason", ["CrashLoopBackOff", "ImagePullBackOff", "PodInitializing"])
def test_a_fetch_backs_off_as_an_engine_does(container: str, reason: str) -> None:
    """A pod that is started again on its node fetches again, though it has served."""
    name = "engine" if container == "containerStatuses" else "fetch-model"
    state = {"name": name, "state": {"waiting": {"reason": reason}}}
    status: dict[str, Any] = {container: [state], "conditions": [gate_condition("True")]}
    found = read_pod(pod_object("a", **status))
    assert found.is_backing_off is reason.endswith("BackOff")
    waiting = pod("b", NEW, ready=False, gate="", node="", unschedulable=NO_GPU)
    assert names(found, waiting) == (["a"] if found.is_backing_off else [])


@pytest.mark.parametrize(
    ("other", "unavailable"),
    [
        (pod("b", OLD), 1),
        (pod("b", OLD, ready=False), 0),
        (pod("b", OLD, ready=False, gate="True", **CRASHES), 0),
        (never_served("b"), 0),
        (pod("b", NEW), 1),
        (pod("b", NEW, ready=False, gate=""), 2),
        (pod("b", OLD, ready=False, is_terminating=True), 2),
    ],
    ids=["serves", "is not ready", "may recover", "starts", "new", "new and starts", "is leaving"],
)
def test_nothing_is_removed_while_kubernetes_might_take_another_one(other: Pod, unavailable: int) -> None:
    """Then it counts as a replica as any other: the rollout surges, replaces in place or waits as the spec says."""
    observed = Observation(pods=(never_served(**CRASHES), other))
    failed = failed_replicas(observed, NEW)
    assert [each.name for each in failed] == (["a"] if unavailable else [])
    assert unavailable_without(failed, observed, NEW, desired=2) == unavailable


def test_of_replicas_that_crash_in_turns_those_that_back_off_make_room() -> None:
    back_off = pod("a", OLD, ready=False, **CRASHES)
    runs_again = pod("b", OLD, ready=False, **EXITED, restarts=7)
    waiting = pod("c", NEW, ready=False, gate="", node="", unschedulable=NO_GPU)
    assert names(back_off, runs_again, waiting) == ["a"]
    assert names(back_off, pod("b", OLD, ready=False), waiting) == [], "it has not crashed"


def test_without_failed_replicas_the_spec_decides_alone() -> None:
    observed = Observation(pods=(pod("b", OLD),))
    assert unavailable_without((), observed, NEW, desired=3) == 0
