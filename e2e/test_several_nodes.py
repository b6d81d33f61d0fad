"""A replica whose engine spans two pods: tensor parallelism over gloo, from the first answer to the last pod."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.shell import poll
from conftest import TENANT, Stack
from test_whole_path import REPLICA, is_ready, manifest, sdk

NAME = "spread"
SERVICE = f"inferenceservice/{NAME}"
SELECTOR = f"inference.argosy.dev/service={NAME}"
COMPONENT = "app.kubernetes.io/component"


def pods(stack: Stack, component: str) -> list[dict[str, Any]]:
    found = stack.cluster.kubectl.pods(TENANT, f"{SELECTOR},{COMPONENT}={component}")
    return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]


def leader(stack: Stack) -> dict[str, Any]:
    (found,) = pods(stack, "engine")
    return found


def worker(stack: Stack) -> dict[str, Any]:
    (found,) = pods(stack, "engine-node")
    return found


def uids(stack: Stack) -> set[str]:
    return {each["metadata"]["uid"] for each in (*pods(stack, "engine"), *pods(stack, "engine-node"))}


def restarts(pod: dict[str, Any]) -> int:
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ()))


def wait_ready(stack: Stack, what: str) -> None:
    stack.cluster.kubectl.poll(what, (SERVICE, "-n", TENANT), is_ready, 420)


def answer(stack: Stack) -> tuple[str, str]:
    """The text, and the pod that a router sent the request to."""
    with sdk(stack) as client:
        found = client.completions.with_raw_response.create(
            model=NAME, prompt="One engine on two", max_tokens=8, temperature=0
        )
        return found.parse().choices[0].text, found.headers[REPLICA]


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[Stack]:
    kubectl = stack.cluster.kubectl
    document = manifest(
        replicas=1,
        parallelism={"tensor": 2, "nodes": 2},
        resources={"memory": "2Gi"},
        rollout={"drainSeconds": 1},
    )
    document["metadata"]["name"] = NAME
    kubectl.apply(document)
    yield stack
    kubectl("delete", "isvc", NAME, "-n", TENANT, "--ignore-not-found", "--timeout=60s")


def test_two_pods_answer_as_one_replica(service: Stack) -> None:
    wait_ready(service, "both pods to serve")
    first, other = leader(service), worker(service)
    assert first["status"]["podIP"] != other["status"]["podIP"]
    (owned,) = service.cluster.kubectl.get("statefulsets", "-n", TENANT, "-l", SELECTOR)["items"]
    assert owned["metadata"]["ownerReferences"][0]["uid"] == first["metadata"]["uid"]
    status = service.cluster.kubectl.get(SERVICE, "-n", TENANT)["status"]
    assert (status["replicas"], status["routableReplicas"]) == (1, 1)
    text, replica = answer(service)
    assert text
    assert replica == first["metadata"]["name"]


def test_the_death_of_a_worker_restarts_both(service: Stack) -> None:
    text, _ = answer(service)
    first, other = leader(service), worker(service)
    before = restarts(first)
    service.cluster.kubectl(
        "delete", "pod", other["metadata"]["name"], "-n", TENANT, "--grace-period=0", "--force"
    )
    poll("the engine to end", lambda: restarts(leader(service)) > before or None, 120, interval=0.5)
    wait_ready(service, "both pods to serve again")
    assert leader(service)["metadata"]["uid"] == first["metadata"]["uid"]
    assert worker(service)["metadata"]["name"] == other["metadata"]["name"]
    assert worker(service)["metadata"]["uid"] != other["metadata"]["uid"]
    poll("an answer", lambda: answer(service)[0] == text or None, 60, interval=1.0)


def test_a_rollout_replaces_both(service: Stack) -> None:
    before = uids(service)
    change = json.dumps({"spec": {"engine": {"maxNumSeqs": 8}}})
    service.cluster.kubectl("patch", "isvc", NAME, "-n", TENANT, "--type=merge", "-p", change)
    wait_ready(service, "the rollout to be complete")
    poll("the old pods to be gone", lambda: len(uids(service)) == 2 or None, 120, interval=0.5)
    assert before.isdisjoint(uids(service))
    assert answer(service)[0]


def test_at_zero_replicas_nothing_is_left(service: Stack) -> None:
    kubectl = service.cluster.kubectl
    kubectl("scale", SERVICE, "-n", TENANT, "--replicas=0")
    poll("all pods to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 120, interval=0.5)
    assert kubectl.get("statefulsets", "-n", TENANT, "-l", SELECTOR)["items"] == []
