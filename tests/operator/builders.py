"""Resources, pods and Deployments as an API server would return them, with only what a test cares about."""

from __future__ import annotations

from typing import Any

from argosy_operator.cluster.router_watch import RouterPod
from argosy_operator.config import OperatorConfig
from argosy_operator.names import ROUTABLE_GATE
from argosy_operator.pod import Pod
from argosy_resource.types import InferenceService, parse

NOW = "2026-01-01T00:00:00Z"
CONFIG = OperatorConfig(
    namespace="argosy-system",
    fleet_key=b"0123456789abcdef",
    engine_image="argosy-engine:test",
    engine_upgrade_policy="Automatic",  # so that another default image is a change of the operator's
    router_url="http://router",
)


def isvc_object(name: str = "tiny", *, namespace: str = "team", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "inference.argosy.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "generation": 1,
            "creationTimestamp": "2025-01-01T00:00:00Z",
        },
        "spec": {"model": {"source": "builtin://tiny"}, **spec},
    }


def namespace(name: str) -> dict[str, Any]:
    """A Namespace, as the fake cluster has it."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "namespace": ""}}


def isvc(name: str = "tiny", **spec: Any) -> InferenceService:
    return parse(isvc_object(name, **spec))


def pod(
    name: str,
    revision: str,
    *,
    ready: bool = True,
    gate: str = "True",
    node: str = "node-a",
    **more: Any,
) -> Pod:
    state = {"containers_ready": ready, "is_ready": ready and gate == "True", "gate": gate, "node": node}
    return Pod(**{"name": name, "uid": f"uid-{name}", "revision": revision, **state, **more})


def autoscaler(
    status: dict[str, Any] | None = None, *, is_kedas: bool = False, **target: Any
) -> dict[str, Any]:
    """The HorizontalPodAutoscaler `hpa` of the service `tiny`, but for `target`."""
    reference = {"apiVersion": "inference.argosy.dev/v1alpha1", "kind": "InferenceService", "name": "tiny"}
    keda = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "name": "tiny", "controller": True}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {
            "name": "hpa",
            "namespace": "team",
            **({"ownerReferences": [{**keda, "uid": "uid-keda"}]} if is_kedas else {}),
        },
        "spec": {"scaleTargetRef": reference | target, "maxReplicas": 9},
        "status": status or {},
    }


def pod_object(name: str, *, labels: dict[str, str] | None = None, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": labels or {}},
        "spec": {"nodeName": "node-a"},
        "status": {"phase": "Running", **status},
    }


def gate_condition(status: str) -> dict[str, str]:
    return {"type": ROUTABLE_GATE, "status": status}


def router_pods(*names: str) -> list[RouterPod]:
    return [RouterPod(uid=name, name=name, address=name) for name in names]
