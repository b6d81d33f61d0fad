"""The fleet key is rotated while streams run: no request is lost, and no pod is touched.

The kubelets bring the new Secret to the pods at times of their own, so the order of arrival is as in life.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.shell import poll, run
from conftest import ROUTER_KEY, SYSTEM, TENANT, Stack
from test_gitops import ROUTERS
from test_whole_path import NAME, engine_pods, load, manifest, wait_ready

FLEET_KEY = ("secret", "argosy-fleet-key", "-n", SYSTEM)
ENGINE_KEY = ("secret", f"{NAME}-engine-key", "-n", TENANT)
GIVEN_KEYS = ("secret", "argosy-router-given-keys", "-n", SYSTEM)
GUIDE = Path(__file__).parents[1] / "docs" / "access.md"
OPERATORS = "app.kubernetes.io/component=operator"
ARRIVES_S = 240
"""Longer than a kubelet takes to update a mounted Secret."""


@pytest.fixture(scope="module", autouse=True)
def service(stack: Stack) -> Iterator[None]:
    stack.cluster.kubectl.apply(manifest())
    wait_ready(stack, "the service to be Ready")
    yield
    stack.cluster.kubectl("delete", "isvc", NAME, "-n", TENANT)


def touched(stack: Stack) -> list[tuple[str, str, int]]:
    """What a replaced, restarted or edited pod of the whole installation would change."""
    kubectl = stack.cluster.kubectl
    found = [*engine_pods(stack), *kubectl.pods(SYSTEM, ROUTERS), *kubectl.pods(SYSTEM, OPERATORS)]
    return sorted(
        (pod["metadata"]["name"], pod["metadata"]["uid"], each["restartCount"])
        for pod in found
        for each in pod["status"]["containerStatuses"]
    )


def field(stack: Stack, words: tuple[str, ...], name: str) -> str:
    encoded = stack.cluster.kubectl.get(*words)["data"].get(name, "")
    return base64.b64decode(encoded).decode()


def rotate(stack: Stack, *, keeps_previous: bool) -> None:
    """What the documentation says, or what a tool does that knows one value."""
    old = stack.cluster.kubectl.get(*FLEET_KEY)["data"]["key"]
    new = base64.b64encode(secrets.token_hex(32).encode()).decode()
    data = {"key": new, "previous": old} if keeps_previous else {"key": new}
    stack.cluster.kubectl("patch", *FLEET_KEY, "--type", "merge", "-p", json.dumps({"data": data}))


def until_every_router_sends_it(stack: Stack, before: dict[str, int]) -> None:
    """Wait until each router has moved each replica to the new key."""

    def moved() -> bool | None:
        now = accepted(stack)
        return all(now[name] >= before[name] + 2 for name in before) or None

    poll("every router to send the new key to both replicas", moved, ARRIVES_S, interval=1.0)


def accepted(stack: Stack) -> dict[str, int]:
    """How often each router has moved a replica to a new key."""
    kubectl = stack.cluster.kubectl
    names = [pod["metadata"]["name"] for pod in kubectl.pods(SYSTEM, ROUTERS)]
    return {name: kubectl("logs", name, "-n", SYSTEM).stdout.count("accepts the new key") for name in names}


@pytest.mark.parametrize("keeps_previous", [True, False], ids=["with the previous key", "one value"])
def test_a_rotation_loses_no_request_and_touches_no_pod(stack: Stack, keeps_previous: bool) -> None:
    before, moved = touched(stack), accepted(stack)
    key = field(stack, ENGINE_KEY, "ARGOSY_API_KEY")
    assert before
    assert len(moved) == 2
    with load(stack):
        rotate(stack, keeps_previous=keeps_previous)
        until_every_router_sends_it(stack, moved)
    new, *others = field(stack, ENGINE_KEY, "api-keys").split()
    assert new == field(stack, ENGINE_KEY, "ARGOSY_API_KEY") != key
    assert (others[:1] == [key]) is keeps_previous, "engines remember by themselves what has left the file"
    assert touched(stack) == before
    wait_ready(stack, "the service to be Ready still")


def test_the_end_of_a_rotation_touches_no_pod(stack: Stack) -> None:
    before = touched(stack)
    with load(stack):
        stack.cluster.kubectl(
            "patch", *FLEET_KEY, "--type", "merge", "-p", json.dumps({"data": {"previous": None}})
        )
    assert touched(stack) == before


@pytest.fixture
def given_back(stack: Stack) -> Iterator[None]:
    """The Secret with the keys is the release's again afterwards, or no later `helm upgrade` could write it."""
    kubectl = stack.cluster.kubectl
    secret = kubectl.get(*GIVEN_KEYS)
    yield
    kept = {name: secret["metadata"][name] for name in ("name", "namespace", "labels", "annotations")}
    kubectl(
        "apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", "-",
        stdin=json.dumps({**secret, "metadata": kept}),
    )  # fmt: skip
    owners = kubectl.get(*GIVEN_KEYS, "--show-managed-fields")["metadata"]["managedFields"]
    assert [each["manager"] for each in owners if "f:data" in each["fieldsV1"]] == ["helm"]


@pytest.mark.usefixtures("given_back")
def test_a_key_is_added_as_the_guide_says(stack: Stack, tmp_path: Path) -> None:
    """Here the chart was given its keys, so another Secret has them."""
    kubectl = stack.cluster.kubectl
    (words,) = re.findall(
        r"^### A key with limits, in a cluster\n\n```bash\n(.*?)^```",
        GUIDE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    words = words.replace("argosy-router-keys", GIVEN_KEYS[1]).replace("argosy-system", SYSTEM)
    words = words.replace("models=tiny", f"models={NAME}")
    (tmp_path / "kubectl").symlink_to(kubectl.binary)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KUBECONFIG": str(kubectl.kubeconfig)}
    before, old = touched(stack), field(stack, GIVEN_KEYS, "api-keys")
    key = run("bash", "-euo", "pipefail", "-c", words, env=environment).stdout.split()[-1]
    new = field(stack, GIVEN_KEYS, "api-keys")
    assert new.startswith(old)
    assert key not in new, "its digest is there"
    asked = functools.partial(
        httpx.post,
        f"{stack.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {key}"},
        json={"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        timeout=60,
    )
    poll("the new key to open its model", lambda: asked().status_code == 200 or None, ARRIVES_S, interval=1.0)
    assert ROUTER_KEY in new
    assert touched(stack) == before
