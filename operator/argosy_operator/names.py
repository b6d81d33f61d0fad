"""Names, labels and annotations of the objects that the operator owns, and the kinds that it reads and writes.

Owns the strings by which the operator, the router and the cluster find objects (those about engines, which a local
fleet needs as well, are in `argosy_resource.engine_command`), and the table of kinds, so that no API discovery is
needed. Knows no object's content but its metadata. Invariant: a generated name is a DNS label of at most 63 characters,
and so are the names that Kubernetes derives from it (ReplicaSet, Pod); long names end in a hash, so that two resources
never share a child.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import xxhash
from msgspec import Struct

from argosy_protocol import fleet
from argosy_resource import types
from argosy_resource.engine_command import selector, service_label
from argosy_resource.types import GROUP, InferenceService

Object = dict[str, Any]
"""A Kubernetes object as JSON."""
Name = tuple[str, str]
"""Namespace and name."""


class Kind(Struct, frozen=True):
    """An API resource."""

    group: str
    version: str
    name: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


SERVICES: Final = Kind("", "v1", "Service", "services")
SECRETS: Final = Kind("", "v1", "Secret", "secrets")
PODS: Final = Kind("", "v1", "Pod", "pods")
CONFIGMAPS: Final = Kind("", "v1", "ConfigMap", "configmaps")
EVENTS: Final = Kind("", "v1", "Event", "events")
DEPLOYMENTS: Final = Kind("apps", "v1", "Deployment", "deployments")
STATEFUL_SETS: Final = Kind("apps", "v1", "StatefulSet", "statefulsets")
BUDGETS: Final = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
NAMESPACES: Final = Kind("", "v1", "Namespace", "namespaces")
LEASES: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases")
AUTOSCALERS: Final = Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
INFERENCE_SERVICES: Final = Kind(types.GROUP, types.VERSION, types.KIND, types.PLURAL)
KINDS: Final[Mapping[tuple[str, str], Kind]] = {
    (kind.api_version, kind.name): kind
    for kind in (
        *(SERVICES, SECRETS, PODS, CONFIGMAPS, EVENTS, DEPLOYMENTS, STATEFUL_SETS, BUDGETS, NAMESPACES),
        *(LEASES, AUTOSCALERS, INFERENCE_SERVICES),
    )
}
"""Every kind, by `apiVersion` and `kind` of its objects."""
FIELD_MANAGER: Final = "argosy-operator"
ROUTABLE_GATE: Final = f"{GROUP}/routable"
"""Readiness gate, and the pod condition of the same name. The operator is its sole writer."""
MODEL_CACHED_CONDITION: Final = f"{GROUP}/ModelCached"
"""Pod condition: how far the fetch of the pod's model is. The operator is its sole writer."""
REVISION_LABEL: Final = fleet.REVISION_LABEL
"""On every pod: hash of the pod template that it was created from."""
TRACK_LABEL: Final = f"{GROUP}/track"
"""On the pods of a canary rollout's own Deployment: CANARY_TRACK."""
CANARY_TRACK: Final = "canary"
APPLIED_ANNOTATION: Final = f"{GROUP}/applied"
"""On every child: hash of the manifest as it was applied, so that an unchanged one is not written again."""
KEY_ANNOTATION: Final = f"{GROUP}/internal-key"
"""On the pod template of engines that read their key when they start: digest of the oldest key that is valid. When that
is no longer so, they must be replaced."""
INPUT_ANNOTATION: Final = f"{GROUP}/input"
"""On the Deployment: hash of those parts of the spec that shape the pods."""
ENGINE_IMAGE_ANNOTATION: Final = f"{GROUP}/default-engine-image"
"""On the Deployment: the default image of engines when the service was rolled out last."""
FETCH_IMAGE_ANNOTATION: Final = f"{GROUP}/default-fetch-image"
"""On the Deployment: the same for the container that fetches the model."""
SERVED_ANNOTATION: Final = f"{GROUP}/served-revision"
"""On the Deployment: the last revision of its pod template of which a replica was routable."""
WARM_UP_ANNOTATION: Final = f"{GROUP}/warm-up"
"""On a Deployment whose image was chosen since engines compute their peers' hottest prefixes before they are ready."""
KEY_FILE_ANNOTATION: Final = f"{GROUP}/key-file"
"""On a Deployment whose image was chosen since engines follow a file of internal keys."""
REQUESTS_ANNOTATION: Final = f"{GROUP}/gpu-requests"
"""On a Deployment whose image was chosen since engines with GPUs request CPUs and memory without being told to."""
HELD_ANNOTATION: Final = f"{GROUP}/held-revision"
"""On a Deployment whose template waits to be rolled out, for its turn or for a canary: the revision that keeps
serving."""
HELD_IMAGES_ANNOTATION: Final = f"{GROUP}/held-images"
"""On such a Deployment, and on one with which other images are rolled out: the images of the revision that serves, and
the hash of its input, as JSON (`desired.upgrades`)."""
CANARY_ANNOTATION: Final = f"{GROUP}/canary"
"""On a Deployment whose template is tried on a canary: how far that is, as JSON (`desired.rollout`)."""
NODE_TEMPLATE_ANNOTATION: Final = f"{GROUP}/node-template"
"""On a pod whose engine spans several nodes: the pod template of the others, as JSON (`desired.pod_template`)."""
LEADER_LABEL: Final = f"{GROUP}/leader"
"""On these others, and on their StatefulSet: the UID of that pod."""
NUDGE_ANNOTATION: Final = f"{GROUP}/asked-again"
"""On a Deployment whose pods the API server refuses: when Kubernetes was last asked for them again (RFC 3339)."""
TURN_ANNOTATION: Final = f"{GROUP}/has-turn"
"""On the one Deployment to which a change of the operator's is being rolled out."""
UNREADABLE_ANNOTATION: Final = f"{GROUP}/unreadable-namespaces"
"""On the operator's Lease: why namespaces cannot be read, by their names, as JSON. `argosy why` looks at it."""
NAME_LABEL: Final = "app.kubernetes.io/name"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
ROUTER_ADMIN_PORT: Final = 8081
FLEET_CONFIGMAP: Final = "argosy-fleet"
FLEET_KEY: Final = "fleet.json"
_POD_SUFFIX: Final = len("-0123456789-abcde")
"""Length of what ReplicaSet (template hash) and Pod (random) append to a Deployment's name."""
REVISION_LENGTH: Final = 10
"""Characters of a revision (`REVISION_LABEL`)."""


