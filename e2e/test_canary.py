"""Canary rollouts with analysis: a good revision passes its steps, a bad one is taken back, and no stream notices.

Each test builds on the one before. Requests go on during all of them; their prompts have some hundred tokens in common,
so that all but the first are mostly cached. They leave the processor idle in between, since a replica that starts
beside them has to start soon.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import openai
import pytest

from cluster.history import recording
from cluster.shell import poll
from conftest import ROUTER_KEY, TENANT, Stack, recorded
from test_chart_rights import named
from test_whole_path import condition, is_ready

NAME = "tried"
WORDS = (f"inferenceservice/{NAME}", "-n", TENANT)
SELECTOR = f"inference.argosy.dev/service={NAME}"
REPLICA = "x-argosy-replica"
CLIENTS = 2
PAUSE_S = 0.3
"""Seconds between two requests of a client."""
STEPS = [{"weight": 50}, {"weight": 100}]
DEADLINE_S = 30
"""The least that spec.rollout.progressDeadlineSeconds allows."""


def manifest(*, rollout: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    made = named(NAME)
    analysis = {"maxErrorRate": 0.5, "maxTtftP90Ratio": 100, "minRequests": 3, "windowSeconds": 10}
    made["spec"]["engine"] |= engine
    made["spec"]["rollout"] |= {"canary": {"steps": STEPS, "analysis": analysis | (rollout or {})}}
    return made


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[Stack]:
    kubectl = stack.cluster.kubectl
    kubectl.apply(manifest())
    kubectl.poll("the service to be Ready", WORDS, is_ready, 420)
    yield stack
    kubectl("delete", "isvc", NAME, "-n", TENANT, "--timeout=60s")
    poll("its pods to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 180, interval=0.5)


class Streams:
    """What clients saw while a rollout went on."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.replicas: set[str] = set()
        self.count = 0


@contextmanager
def streams(stack: Stack) -> Iterator[Streams]:
    """Streamed answers without pause while the block runs. None may fail or end early."""
    seen, stop, numbers = Streams(), threading.Event(), itertools.count()

    def run() -> None:
        with openai.OpenAI(
            base_url=f"{stack.url}/v1", api_key=ROUTER_KEY, max_retries=0, timeout=60
        ) as client:
            while not stop.wait(PAUSE_S):
                number = next(numbers)
                try:
                    answer = client.completions.with_raw_response.create(
                        model=NAME,
                        prompt="once upon a time there was a fox " * 60 + str(number),
                        max_tokens=24,
                        stream=True,
                        stream_options={"include_usage": True},
                        extra_body={"ignore_eos": True},
                    )
                    reasons = [chunk.choices[0].finish_reason for chunk in answer.parse() if chunk.choices]
                    if reasons[-1:] != ["length"]:
                        seen.failures.append(f"a stream ended with {reasons[-1:]}")
                    seen.replicas.add(answer.headers[REPLICA])
                except Exception as error:
                    seen.failures.append(f"{type(error).__name__}: {error}")
                seen.count += 1

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert seen.count > 0
    assert not seen.failures, f"{len(seen.failures)} of {seen.count} streams failed: {seen.failures[:5]}"


def serving(stack: Stack) -> dict[str, int]:
    """The service's living pods besides a canary's, by UID, with their restarts."""
    return living(stack.cluster.kubectl.pods(TENANT, SELECTOR))


def living(pods: Iterable[dict[str, Any]]) -> dict[str, int]:
    return {
        pod["metadata"]["uid"]: sum(
            each["restartCount"] for each in pod["status"].get("containerStatuses", ())
        )
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp") and "-canary-" not in pod["metadata"]["name"]
    }


def canaries(stack: Stack) -> list[str]:
    found = stack.cluster.kubectl.get("deployments", "-n", TENANT, f"--selector={SELECTOR}")["items"]
    return [each["metadata"]["name"] for each in found if "-canary-" in each["metadata"]["name"]]


