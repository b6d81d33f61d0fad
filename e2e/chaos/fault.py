"""What a fault is, and what it must not leave behind."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from chaos.api import Object, Refused
from chaos.rig import Rig

BYSTANDER = "bystander"
"""A namespace with objects of a user, in which no fault happens."""


class Violation(Exception):
    """A promise was broken; the text says which, and how."""


@dataclass(frozen=True)
class Fault:
    """One fault by its name."""

    name: str
    promise: str
    """What holds all the same, as a line of the table."""
    cause: Callable[[Rig, str], Awaitable[str]]
    """Causes it in a namespace of its own and returns what was seen; raises `Violation`."""
    seconds: float
    """Longest time that it may take on a busy machine."""


def require(holds: bool, text: str) -> None:
    """Raises Violation with `text` unless it holds."""
    if not holds:
        raise Violation(text)


async def create_bystanders(rig: Rig) -> dict[str, Any]:
    """Make objects that resemble the operator's but are a user's; returns what must stay."""
    await rig.namespace(BYSTANDER)
    labels = {"app.kubernetes.io/name": "argosy", "app.kubernetes.io/managed-by": "argosy-operator"}
    named = {"name": "tiny-engine", "labels": labels}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": named,
        "spec": {
            "replicas": 0,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}},
            "selector": {"matchLabels": {"app": "users"}},
            "template": {
                "metadata": {"labels": {"app": "users"}},
                "spec": {"containers": [{"name": "c", "image": "users"}]},
            },
        },
    }
    port = {"ports": [{"port": 80}], "selector": {"app": "users"}}
    secret = {"name": "tiny-engine-key", "labels": labels}
    data = base64.b64encode(b"users").decode()
    for resource, obj in (
        ("deployments", deployment),
        ("services", {"apiVersion": "v1", "kind": "Service", "metadata": named, "spec": port}),
        ("secrets", {"apiVersion": "v1", "kind": "Secret", "metadata": secret, "data": {"k": data}}),
        ("configmaps", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "argosy-fleet"}}),
    ):
        await rig.api.apply(resource, BYSTANDER, obj)
    return await bystanders(rig)


async def bystanders(rig: Rig) -> dict[str, Any]:
    """UID, generation and content of the user's objects."""
    found = {}
    for resource in ("deployments", "services", "secrets", "configmaps"):
        for obj in await rig.api.list(resource, BYSTANDER):
            metadata = obj["metadata"]
            content = {key: obj.get(key) for key in ("spec", "data")}
            kept = {key: metadata.get(key) for key in ("uid", "generation", "labels", "ownerReferences")}
            found[f"{resource}/{metadata['name']}"] = (kept, content)
    return found


OWNED = {
    *("inferenceservices/status", "deployments", "services", "poddisruptionbudgets", "secrets"),
    *("pods/status", "pods", "events", "configmaps", "leases", "statefulsets"),
}
"""Everything that the operator may write."""


def foreign_writes(rig: Rig, namespaces: set[str]) -> list[str]:
    """Writes of the operator, by the API server's own notes, that are none of its business."""
    found = []
    for write in rig.plane.operator_writes():
        is_own = write["resource"] in OWNED and write["namespace"] in namespaces
        if write["resource"] == "pods" and write["verb"] != "patch":
            is_own = False
        if not is_own:
            found.append("{verb} {resource} {namespace}/{name}".format(**write))
    return found


VOLATILE = {
    *("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "selfLink"),
    *("lastTransitionTime", "lastUpdateTime", "observedGeneration", "clusterIP", "clusterIPs", "startTime"),
    *("time", "lastProbeTime", "podIP", "podIPs", "pod-template-hash", "namespace", "servedName", "message"),
    *("inference.argosy.dev/revision", "inference.argosy.dev/internal-key", "inference.argosy.dev/applied"),
    *("inference.argosy.dev/served-revision", "inference.argosy.dev/input", "coldStart", "data", "revision"),
}  # fmt: skip
"""Fields that differ between two runs of the same steps."""


def comparable(value: Any, namespace: str) -> Any:
    """A value without what differs between two runs."""
    if isinstance(value, dict):
        return {key: comparable(each, namespace) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [comparable(each, namespace) for each in value]
    if isinstance(value, str):
        return value.replace(namespace, "NAMESPACE")
    return value


async def end_state(rig: Rig, namespace: str) -> dict[str, Any]:
    """The services of a namespace, their children and replicas, comparable with those of another namespace."""
    found: dict[str, Any] = {}
    for resource in ("inferenceservices", "deployments", "services", "poddisruptionbudgets", "secrets"):
        for obj in await rig.api.list(resource, namespace):
            found[f"{resource}/{obj['metadata']['name']}"] = comparable(obj, namespace)
    sets = await rig.api.list("replicasets", namespace)
    found["pod templates"] = len(sets)
    for pod in await rig.pods(namespace):
        service = pod["metadata"]["labels"]["inference.argosy.dev/service"]
        kind = f"pods of {service}"
        conditions = {each["type"]: each["status"] for each in pod["status"]["conditions"]}
        images = [each["image"] for each in pod["spec"]["containers"]]
        found.setdefault(kind, []).append([images, sorted(conditions.items())])
    for key, value in found.items():
        if key.startswith("pods of"):
            found[key] = sorted(value)
    found["fleet document"] = sorted(
        name.partition("/")[2] for name in await rig.fleet() if name.startswith(f"{namespace}/")
    )
    return found


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Where two end states differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            line
            for key in sorted(expected.keys() | found.keys())
            for line in differences(expected.get(key), found.get(key), f"{path}.{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, f"{path}[{number}]")]
    return [] if expected == found else [f"{path[1:]}: {expected!r:.150} != {found!r:.150}"]


async def is_gone(rig: Rig, resource: str, namespace: str) -> bool:
    """Whether nothing of a kind is left in a namespace; what cannot be listed is gone."""
    try:
        return not await rig.api.list(resource, namespace)
    except Refused as error:
        if error.status == 404:
            return True
        raise


def uids(objects: list[Object]) -> set[str]:
    return {each["metadata"]["uid"] for each in objects}
