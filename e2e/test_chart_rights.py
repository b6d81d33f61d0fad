"""The operator under the permissions that the chart gives it: in chosen namespaces, and beside Secrets not its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.shell import poll
from conftest import SYSTEM, TENANT, Stack, install
from test_whole_path import condition, is_ready, manifest

OPERATOR = "app.kubernetes.io/component=operator"


def named(name: str, **changes: Any) -> dict[str, Any]:
    made = manifest(replicas=1, **changes)
    made["metadata"]["name"] = name
    return made


def operator_log(stack: Stack) -> str:
    return stack.cluster.kubectl("logs", "-n", SYSTEM, "deployment/argosy-operator").stdout


def test_a_users_secret_is_neither_taken_over_nor_deleted(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    users = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "mine-engine-key", "namespace": TENANT},
        "data": {"password": "aHVudGVy", "ARGOSY_API_KEY": "b3du"},
    }
    kubectl("create", "-f", "-", stdin=json.dumps(users))
    before = kubectl.get("secret", "mine-engine-key", "-n", TENANT)
    kubectl.apply(named("mine"))
    found = kubectl.poll(
        "the status to name the Secret",
        ("isvc", "mine", "-n", TENANT),
        lambda found: condition(found, "Degraded").get("reason") == "ChildNotOwned",
    )
    assert "Secret 'mine-engine-key'" in condition(found, "Degraded")["message"]
    assert kubectl.find("deployment", "mine-engine", "-n", TENANT) is None
    kubectl("delete", "isvc", "mine", "-n", TENANT)
    assert kubectl.get("secret", "mine-engine-key", "-n", TENANT) == before
    kubectl("delete", "secret", "mine-engine-key", "-n", TENANT)


@pytest.fixture
def namespaced(stack: Stack) -> Iterator[None]:
    """The release with Roles in the tenant's namespace instead of ClusterRoles."""
    install(stack.cluster, stack.images, "--set", f"watchNamespaces={{{TENANT}}}")
    yield
    install(stack.cluster, stack.images)


@pytest.mark.usefixtures("namespaced")
def test_with_roles_in_chosen_namespaces_the_operator_works(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    assert kubectl.find("clusterrolebinding", f"argosy-operator-{SYSTEM}") is None
    elsewhere = named("elsewhere")
    elsewhere["metadata"]["namespace"] = "default"
    kubectl.apply(elsewhere)
    kubectl.apply(named("chosen"))
    kubectl.poll("the service to be Ready", ("isvc", "chosen", "-n", TENANT), is_ready, 420)
    assert kubectl.find("deployment", "elsewhere-engine", "-n", "default") is None
    kubectl("delete", "isvc", "elsewhere", "-n", "default")

    # A key that somebody changed is healed when everything is read anew: by the resync, or at a start.
    words = ("secret", "chosen-engine-key", "-n", TENANT)
    right = kubectl.get(*words)["data"]
    kubectl("patch", *words, "-p", json.dumps({"data": {"ARGOSY_API_KEY": "c3RvbGVu"}}))
    kubectl("rollout", "restart", "-n", SYSTEM, "deployment/argosy-operator")
    kubectl("rollout", "status", "-n", SYSTEM, "deployment/argosy-operator", "--timeout=120s")
    poll("the key to be healed", lambda: kubectl.get(*words)["data"] == right or None, 60, interval=0.5)

    # The watches, the one for the routers in the operator's namespace among them, outlive a router's end.
    kubectl("delete", "pod", "-n", SYSTEM, "-l", "app.kubernetes.io/component=router", "--wait=false")
    kubectl("rollout", "status", "-n", SYSTEM, "deployment/argosy-router", "--timeout=180s")
    kubectl("scale", "isvc", "chosen", "-n", TENANT, "--replicas=2")
    kubectl.poll(
        "two routable replicas",
        ("isvc", "chosen", "-n", TENANT),
        lambda found: is_ready(found) and found["status"].get("routableReplicas") == 2,
        420,
    )
    assert "orbidden" not in operator_log(stack)
    (pod,) = kubectl.pods(SYSTEM, OPERATOR)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    kubectl("delete", "isvc", "chosen", "-n", TENANT)
