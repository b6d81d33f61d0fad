"""`argosy why` against a real cluster: services that serve, services that do not, and users with few rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.shell import poll
from conftest import GPUS, SYSTEM, TENANT, Stack
from test_whole_path import is_ready, manifest

NAME = "asked"
SERVICE = f"inferenceservice/{NAME}"
SELECTOR = f"inference.argosy.dev/service={NAME}"
OPERATOR = "deployment/argosy-operator"
ROUTER = "deployment/argosy-router"
LEASE = "lease/argosy-operator"
NOBODY = "somebody-with-few-rights"


class Why:
    """Runs the command as a user does."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        kubectl = stack.cluster.kubectl
        folder = Path(kubectl.binary).parent
        self.env = {
            **os.environ,
            "KUBECONFIG": str(kubectl.kubeconfig),
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        }

    def __call__(self, *words: str, **env: str) -> tuple[int, str]:
        """Exit code, and what it wrote."""
        command = [sys.executable, "-m", "argosy", "why", *(words or (NAME,)), "--namespace", TENANT]
        done = subprocess.run(
            command, env=self.env | env, capture_output=True, text=True, timeout=120, check=False
        )
        text = done.stdout + done.stderr
        assert "Traceback" not in text, text
        print(text)
        return done.returncode, text

    def until(self, what: str, code: int, *told: str, timeout: float = 180) -> str:
        """Ask until the answer has this exit code and these words."""
        last = ""

        def answer() -> str | None:
            nonlocal last
            found, last = self()
            return last if found == code and all(each in last for each in told) else None

        return poll(what, answer, timeout, interval=1)

    def patch(self, **spec: Any) -> None:
        words = ("patch", "isvc", NAME, "-n", TENANT, "--type=merge", "-p", json.dumps({"spec": spec}))
        self.stack.cluster.kubectl(*words)

    def wait(self, accept: Callable[[dict[str, Any]], bool] = is_ready, timeout: float = 300) -> None:
        self.stack.cluster.kubectl.poll("the service", (SERVICE, "-n", TENANT), accept, timeout)

    def scale(self, target: str, replicas: int, component: str) -> None:
        kubectl = self.stack.cluster.kubectl
        kubectl("scale", target, "-n", SYSTEM, f"--replicas={replicas}")
        if replicas:
            kubectl("rollout", "status", target, "-n", SYSTEM, "--timeout=180s", timeout=190)
        else:
            selector = f"app.kubernetes.io/component={component}"
            poll("none to be left", lambda: kubectl.pods(SYSTEM, selector) == [] or None, 120, interval=0.5)


