"""Reads the state of a rollout from a service's Deployment.

Owns the reading of the Deployment's template, strategy and annotations. Must not decide anything.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from argosy_operator.names import HELD_ANNOTATION, REVISION_LABEL, TURN_ANNOTATION, deployment_name
from argosy_operator.observed.observation import Object
from argosy_resource.engine_address import SERVICE_LABEL

TurnState = Literal["", "failed", "blocked"]
"""What became of a turn that has not ended within its deadline: the change does not work in this service, or the
cluster has no room for it. Empty before that."""


class Turn(Struct, frozen=True):
    """A service's turn in the staged rollout of the operator's own changes, as an annotation of its Deployment."""

    since: str
    """When the service got it (RFC 3339). Empty if that is not known: an earlier state of the operator wrote `true`."""
    state: TurnState = ""

    @property
    def text(self) -> str:
        return f"{self.since} {self.state}".rstrip()


def template_revision(deployment: Object) -> str:
    """The revision of the Deployment's pod template; empty if it has none."""
    revision: str = deployment["spec"]["template"]["metadata"].get("labels", {}).get(REVISION_LABEL, "")
    return revision


def container_image(deployment: Object, name: str) -> str:
    """Image of a container, or init container, of the Deployment's pod template; empty if it has none of this name."""
    spec = deployment["spec"]["template"].get("spec", {})
    containers = (*spec.get("containers", ()), *spec.get("initContainers", ()))
    return next((container.get("image", "") for container in containers if container["name"] == name), "")


def serving_revision(deployment: Object) -> str:
    """The revision that a Deployment's pods should have now: its template's, unless that waits for its turn."""
    annotations = deployment["metadata"].get("annotations", {})
    return annotations.get(HELD_ANNOTATION) or template_revision(deployment)


def has_the_turn(deployment: Object | None) -> bool:
    """Whether the operator's own change is being rolled out to this Deployment's service."""
    return deployment is not None and TURN_ANNOTATION in deployment["metadata"].get("annotations", {})


def serves(deployment: Object) -> bool:
    """Whether it is the Deployment of a service, and a replica of it is ready. The count of these is not a tenant's to
    choose: each costs a replica that runs, while labels and numbers of replicas cost nothing."""
    metadata = deployment["metadata"]
    service = metadata.get("labels", {}).get(SERVICE_LABEL)
    ready = deployment.get("status", {}).get("readyReplicas") or 0
    return bool(service) and metadata["name"] == deployment_name(service) and ready > 0


def read_turn(deployment: Object | None) -> Turn | None:
    """The turn that the Deployment says its service has; None if it has none."""
    if deployment is None or not has_the_turn(deployment):
        return None
    since, _, state = deployment["metadata"]["annotations"][TURN_ANNOTATION].partition(" ")
    return Turn(since if since[:1].isdigit() else "", state if state in ("failed", "blocked") else "")


def deployment_condition(deployment: Object | None, kind: str) -> Object:
    """The Deployment's condition of this type; empty if it has none."""
    found = (deployment or {}).get("status", {}).get("conditions", ())
    return next((each for each in found if each["type"] == kind), {})


def rolling_update(deployment: Object) -> dict[str, int]:
    """maxSurge and maxUnavailable of the Deployment, as far as it has them."""
    found: dict[str, int] = deployment["spec"].get("strategy", {}).get("rollingUpdate", {})
    return found
