"""Failures that only a real cluster can show: a bad image, no spare GPU, a node that says nothing, no operator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.shell import poll
from conftest import GPUS, ROOT, SYSTEM, TENANT, Stack
from test_whole_path import condition, is_ready, manifest

NAME = "failing"
OTHER = "bystander"
SERVICE = f"inferenceservice/{NAME}"
SELECTOR = f"inference.argosy.dev/service={NAME}"
OPERATOR = "deployment/argosy-operator"


def wait_for(stack: Stack, what: str, accept: Callable[[dict[str, Any]], bool], timeout: float = 420) -> None:
    stack.cluster.kubectl.poll(what, (SERVICE, "-n", TENANT), accept, timeout)


def has(kind: str, reason: str) -> Callable[[dict[str, Any]], bool]:
    return lambda found: condition(found, kind).get("reason") == reason


def patch(stack: Stack, **spec: Any) -> None:
    words = ("patch", "isvc", NAME, "-n", TENANT, "--type=merge", "-p", json.dumps({"spec": spec}))
    stack.cluster.kubectl(*words)


def living(stack: Stack) -> list[str]:
    pods = stack.cluster.kubectl.pods(TENANT, SELECTOR)
    return [pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def routable(stack: Stack) -> int:
    return int(stack.cluster.kubectl.get(SERVICE, "-n", TENANT)["status"].get("routableReplicas", 0))


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[Stack]:
    """One replica, created while no operator looks."""
    kubectl = stack.cluster.kubectl
    kubectl("scale", OPERATOR, "-n", SYSTEM, "--replicas=0")
    poll(
        "the operator to be gone",
        lambda: kubectl.pods(SYSTEM, "app.kubernetes.io/component=operator") == [] or None,
        120,
        interval=0.5,
    )
    document = manifest(replicas=1)
    document["metadata"]["name"] = NAME
    kubectl.apply(document)
    yield stack
    kubectl("delete", "isvc", NAME, "-n", TENANT, "--timeout=60s")
    poll("its pods to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 180, interval=0.5)


@pytest.mark.core
def test_without_an_operator_a_resource_does_not_look_done(service: Stack) -> None:
    found = service.cluster.kubectl.get(SERVICE, "-n", TENANT)
    assert found["status"] == {"observedGeneration": -1}
    service.cluster.kubectl("scale", OPERATOR, "-n", SYSTEM, "--replicas=1")
    wait_for(service, "the service to be Ready", is_ready)
    service.cluster.kubectl.wait_for_event(TENANT, NAME, "ReplicasRoutable")


@pytest.mark.core
def test_a_bad_image_halts_the_rollout(service: Stack) -> None:
    (before,) = living(service)
    patch(service, engine={"image": "localhost/no-such-image:1"})
    wait_for(service, "the rollout to be halted", has("Progressing", "RolloutHalted"), 120)
    deployment = service.cluster.kubectl.get("deployment", f"{NAME}-engine", "-n", TENANT)
    assert deployment["spec"]["paused"]
    assert before in living(service)
    assert routable(service) == 1
    service.cluster.kubectl.wait_for_event(TENANT, NAME, "RolloutHalted", "no-such-image")
    patch(service, engine={"image": None})
    wait_for(service, "the service to be Ready again", is_ready)
    assert living(service) == [before]


def test_without_a_spare_gpu_the_only_replica_stays(service: Stack) -> None:
    (before,) = living(service)
    service.cluster.advertise_gpus(1)
    try:
        patch(service, engine={"maxNumSeqs": 8})
        wait_for(service, "the rollout to wait", has("Progressing", "WaitingForCapacity"), 120)
        assert before in living(service)
        assert routable(service) == 1
    finally:
        service.cluster.advertise_gpus(GPUS)
    wait_for(service, "the rollout to finish", is_ready)
    assert before not in living(service)


def test_an_engine_that_does_not_start_says_why(service: Stack) -> None:
    patch(service, model={"source": "file:///nowhere"})

    def says_why(found: dict[str, Any]) -> bool:
        return "is no directory" in condition(found, "Degraded").get("message", "")

    wait_for(service, "the status to say why", says_why, 180)
    service.cluster.kubectl.wait_for_event(TENANT, NAME, text="is no directory")
    row = service.cluster.kubectl("get", "isvc", NAME, "-n", TENANT, "-o", "wide").stdout
    assert "is no directory" in row
    assert routable(service) == 1
    patch(service, model={"source": "builtin://tiny"})
    wait_for(service, "the service to be Ready again", is_ready)


def test_a_deleted_key_is_back_before_an_edit_starts_pods(service: Stack) -> None:
    service.cluster.kubectl("delete", "secret", f"{NAME}-engine-key", "-n", TENANT)
    patch(service, replicas=2)
    try:
        wait_for(
            service, "two replicas to be Ready", lambda found: is_ready(found) and routable(service) == 2, 120
        )
    finally:
        patch(service, replicas=1)
    wait_for(service, "one replica to be left", lambda found: is_ready(found) and routable(service) == 1, 120)


def test_a_wrong_default_image_takes_no_service_down(service: Stack) -> None:
    kubectl, chart = service.cluster.kubectl, str(ROOT / "charts" / "argosy")
    other = manifest(replicas=1)
    other["metadata"]["name"] = OTHER
    kubectl.apply(other)
    kubectl.poll("the other service to be Ready", (f"isvc/{OTHER}", "-n", TENANT), is_ready, 420)
    upgrade = ("upgrade", "argosy", chart, "-n", SYSTEM, "--reuse-values", "--wait", "--timeout", "180s",
               "--set", "engine.upgradePolicy=Automatic")  # fmt: skip
    tag = service.images["engine"].rpartition(":")[2]

    def found() -> list[dict[str, Any]]:
        return [kubectl.get(f"isvc/{name}", "-n", TENANT) for name in (NAME, OTHER)]

    def reasons() -> list[str]:
        return sorted(condition(each, "Progressing").get("reason", "") for each in found())

    service.cluster.helm(*upgrade, "--set-string", "engine.image.tag=no-such-tag", timeout=200)
    try:
        wanted = ["RolloutHalted", "WaitingForTurn"]
        poll("one to halt and the other to wait", lambda: reasons() == wanted or None, 120, interval=0.5)
        assert [each["status"]["routableReplicas"] for each in found()] == [1, 1]
    finally:
        service.cluster.helm(*upgrade, "--set-string", f"engine.image.tag={tag}", timeout=200)
    poll("both to be complete", lambda: reasons() == ["Complete", "Complete"] or None, 300, interval=0.5)
    assert all(is_ready(each) for each in found())
    kubectl("delete", "isvc", OTHER, "-n", TENANT, "--timeout=60s")


def test_on_a_node_that_says_nothing_no_replica_is_ready(service: Stack) -> None:
    pod = service.cluster.kubectl.get("pod", living(service)[0], "-n", TENANT)
    with service.cluster.silent_node(pod["spec"]["nodeName"]):

        def is_down(found: dict[str, Any]) -> bool:
            return all(condition(found, kind)["status"] == "False" for kind in ("Ready", "Routable"))

        wait_for(service, "the status to say that nothing is routable", is_down, 60)
    wait_for(service, "the service to be Ready again", is_ready)
    service.cluster.kubectl("rollout", "status", OPERATOR, "-n", SYSTEM, "--timeout=180s")
    service.cluster.kubectl("rollout", "status", "deployment/argosy-router", "-n", SYSTEM, "--timeout=180s")
