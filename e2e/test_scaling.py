"""spec.scaling: to zero, woken by a request that the router holds, a second replica that begins warm, and back.

No autoscaler and no metrics API is in the cluster. Each test builds on the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster.shell import poll
from conftest import TENANT, Stack
from test_chart_rights import named
from test_whole_path import condition, sdk

NAME = "scaled"
WORDS = (f"inferenceservice/{NAME}", "-n", TENANT)
SELECTOR = f"inference.argosy.dev/service={NAME}"
SCALING = {
    "minReplicas": 0,
    "maxReplicas": 2,
    "idleSeconds": 20,
    "metrics": {"concurrency": 2},
    "scaleDown": {"stabilizationWindowSeconds": 5, "periodSeconds": 1},
}
SYSTEM_PROMPT = "You know all about the sea, its tides and its ships. " * 20


@pytest.fixture(scope="module")
def scaled(stack: Stack) -> Iterator[Stack]:
    kubectl = stack.cluster.kubectl
    kubectl.apply(named(NAME, scaling=SCALING))
    yield stack
    kubectl("delete", "isvc", NAME, "-n", TENANT, "--timeout=60s")
    poll("its pods to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 180, interval=0.5)


def wait_for_zero(stack: Stack) -> dict[str, Any]:
    kubectl = stack.cluster.kubectl
    found = kubectl.poll(
        "no replica", WORDS, lambda found: condition(found, "Ready").get("reason") == "ScaledToZero", 420
    )
    poll("no pod", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 120, interval=0.5)
    return found


def ask(stack: Stack, question: str) -> str:
    with sdk(stack).with_options(timeout=400) as client:
        chunks = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}],
            max_tokens=64,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@contextmanager
def six_at_once(stack: Stack) -> Iterator[None]:
    """Six clients that ask without pause while the block runs."""
    failures: list[str] = []
    stop = threading.Event()

    def run(number: int) -> None:
        while not stop.is_set():
            try:
                ask(stack, f"Who sails there? {number}")
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, f"{len(failures)} requests failed: {failures[:5]}"


@pytest.mark.core
def test_an_idle_service_has_no_replica(scaled: Stack) -> None:
    found = wait_for_zero(scaled)
    assert found["spec"]["replicas"] == 1, "the operator never writes it"
    assert found["status"]["scaling"]["wanted"] == 0
    assert found["status"]["scaling"]["reason"] == "Idle"


@pytest.mark.core
def test_a_held_request_wakes_it_and_is_answered(scaled: Stack) -> None:
    assert ask(scaled, "Who sails there?")
    # The router routes to a replica before the operator tells of its start.
    found = scaled.cluster.kubectl.poll(
        "the status to tell of the cold start",
        WORDS,
        lambda found: found["status"]["scaling"].get("coldStartSeconds", 0) > 0,
    )
    assert found["status"]["scaling"]["wanted"] == 1


def test_a_second_replica_comes_by_load_and_begins_warm(scaled: Stack) -> None:
    kubectl = scaled.cluster.kubectl
    ask(scaled, "Who sails there?")
    before = {pod["metadata"]["name"] for pod in kubectl.pods(TENANT, SELECTOR)}
    with six_at_once(scaled):
        found = kubectl.poll(
            "two routable replicas", WORDS, lambda found: found["status"].get("routableReplicas") == 2, 420
        )
    assert found["status"]["scaling"]["reason"] == "Concurrency"
    (second,) = {pod["metadata"]["name"] for pod in kubectl.pods(TENANT, SELECTOR)} - before
    log = kubectl("logs", second, "-n", TENANT, "-c", "engine").stdout
    assert "prefixes in" in log, "it was routable before it had computed what the first one told"


def test_without_requests_both_go(scaled: Stack) -> None:
    wait_for_zero(scaled)
