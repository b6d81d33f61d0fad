"""A HorizontalPodAutoscaler drives a service through the scale subresource, and nobody takes spec.replicas from it.

The controller is Kubernetes' own; its numbers come from an external-metrics API of the test's, as KEDA serves one. What
KEDA writes itself, from and to zero, goes through the same subresource.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.settings import HOST_ADDRESS
from cluster.shell import poll
from conftest import SYSTEM, TENANT, Stack
from external_metrics import ExternalMetrics, external_metrics
from test_chart_rights import named
from test_whole_path import condition, is_ready

NAME = "autoscaled"
WORDS = (f"inferenceservice/{NAME}", "-n", TENANT)
SELECTOR = f"inference.argosy.dev/service={NAME}"
METRIC = "argosy_router_queued_requests"
CONTROLLER = "kube-controller-manager"


def manifest() -> dict[str, Any]:
    """Without spec.replicas, as docs/installation.md tells users of an autoscaler."""
    made = named(NAME)
    del made["spec"]["replicas"]
    return made


AUTOSCALER = {
    "apiVersion": "autoscaling/v2",
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": NAME, "namespace": TENANT},
    "spec": {
        "scaleTargetRef": {
            "apiVersion": "inference.argosy.dev/v1alpha1",
            "kind": "InferenceService",
            "name": NAME,
        },
        "minReplicas": 1,
        "maxReplicas": 3,
        "metrics": [
            {
                "type": "External",
                "external": {
                    "metric": {"name": METRIC},
                    "target": {"type": "AverageValue", "averageValue": "10"},
                },
            }
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
    },
}


@pytest.fixture(scope="module")
def metrics(stack: Stack) -> Iterator[ExternalMetrics]:
    if stack.cluster.external:
        pytest.skip("an external cluster cannot reach a metrics API of this machine")
    kubectl = stack.cluster.kubectl
    with external_metrics(stack.cluster.settings, kubectl) as api:
        api.values[METRIC] = 10
        kubectl.apply(manifest())
        kubectl.poll("the service to be Ready", WORDS, is_ready, 420)
        kubectl.apply(AUTOSCALER)
        yield api
        kubectl("delete", "hpa", NAME, "-n", TENANT, "--ignore-not-found")
        kubectl("delete", "isvc", NAME, "-n", TENANT, "--timeout=60s")
        poll("its pods to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 180, interval=0.5)


def wait_for_replicas(stack: Stack, count: int) -> dict[str, Any]:
    return stack.cluster.kubectl.poll(
        f"{count} routable replicas",
        WORDS,
        lambda found: (
            found["spec"]["replicas"] == count
            and found["status"].get("replicas") == count
            and found["status"].get("routableReplicas", 0) == count
        ),
        420,
    )


def owners(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(manager, subresource) of spec.replicas."""
    return [
        (entry["manager"], entry.get("subresource", ""))
        for entry in found["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    ]


def managed(stack: Stack) -> dict[str, Any]:
    return stack.cluster.kubectl.get(*WORDS, "--show-managed-fields")


def test_only_the_front_proxy_is_served(stack: Stack, metrics: ExternalMetrics) -> None:
    pki = stack.cluster.settings.pki
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.check_hostname = False
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    connection = http.client.HTTPSConnection(HOST_ADDRESS, metrics.port, context=context, timeout=30)
    try:
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):  # noqa: PT012
            connection.request("GET", "/apis/external.metrics.k8s.io/v1beta1")
            connection.getresponse()
    finally:
        connection.close()
    path = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{TENANT}/{METRIC}"
    answer = json.loads(stack.cluster.kubectl("get", f"--raw={path}").stdout)
    assert [item["value"] for item in answer["items"]] == [str(metrics.values[METRIC])]


def test_the_autoscaler_scales_up(stack: Stack, metrics: ExternalMetrics) -> None:
    metrics.values[METRIC] = 20
    wait_for_replicas(stack, 2)
    assert "system:serviceaccount:kube-system:horizontal-pod-autoscaler" in metrics.users
    assert owners(managed(stack)) == [(CONTROLLER, "scale")]
    hpa = stack.cluster.kubectl.get("hpa", NAME, "-n", TENANT)
    assert {each["type"]: each["status"] for each in hpa["status"]["conditions"]}["ScalingActive"] == "True"
    assert condition(managed(stack), "Degraded")["status"] == "False"


@pytest.mark.usefixtures("metrics")
def test_applying_again_leaves_the_autoscalers_number(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    before = managed(stack)
    assert before["spec"]["replicas"] == 2
    for words in (("--server-side",), ("--server-side", "--force-conflicts"), ()):
        kubectl("apply", *words, "-f", "-", stdin=json.dumps(manifest()))
        found = managed(stack)
        assert found["metadata"]["generation"] == before["metadata"]["generation"]
        assert owners(found) == [(CONTROLLER, "scale")]


@pytest.mark.usefixtures("metrics")
def test_a_new_operator_leaves_the_autoscalers_number(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    before = managed(stack)
    pods = {pod["metadata"]["uid"] for pod in kubectl.pods(TENANT, SELECTOR)}
    kubectl("rollout", "restart", "-n", SYSTEM, "deployment/argosy-operator")
    kubectl("rollout", "status", "-n", SYSTEM, "deployment/argosy-operator", "--timeout=120s")
    kubectl("delete", "service", f"{NAME}-engine", "-n", TENANT)
    kubectl.poll(
        "the operator to be at work", ("service", f"{NAME}-engine", "-n", TENANT), lambda _: True, 60
    )
    found = managed(stack)
    assert found["metadata"]["generation"] == before["metadata"]["generation"]
    assert owners(found) == [(CONTROLLER, "scale")]
    assert {pod["metadata"]["uid"] for pod in kubectl.pods(TENANT, SELECTOR)} == pods


def test_scaling_twice_is_said_and_ends_with_the_autoscaler(stack: Stack, metrics: ExternalMetrics) -> None:
    kubectl = stack.cluster.kubectl
    scaling = {"minReplicas": 1, "maxReplicas": 2, "metrics": {"concurrency": 32}}
    patch = ("patch", "isvc", NAME, "-n", TENANT, "--type=merge", "-p")
    kubectl(*patch, json.dumps({"spec": {"scaling": scaling}}))
    found = kubectl.poll(
        "the status to name both",
        WORDS,
        lambda found: condition(found, "Degraded").get("reason") == "ScaledTwice",
    )
    assert CONTROLLER in condition(found, "Degraded")["message"]
    kubectl(*patch, json.dumps({"spec": {"scaling": None}}))
    kubectl.poll(
        "the status to be well again",
        WORDS,
        lambda found: condition(found, "Degraded").get("status") == "False",
    )
    metrics.values[METRIC] = 5
    wait_for_replicas(stack, 1)


@pytest.mark.usefixtures("metrics")
def test_to_zero_and_back_as_keda_does(stack: Stack) -> None:
    """The HorizontalPodAutoscaler rests at 0, and KEDA, which wrote it, writes the first replica."""
    kubectl = stack.cluster.kubectl
    patch = (
        "patch",
        "isvc",
        NAME,
        "-n",
        TENANT,
        "--subresource=scale",
        "--type=merge",
        "--field-manager=keda-operator",
    )
    kubectl(*patch, "-p", json.dumps({"spec": {"replicas": 0}}))
    poll("every pod to be gone", lambda: kubectl.pods(TENANT, SELECTOR) == [] or None, 180, interval=0.5)
    found = managed(stack)
    assert owners(found) == [("keda-operator", "scale")]
    assert condition(found, "Degraded")["status"] == "False"
    kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest()))
    assert managed(stack)["spec"]["replicas"] == 0
    kubectl(*patch, "-p", json.dumps({"spec": {"replicas": 1}}))
    assert is_ready(wait_for_replicas(stack, 1))
