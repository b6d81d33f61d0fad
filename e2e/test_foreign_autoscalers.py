"""A HorizontalPodAutoscaler drives a service through the scale subresource.

The controller is Kubernetes' own; its numbers come from an external-metrics API of the test's, as KEDA serves one.
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
from conftest import TENANT, Stack
from external_metrics import ExternalMetrics, external_metrics
from test_chart_rights import named
from test_whole_path import is_ready

NAME = "autoscaled"
WORDS = (f"inferenceservice/{NAME}", "-n", TENANT)
SELECTOR = f"inference.argosy.dev/service={NAME}"
METRIC = "argosy_router_queued_requests"


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
