"""The release in the hands of an administrator: render, test, upgrade, uninstall, install again.

The last file of the run, because the router's address changes with its Service.
"""

from __future__ import annotations

from typing import Any

from cluster.shell import poll
from conftest import ROOT, SYSTEM, TENANT, Stack, install
from test_chart_rights import named
from test_whole_path import is_ready

KEYS = ("argosy-fleet-key", "argosy-router-keys")


def keys(stack: Stack) -> dict[str, Any]:
    found = {name: stack.cluster.kubectl.get("secret", name, "-n", SYSTEM) for name in KEYS}
    return {name: (secret["metadata"]["uid"], secret["data"]) for name, secret in found.items()}


def engines(stack: Stack) -> list[str]:
    pods = stack.cluster.kubectl.pods(TENANT, "inference.argosy.dev/service=kept")
    return [pod["metadata"]["uid"] for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def test_rendered_without_a_cluster_it_is_the_same_each_time(stack: Stack) -> None:
    words = ("template", "argosy", str(ROOT / "charts" / "argosy"), "-n", SYSTEM)
    assert stack.cluster.helm(*words).stdout == stack.cluster.helm(*words).stdout


def test_helm_test_passes(stack: Stack) -> None:
    done = stack.cluster.helm("test", "argosy", "-n", SYSTEM, "--logs", "--timeout", "120s")
    assert "the router is ready" in done.stdout


def test_keys_and_engines_outlive_an_uninstallation(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    install(stack.cluster, stack.images, keys=())  # the operator makes a key for clients, too
    assert kubectl.find("secret", "argosy-router-given-keys", "-n", SYSTEM) is None
    kubectl.apply(named("kept"))
    kubectl.poll("the service to be Ready", ("isvc", "kept", "-n", TENANT), is_ready, 420)
    made, running = keys(stack), engines(stack)
    assert len(running) == 1

    stack.cluster.helm("uninstall", "argosy", "-n", SYSTEM, "--wait", timeout=180)
    poll("the release's pods to be gone", lambda: kubectl.pods(SYSTEM) == [] or None, 120, interval=0.5)
    assert keys(stack) == made
    assert engines(stack) == running
    assert kubectl.find("isvc", "kept", "-n", TENANT) is not None

    install(stack.cluster, stack.images, keys=())
    kubectl.apply({**named("kept"), "spec": {**named("kept")["spec"], "replicas": 2}})
    kubectl.poll(
        "the operator to be back at work",
        ("isvc", "kept", "-n", TENANT),
        lambda found: is_ready(found) and found["status"].get("routableReplicas") == 2,
        420,
    )
    assert keys(stack) == made
    assert set(running) < set(engines(stack)), "no engine was replaced"
    done = stack.cluster.helm("test", "argosy", "-n", SYSTEM, "--logs", "--timeout", "120s")
    assert "serves kept" in done.stdout
    kubectl("delete", "isvc", "kept", "-n", TENANT)