def shorten(name: str, limit: int) -> str:
    """Shorten a name to at most `limit` characters: its beginning, and a hash of all of it."""
    if len(name) <= limit:
        return name
    return f"{name[: limit - 9].rstrip('-.')}-{xxhash.xxh3_64_hexdigest(name.encode())[:8]}"


def child_name(service: InferenceService, suffix: str = "engine") -> str:
    """Name of a child object: `NAME-SUFFIX`."""
    return _child_name(service.metadata.name, suffix)


_ENGINE_SUFFIX: Final = "engine"


def may_be_deployment(name: str) -> bool:
    """Whether a Deployment of this name could be a service's."""
    return name.endswith(f"-{_ENGINE_SUFFIX}")


def deployment_name(service: str) -> str:
    """Name of the Deployment of the service of this name."""
    return _child_name(service, _ENGINE_SUFFIX)


def _child_name(service: str, suffix: str) -> str:
    return f"{shorten(service, 63 - _POD_SUFFIX - len(suffix) - 1)}-{suffix}"


def canary_name(service: InferenceService, revision: str) -> str:
    return child_name(service, f"canary-{revision}")


def pod_owners(service: InferenceService) -> tuple[str, str]:
    """Beginnings of the names of the ReplicaSets that control the service's replicas: those of its Deployment, and of
    the canaries of its rollouts."""
    revision = "0" * REVISION_LENGTH
    return f"{child_name(service)}-", canary_name(service, revision).removesuffix(revision)


def node_set_name(service: InferenceService, leader_uid: str) -> str:
    """Name of the StatefulSet of a replica's further nodes. Kubernetes appends a hash of ten characters for a label."""
    return child_name(service, f"nodes-{xxhash.xxh3_64_hexdigest(leader_uid.encode())[:8]}")


def child_labels(service: InferenceService) -> dict[str, str]:
    return {
        NAME_LABEL: "argosy",
        INSTANCE_LABEL: service_label(service),
        MANAGED_BY_LABEL: FIELD_MANAGER,
        **selector(service),
    }


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of an object that says its own."""
    return KINDS[manifest["apiVersion"], manifest["kind"]]


def object_name(obj: Mapping[str, Any]) -> Name:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def annotations_of(obj: Mapping[str, Any] | None) -> Mapping[str, str]:
    """The annotations of an object, or of a pod template."""
    found: Mapping[str, str] = {} if obj is None else obj["metadata"].get("annotations", {})
    return found


def controller_of(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    """The owner reference of what controls an object; empty if nothing does."""
    owners = obj["metadata"].get("ownerReferences", ())
    return next((owner for owner in owners if owner.get("controller")), {})
