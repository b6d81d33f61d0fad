"""The HorizontalPodAutoscalers that scale one service.

Owns what of a HorizontalPodAutoscaler matters here. Must not know how they are watched, nor what follows. Field
managers cannot tell of them: a write through a CustomResourceDefinition's scale subresource leaves no entry in
managedFields on Kubernetes 1.36. KEDA makes one for each ScaledObject, and keeps it at zero replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from argosy_operator.kinds import Name
from argosy_operator.names import may_be_deployment
from argosy_resource.types import GROUP, KIND

_DEPLOYMENT: Final = "Deployment/"
_MAX_NAME: Final = 253
"""Characters of an object's name. The API server does not bound that of a target, which is kept."""


class Scaler(Struct, frozen=True, kw_only=True):
    """A HorizontalPodAutoscaler whose target is an InferenceService, or could be the Deployment of one."""

    name: str
    service: Name
    """What stands for the target: the service, or the `deployment_target`."""
    is_active: bool = False
    """Whether it has the metrics to decide."""
    has_chosen: bool = False
    """Whether the number in spec.replicas is one that it has chosen by its metrics."""
    is_kedas: bool = False
    """Whether KEDA has made it for a ScaledObject."""

    @property
    def key(self) -> Name:
        return self.service[0], self.name


class Scalers(Struct, frozen=True, kw_only=True):
    """The HorizontalPodAutoscalers of one service."""

    was_asked: bool = True
    """Whether the API server has been asked for them, whatever it answered."""
    is_known: bool = False
    """Whether the API server lists them."""
    names: tuple[str, ...] = ()
    """Sorted; empty if there is none, or if that is not known."""
    are_active: bool = False
    """Whether one of them has the metrics to decide."""
    have_chosen: bool = False
    """Whether one of them has chosen the number in spec.replicas by its metrics."""
    are_kedas: bool = False
    """Whether one of them is KEDA's, which writes zero itself."""
    of_deployment: tuple[str, ...] = ()
    """Sorted names of those whose target is the service's Deployment, whose number the operator writes."""
    decide: bool = False
    """Whether spec.replicas is the number of replicas, and spec.scaling waits."""


def summarize(scalers: Iterable[Scaler], *, is_known: bool) -> Scalers:
    """What matters of the autoscalers of one service."""
    found = list(scalers)
    return Scalers(
        is_known=is_known,
        names=tuple(sorted(each.name for each in found)),
        are_active=any(each.is_active for each in found),
        have_chosen=any(each.has_chosen for each in found),
        are_kedas=any(each.is_kedas for each in found),
    )


def deployment_target(namespace: str, deployment: str) -> Name:
    """What stands for a Deployment where services are named, none of which has this name."""
    return namespace, f"{_DEPLOYMENT}{deployment}"


def target_deployment(target: Name) -> Name | None:
    """The Deployment that a `deployment_target` stands for; None if it is a service."""
    namespace, name = target
    return (namespace, name.removeprefix(_DEPLOYMENT)) if name.startswith(_DEPLOYMENT) else None


def read_scaler(obj: Mapping[str, Any]) -> Scaler | None:
    """Read a HorizontalPodAutoscaler; None if it scales something else."""
    metadata, target = obj["metadata"], obj.get("spec", {}).get("scaleTargetRef", {})
    name, namespace = target.get("name", ""), metadata.get("namespace", "")
    if len(name) > _MAX_NAME:
        return None
    group, kind = target.get("apiVersion", "").partition("/")[0], target.get("kind")
    if (group, kind) == ("apps", "Deployment") and may_be_deployment(name):
        return Scaler(name=metadata["name"], service=deployment_target(namespace, name))
    if (group, kind) != (GROUP, KIND):
        return None
    status = obj.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    is_active = conditions.get("ScalingActive", {}).get("status") == "True"
    return Scaler(
        name=metadata["name"],
        service=(namespace, name),
        is_active=is_active,
        has_chosen=_has_chosen(conditions, is_active=is_active),
        is_kedas=any(owner.get("kind") == "ScaledObject" for owner in metadata.get("ownerReferences") or ()),
    )


def _has_chosen(conditions: Mapping[str, Mapping[str, Any]], *, is_active: bool) -> bool:
    """Read the conditions as the controller of Kubernetes 1.36 writes them (pkg/controller/podautoscaler).

    Any condition means that it has looked at the service, no more. SucceededRescale stands beside the number that it
    has just written; without metrics that was a bound, and ScaleUpLimit says that it wants more. ScalingLimited comes
    with the first number it computes, so ScalingDisabled after it means that somebody wrote zero since.
    """
    reasons = {name: each.get("reason", "") for name, each in conditions.items()}
    if reasons.get("ScalingActive") == "ScalingDisabled":
        return "ScalingLimited" in reasons
    has_written = reasons.get("AbleToScale") == "SucceededRescale"
    return is_active and has_written and reasons.get("ScalingLimited") != "ScaleUpLimit"