@pytest.fixture(scope="module")
def why(stack: Stack) -> Iterator[Why]:
    ask = Why(stack)
    code, text = ask("")
    assert (code, "there are: none" in text) == (1, True), text
    document = manifest(replicas=1)
    document["metadata"]["name"] = NAME
    stack.cluster.kubectl.apply(document)
    ask.wait()
    yield ask
    kubectl = stack.cluster.kubectl
    kubectl("delete", "isvc", NAME, "-n", TENANT, "--ignore-not-found", "--timeout=60s")
    poll("its pods to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 180, interval=0.5)


def test_a_service_that_is_served(why: Why) -> None:
    code, text = why()
    assert code == 0
    assert "ok      router" in text
    assert "Service argosy-system/argosy-router, " in text
    assert "note:" not in text
    assert why("")[0] == 0, "the only one needs no name"
    code, text = why(NAME, "--output", "json")
    assert json.loads(text)["links"][-1]["name"] == "ready"


def test_a_name_that_does_not_exist(why: Why) -> None:
    code, text = why("no-such-service")
    assert code == 1
    assert f"there are: {NAME}" in text


def test_a_broken_revision_beside_one_that_serves(why: Why) -> None:
    why.patch(engine={"image": "localhost/no-such-image:1"})
    why.until(
        "the image to be told, and that clients are served",
        0,
        "FAILED  engine",
        "no-such-image",
        "clients are served meanwhile: 1 replica is routable, none of the newest revision",
    )
    why.patch(engine={"image": None})
    why.wait()


def test_an_operator_that_is_gone(why: Why) -> None:
    kubectl = why.stack.cluster.kubectl
    why.scale(OPERATOR, 0, "operator")
    try:
        code, text = why()
        assert code == 0, "routers and engines work without one"
        assert "note: no operator runs: nobody holds Lease argosy-system/argosy-operator" in text
        spec = {"holderIdentity": "killed", "renewTime": "2026-01-01T00:00:00.000000Z"}
        kubectl("patch", LEASE, "-n", SYSTEM, "--type=merge", "-p", json.dumps({"spec": spec}))
        assert "was last renewed at 2026-01-01" in why()[1]
        (pod,) = [pod["metadata"]["name"] for pod in kubectl.pods(TENANT, SELECTOR)]
        kubectl("set", "image", f"pod/{pod}", "engine=localhost/no-such-image:1", "-n", TENANT)
        text = why.until("the replica that served, and does no more", 1, "FAILED  engine")
        assert "clients are served" not in text, "its gate is still open"
        kubectl("delete", "secret", f"{NAME}-engine-key", "-n", TENANT)
        kubectl("delete", "pod", pod, "-n", TENANT, timeout=90)
        why.until(
            "the Secret that a pod cannot mount",
            1,
            "FAILED  volumes",
            f"the operator makes the Secret {NAME}-engine-key",
        )
        why.patch(engine={"maxNumSeqs": 8})
        assert "FAILED  operator" in why.until("the edit that nobody has seen", 1)
    finally:
        why.scale(OPERATOR, 1, "operator")
    why.wait()
    why.until("the service to be served again, with its Secret", 0, "ok      ready")


def test_routers_that_are_gone(why: Why) -> None:
    why.scale(ROUTER, 0, "router")
    try:
        text = why.until("the routers to be missed", 1, "Service argosy-system/argosy-router has no endpoint")
        assert "clients are served" not in text
    finally:
        why.scale(ROUTER, 1, "router")
    why.wait()
    why.until("the service to be served again", 0, "ok      router")


def test_a_user_who_may_read_services_only(why: Why, tmp_path: Path) -> None:
    kubectl = why.stack.cluster.kubectl
    named = {"metadata": {"name": NOBODY, "namespace": TENANT}}
    rule = {"apiGroups": ["inference.argosy.dev"], "resources": ["inferenceservices"], "verbs": ["get"]}
    subject = {"kind": "User", "name": NOBODY, "apiGroup": "rbac.authorization.k8s.io"}
    role = {"kind": "Role", "name": NOBODY, "apiGroup": "rbac.authorization.k8s.io"}
    api = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    kubectl.apply(
        {**api, "kind": "Role", **named, "rules": [rule]},
        {**api, "kind": "RoleBinding", **named, "subjects": [subject], "roleRef": role},
    )
    document = json.loads(kubectl("config", "view", "--raw", "-o", "json").stdout)
    for user in document["users"]:
        user["user"]["as"] = NOBODY
    config = tmp_path / "kubeconfig"
    config.write_text(json.dumps(document))
    code, text = why(NAME, KUBECONFIG=str(config))
    assert code == 0
    assert "ok      ready" in text
    code, text = why("no-such-service", KUBECONFIG=str(config))
    assert (code, "not found" in text) == (1, True), text


def test_a_first_manifest_that_fails_and_its_correction_on_the_only_gpu(why: Why) -> None:
    kubectl = why.stack.cluster.kubectl
    kubectl("delete", "isvc", NAME, "-n", TENANT, "--timeout=60s")
    poll("its pods to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 180, interval=0.5)
    document = manifest(replicas=1, model={"source": "file:///nowhere"})
    document["metadata"]["name"] = NAME
    why.stack.cluster.advertise_gpus(1)
    try:
        kubectl.apply(document)
        text = why.until("the engine's last words", 1, "FAILED  engine", "is no directory")
        assert "clients are served" not in text
        why.patch(model={"source": "builtin://tiny"})
        why.wait()
        assert why()[0] == 0
    finally:
        why.stack.cluster.advertise_gpus(GPUS)


def test_a_service_that_is_being_deleted(why: Why) -> None:
    kubectl = why.stack.cluster.kubectl
    words = ("patch", "isvc", NAME, "-n", TENANT, "--type=merge", "-p")
    kubectl(*words, json.dumps({"metadata": {"finalizers": ["example.com/held"]}}))
    try:
        kubectl("delete", "isvc", NAME, "-n", TENANT, "--wait=false")
        code, text = why()
        assert code == 1
        assert "is being deleted" in text
        assert "example.com/held" in text
    finally:
        kubectl(*words, json.dumps({"metadata": {"finalizers": None}}))