def has_failed(found: dict[str, Any]) -> bool:
    """Whether the revision of this manifest has failed: the status of the one before may say that it did."""
    degraded = condition(found, "Degraded")
    current = degraded.get("observedGeneration") == found["metadata"]["generation"]
    return current and degraded["reason"] == "CanaryFailed"


def wait_for(
    stack: Stack, what: str, accept: Callable[[dict[str, Any]], bool], timeout: float = 180
) -> dict[str, Any]:
    return stack.cluster.kubectl.poll(what, WORDS, accept, timeout)


def check_taken_back(stack: Stack, before: dict[str, int], because: str) -> None:
    """A canary has failed: its replicas go, and the old ones were not touched."""
    found = wait_for(stack, "the canary to have failed", has_failed)
    assert because in condition(found, "Degraded")["message"]
    assert condition(found, "Stalled")["status"] == "True"
    assert (found["status"]["rollout"]["phase"], found["status"]["rollout"]["weight"]) == ("Failed", 0)
    poll("the canary's replicas to go", lambda: canaries(stack) == [] or None, 60, interval=0.5)
    assert serving(stack) == before


def events(stack: Stack) -> set[str]:
    return {each["reason"] for each in stack.cluster.kubectl.events(TENANT, NAME)}


def test_a_worse_revision_is_taken_back(service: Stack) -> None:
    """It caches nothing. How much slower that makes it depends on the machine, its share of cached tokens does not."""
    before = serving(service)
    with streams(service) as seen:
        service.cluster.kubectl.apply(
            manifest(rollout={"minCachedShareRatio": 0.8, "windowSeconds": 20}, enablePrefixCaching=False)
        )
        check_taken_back(service, before, "cached")
    assert len(seen.replicas) == 2, "the canary has answered some"


def test_a_revision_that_never_starts_is_taken_back(service: Stack) -> None:
    before = serving(service)
    broken = manifest(image="localhost/no-such-image:1")
    broken["spec"]["rollout"]["progressDeadlineSeconds"] = DEADLINE_S
    with streams(service) as seen:
        service.cluster.kubectl.apply(broken)
        check_taken_back(service, before, "0 of 1 canary replicas routable")
    assert len(seen.replicas) == 1
    service.cluster.kubectl.apply(manifest())
    wait_for(service, "the service to be Ready as before", is_ready)
    assert serving(service) == before, "going back restarts nothing"


def test_a_good_revision_passes_its_steps(service: Stack) -> None:
    kubectl, before = service.cluster.kubectl, serving(service)
    with (
        streams(service) as seen,
        recording(kubectl, f"api/v1/namespaces/{TENANT}/pods", f"labelSelector={quote(SELECTOR)}") as pods,
        recorded(service.cluster, TENANT, NAME) as services,
    ):
        kubectl.apply(manifest(maxNumSeqs=8))
        generation = kubectl.get(*WORDS)["metadata"]["generation"]
        found = services.wait_for(
            "the steps to pass and the rollout to finish",
            lambda each: is_ready(each) and each["metadata"]["generation"] == generation,
            240,
        )
    meanwhile: dict[int, dict[str, int]] = {}
    for each in services.versions:  # until the last step has passed, the old replicas serve as they were
        rollout = each["status"].get("rollout") or {}
        if rollout.get("phase") in ("Starting", "Analyzing"):
            at = int(each["metadata"]["resourceVersion"])
            meanwhile.setdefault(rollout["weight"], living(pods.at(at)))
    assert meanwhile == {0: before, 50: before, 100: before}
    assert not serving(service).keys() & before.keys()
    assert canaries(service) == []
    assert not found["status"].get("rollout")
    assert len(seen.replicas) >= 3, "old, canary and new replicas have answered"
    assert events(service) >= {"CanaryStarting", "CanaryAnalyzing", "CanaryPromoting", "CanaryFailed"}
