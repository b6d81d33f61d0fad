"""HorizontalPodAutoscalers scale services through the scale subresource, and KEDA does to zero and from it.

The controller is Kubernetes' own; its numbers come from an external-metrics API of the test's, as KEDA serves one.
KEDA itself is not run: at zero it writes the scale and leaves its autoscaler, and so does the test. Each test builds on
the one before.
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
OPERATOR = "app.kubernetes.io/component=operator"


def manifest(scaling: dict[str, Any] | None = None) -> dict[str, Any]:
    """Without spec.replicas, as docs/scaling.md tells users of an autoscaler."""
    made = named(NAME)
    del made["spec"]["replicas"]
    if scaling is not None:
        made["spec"]["scaling"] = scaling
    return made


SCALING = {"minReplicas": 1, "maxReplicas": 2, "metrics": {"concurrency": 1000}}
"""What the operator would do by itself with the load of this test: one replica."""
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
            found["status"].get("replicas") == count and found["status"].get("routableReplicas", 0) == count
        ),
        420,
    )


def wanted(stack: Stack) -> int:
    number: int = stack.cluster.kubectl.get("deployment", f"{NAME}-engine", "-n", TENANT)["spec"]["replicas"]
    return number


def wait_for_ownership(stack: Stack, reason: str) -> dict[str, Any]:
    return stack.cluster.kubectl.poll(
        f"Degraded to have the reason {reason}",
        WORDS,
        lambda found: condition(found, "Degraded").get("reason") == reason,
        60,
    )


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
    found = wait_for_replicas(stack, 2)
    assert found["spec"]["replicas"] == 2
    assert "system:serviceaccount:kube-system:horizontal-pod-autoscaler" in metrics.users


def test_with_scaling_of_its_own_the_service_tells_who_decides(
    stack: Stack, metrics: ExternalMetrics
) -> None:
    kubectl = stack.cluster.kubectl
    kubectl.apply(manifest(SCALING))
    message = condition(wait_for_ownership(stack, "ScaledTwice"), "Degraded")["message"]
    assert f"HorizontalPodAutoscaler {NAME}" in message
    metrics.values[METRIC] = 30
    found = wait_for_replicas(stack, 3)
    assert found["spec"]["replicas"] == 3, "beyond spec.scaling.maxReplicas"
    assert is_ready(found)
    status = found["status"]["scaling"]
    assert (status["wanted"], status["reason"]) == (3, "HorizontalPodAutoscaler")
    events = kubectl.get("events", "-n", TENANT, "--field-selector", "reason=ScaledTwice")["items"]
    assert [event["involvedObject"]["name"] for event in events] == [NAME]


@pytest.mark.usefixtures("metrics")
def test_a_new_operator_leaves_the_number_alone(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    before = kubectl.get("deployment", f"{NAME}-engine", "-n", TENANT)["metadata"]["generation"]
    ended = kubectl.pods(SYSTEM, OPERATOR)[0]["metadata"]["name"]
    kubectl("delete", "pod", ended, "-n", SYSTEM, "--timeout=120s")
    kubectl("rollout", "status", "deployment/argosy-operator", "-n", SYSTEM, "--timeout=120s")
    # It is at work when it answers a change, and would by then have decided about the number.
    kubectl("annotate", "hpa", NAME, "-n", TENANT, "seen=yes")
    kubectl("delete", "pdb", f"{NAME}-engine", "-n", TENANT)
    poll(
        "the new operator to repair a child",
        lambda: kubectl.find("pdb", f"{NAME}-engine", "-n", TENANT),
        120,
        interval=0.5,
    )
    assert wanted(stack) == 3
    assert kubectl.get("deployment", f"{NAME}-engine", "-n", TENANT)["metadata"]["generation"] == before


def test_zero_is_kept_while_the_autoscaler_stands(stack: Stack, metrics: ExternalMetrics) -> None:
    """KEDA at zero: its autoscaler stays, and is idle since the scale is 0."""
    kubectl = stack.cluster.kubectl
    kubectl("scale", "isvc", NAME, "-n", TENANT, "--replicas=0")
    found = wait_for_replicas(stack, 0)
    assert condition(found, "Ready")["reason"] == "ScaledToZero"
    assert condition(found, "Degraded")["reason"] == "ScaledTwice"
    idle = kubectl.poll(
        "the autoscaler to be idle",
        ("hpa", NAME, "-n", TENANT),
        lambda found: any(
            each["type"] == "ScalingActive" and each["reason"] == "ScalingDisabled"
            for each in found.get("status", {}).get("conditions", ())
        ),
        60,
    )
    assert idle["status"]["desiredReplicas"] == 0
    assert wanted(stack) == 0, "spec.scaling.minReplicas is 1"
    metrics.values[METRIC] = 20
    kubectl("scale", "isvc", NAME, "-n", TENANT, "--replicas=1")
    wait_for_replicas(stack, 2)


@pytest.mark.usefixtures("metrics")
def test_without_the_autoscaler_spec_scaling_goes_on(stack: Stack) -> None:
    kubectl = stack.cluster.kubectl
    kubectl("delete", "hpa", NAME, "-n", TENANT)
    found = wait_for_ownership(stack, "AsExpected")
    assert wanted(stack) == 2, "it begins with the number that there is"
    assert found["status"]["scaling"]["wanted"] == 2
    kubectl.apply(manifest({**SCALING, "maxReplicas": 1}))
    found = wait_for_replicas(stack, 1)
    assert found["spec"]["replicas"] == 2, "the operator never writes it"
    assert found["status"]["scaling"]["reason"] == "MaxReplicas"
