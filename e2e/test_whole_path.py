"""From `kubectl apply` to the OpenAI SDK, in the order a user lives it. Each test builds on the one before."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from cluster.shell import poll
from conftest import GPUS, ROUTER_KEY, SYSTEM, TENANT, TORCH_CLAIM, Stack, recorded
from manifests_table import TABLE, wrongly_answered

pytestmark = pytest.mark.core

NAME = "tiny"
SERVICE = f"inferenceservice/{NAME}"
SELECTOR = f"inference.argosy.dev/service={NAME}"
REPLICA = "x-argosy-replica"


def manifest(**changes: Any) -> dict[str, Any]:
    """The service of this run. torch comes from a read-only volume; one compute thread an engine."""
    spec: dict[str, Any] = {
        "model": {"source": "builtin://tiny"},
        "replicas": 2,
        "engine": {"threads": 1, "maxNumSeqs": 16},
        "resources": {"gpu": {"count": 1}, "cpu": "100m", "memory": "2Gi"},
        "rollout": {"drainSeconds": 5},
        "podTemplate": {
            "spec": {
                "volumes": [
                    {"name": "torch", "persistentVolumeClaim": {"claimName": TORCH_CLAIM, "readOnly": True}}
                ],
                "containers": [
                    {
                        "name": "engine",
                        "volumeMounts": [{"name": "torch", "mountPath": "/opt/torch", "readOnly": True}],
                        "env": [{"name": "PYTHONPATH", "value": "/opt/torch"}],
                    }
                ],
            }
        },
    }
    return {
        "apiVersion": "inference.argosy.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME, "namespace": TENANT},
        "spec": spec | changes,
    }


def condition(found: dict[str, Any], kind: str) -> dict[str, Any]:
    for each in found.get("status", {}).get("conditions", []):
        if each["type"] == kind:
            return each
    return {}


def is_ready(found: dict[str, Any]) -> bool:
    current = found["metadata"]["generation"]
    ready = condition(found, "Ready")
    return ready.get("status") == "True" and ready.get("observedGeneration") == current


def wait_ready(
    stack: Stack, what: str, accept: Callable[[dict[str, Any]], bool] = is_ready
) -> dict[str, Any]:
    return stack.cluster.kubectl.poll(what, (SERVICE, "-n", TENANT), accept, 420)


def engine_pods(stack: Stack) -> list[dict[str, Any]]:
    pods = stack.cluster.kubectl.pods(TENANT, SELECTOR)
    return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def sdk(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=ROUTER_KEY, max_retries=0, timeout=60)


@contextmanager
def load(stack: Stack) -> Iterator[list[str]]:
    """Streamed chats without pause while the block runs; yields the list of what went wrong, and checks it is empty."""
    failures: list[str] = []
    count = 0
    stop = threading.Event()

    def run(number: int) -> None:
        nonlocal count
        with sdk(stack) as client:
            while not stop.is_set():
                try:
                    chunks = list(
                        client.chat.completions.create(
                            model=NAME,
                            messages=[{"role": "user", "content": f"Hello from {number}"}],
                            max_tokens=16,
                            stream=True,
                        )
                    )
                    if not chunks or chunks[-1].choices[0].finish_reason is None:
                        failures.append("a stream ended without a finish reason")
                except Exception as error:
                    failures.append(f"{type(error).__name__}: {error}")
                count += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert count > 0
    assert not failures, f"{len(failures)} of {count} requests failed: {failures[:5]}"


def test_apply_becomes_ready_with_an_honest_status(stack: Stack) -> None:
    stack.cluster.kubectl.apply(manifest())
    early = stack.cluster.kubectl.poll(
        "a first status", (SERVICE, "-n", TENANT), lambda f: bool(condition(f, "Ready"))
    )
    if condition(early, "Ready")["status"] == "True":
        assert all(_is_routable(pod) for pod in engine_pods(stack))
    found = wait_ready(stack, "the service to be Ready")
    pods = engine_pods(stack)
    assert len(pods) == 2
    assert all(_is_routable(pod) for pod in pods)
    assert all(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1" for pod in pods)
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
    row = stack.cluster.kubectl("get", "isvc", "-n", TENANT).stdout.splitlines()
    assert row[0].split()[:4] == ["NAME", "READY", "REASON", "ROUTABLE"]
    assert row[1].split()[1:4] == ["True", "ReplicasRoutable", "2/2"]


def _is_routable(pod: dict[str, Any]) -> bool:
    return any(
        each["type"] == "inference.argosy.dev/routable" and each["status"] == "True"
        for each in pod["status"].get("conditions", [])
    )


def test_chat_streamed_and_not(stack: Stack) -> None:
    with sdk(stack) as client:
        assert NAME in [card.id for card in client.models.list()]
        messages = [{"role": "user", "content": "Hello!"}]
        whole = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=24)  # type: ignore[arg-type]
        chunks = client.chat.completions.create(
            model=f"{TENANT}/{NAME}",
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,  # type: ignore[arg-type]
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text


def test_without_a_key_the_router_refuses(stack: Stack) -> None:
    with (
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_the_same_prefix_goes_to_the_same_replica_and_is_cached(stack: Stack) -> None:
    with sdk(stack) as client:
        for subject in ("the sea", "the moon"):
            system = f"You know all about {subject}. " * 40
            replicas, cached = [], []
            for question in ("Who?", "Where?", "When?"):
                raw = client.chat.completions.with_raw_response.create(
                    model=NAME,
                    messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
                    max_tokens=4,
                )
                usage = raw.parse().usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                replicas.append(raw.headers[REPLICA])
                cached.append(usage.prompt_tokens_details.cached_tokens or 0)
            assert len(set(replicas)) == 1
            assert cached[0] == 0
            assert min(cached[1:]) > 100
            assert raw.headers["x-argosy-route"] in ("cached", "predicted")
            assert int(raw.headers["x-argosy-predicted-tokens"]) > 100


def test_scale_up_to_three(stack: Stack) -> None:
    stack.cluster.kubectl("scale", "inferenceservice", NAME, "-n", TENANT, "--replicas=3")
    wait_ready(
        stack,
        "three replicas",
        lambda found: is_ready(found) and found["status"].get("routableReplicas") == 3,
    )
    assert len([pod for pod in engine_pods(stack) if _is_routable(pod)]) == 3


def test_an_edit_rolls_without_a_failed_request(stack: Stack) -> None:
    before = {pod["metadata"]["name"] for pod in engine_pods(stack)}
    with load(stack):
        patch = {"spec": {"engine": {"maxNumSeqs": 8}}}
        stack.cluster.kubectl("patch", "isvc", NAME, "-n", TENANT, "--type=merge", "-p", json.dumps(patch))
        wait_ready(stack, "the rollout to finish")
    after = engine_pods(stack)
    assert not before & {pod["metadata"]["name"] for pod in after}
    assert all("8" in pod["spec"]["containers"][0]["args"] for pod in after)


def test_without_a_spare_gpu_an_edit_replaces_in_place(stack: Stack) -> None:
    before = {pod["metadata"]["name"] for pod in engine_pods(stack)}
    stack.cluster.advertise_gpus(len(before))
    with load(stack), recorded(stack.cluster, TENANT, NAME) as history:
        patch = {"spec": {"engine": {"maxNumSeqs": 12}}}
        stack.cluster.kubectl("patch", "isvc", NAME, "-n", TENANT, "--type=merge", "-p", json.dumps(patch))
        history.wait_for(
            "the status to say that no GPU is free",
            lambda found: condition(found, "Progressing").get("reason") == "NoGPUForSurge",
            420,
        )
        wait_ready(stack, "the rollout to finish")
    assert not before & {pod["metadata"]["name"] for pod in engine_pods(stack)}
    stack.cluster.advertise_gpus(GPUS)


def test_a_killed_engine_costs_no_unary_request_and_comes_back(stack: Stack) -> None:
    victim = engine_pods(stack)[0]["metadata"]["name"]

    def restarts() -> int:
        pod = stack.cluster.kubectl.get("pod", victim, "-n", TENANT)
        return int(pod["status"]["containerStatuses"][0]["restartCount"])

    with sdk(stack) as client:
        assert restarts() == 0
        # The engine's first process is PID 1 of its container: its core is the child that computes.
        kill = "import os,signal; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), signal.SIGKILL)"
        stack.cluster.kubectl("exec", victim, "-n", TENANT, "--", "/opt/venv/bin/python", "-c", kill)
        deadline = time.monotonic() + 5
        served = set()
        while time.monotonic() < deadline:
            raw = client.chat.completions.with_raw_response.create(
                model=NAME, messages=[{"role": "user", "content": f"Hello {len(served)}"}], max_tokens=4
            )
            served.add(raw.headers[REPLICA])
        assert served
    poll("the engine to be restarted", lambda: restarts() == 1 or None, 120, interval=0.5)
    wait_ready(
        stack, "Ready again", lambda found: is_ready(found) and found["status"].get("routableReplicas") == 3
    )


TRY = ("apply", "--dry-run=server", "--validate=strict", "-n", "default", "-f", "-")
"""In a namespace without services: an apply over the running one would be merged with it."""


def test_good_manifests_are_accepted(stack: Stack) -> None:
    """In one stream, each under a name of its own, because kubectl names the accepted ones only."""
    texts: dict[str, str] = {}
    cases: dict[str, str] = {}
    for number, case in enumerate(TABLE["sources"] + TABLE["good"]):
        text = case.manifest.replace("  name: tiny\n", f"  name: case-{number}\n", 1)
        name = text.partition("\n  name: ")[2].partition("\n")[0]  # one case is about its name
        assert name not in texts
        texts[name], cases[name] = text, case.name
    done = stack.cluster.kubectl(*TRY, stdin="---\n".join(texts.values()), check=False)
    accepted = set(re.findall(r"^inferenceservice\S*/(\S+) created", done.stdout, re.MULTILINE))
    assert not [case for name, case in cases.items() if name not in accepted], done.stderr
    assert done.returncode == 0, done.stderr


def test_bad_manifests_are_refused_with_a_reason(stack: Stack) -> None:
    """By the request that kubectl makes; one goes through kubectl, which prints the message."""
    cases = TABLE["refused sources"] + TABLE["bad"]
    with stack.cluster.kubectl.proxy() as url, httpx.Client(base_url=url, timeout=60) as client:
        messages = {case.name: refusal(client, case.manifest) for case in cases}
    assert not wrongly_answered(cases, messages)
    done = stack.cluster.kubectl(*TRY, stdin=cases[-1].manifest, check=False)
    assert done.returncode != 0
    assert cases[-1].error
    assert cases[-1].error in done.stderr


def refusal(client: httpx.Client, text: str) -> str | None:
    """Return what the API server says to a manifest; None if it would create the object."""
    answer = client.post(
        "/apis/inference.argosy.dev/v1alpha1/namespaces/default/inferenceservices",
        params={"dryRun": "All", "fieldValidation": "Strict"},
        headers={"content-type": "application/yaml"},
        content=text.encode(),
    )
    return None if answer.status_code == 201 else answer.json()["message"]


def test_an_operator_restarted_mid_change_converges(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    kubectl("scale", "inferenceservice", NAME, "-n", TENANT, "--replicas=1")
    kubectl("delete", "pod", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator", "--wait=false")
    wait_ready(stack, "one replica", lambda found: is_ready(found) and found["status"].get("replicas") == 1)
    poll(
        "the other pods to be gone",
        lambda: len(kubectl.pods(TENANT, SELECTOR)) == 1 or None,
        120,
        interval=0.5,
    )


def test_delete_leaves_nothing(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    kubectl("delete", "isvc", NAME, "-n", TENANT, "--timeout=60s")

    def leftovers() -> list[str]:
        kinds = (
            "deployments,replicasets,pods,services,secrets,configmaps,poddisruptionbudgets,inferenceservices"
        )
        items = kubectl.get(kinds, "-n", TENANT)["items"]
        own = {"kube-root-ca.crt"}
        return [f"{i['kind']}/{i['metadata']['name']}" for i in items if i["metadata"]["name"] not in own]

    poll("everything to be deleted", lambda: leftovers() == [] or None, 120, interval=0.5)
    with sdk(stack) as client:
        poll(
            "the router to forget the model",
            lambda: [c.id for c in client.models.list()] == [] or None,
            30,
            interval=0.2,
        )
