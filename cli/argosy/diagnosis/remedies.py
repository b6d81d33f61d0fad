"""What to do about a reason that the operator or the kubelet gives.

Owns the table; docs/operations.md explains the operator's reasons at length. Must not know how a reason is found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_IMAGE: Final = (
    "correct the image's name, or add the registry's Secret to spec.podTemplate.spec.imagePullSecrets"
)
_AGAIN: Final = "; it is started again by itself"
_IMAGE_REASONS: Final = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName")
REMEDIES: Final[dict[str, str]] = {
    "InvalidSpec": "correct the field that the message names, and apply the manifest again",
    "NameConflict": "change spec.model.servedName or spec.model.aliases of one of the two services",
    "NameRefused": (
        "change spec.model.servedName or spec.model.aliases, to names that begin with the service's own namespace and "
        "'/', say; or have an administrator allow the name (modelNames of the chart)"
    ),
    "NameReserved": "wait, or change spec.model.servedName or spec.model.aliases",
    "FleetDocumentFull": "delete services of this namespace, or give them fewer and shorter aliases",
    "ChildNotOwned": "rename or delete the object, or rename the service",
    "ChildContested": "exempt the object that the message names from the webhook or controller that changes it",
    "ModelFetchFailed": "remove the cause that the message names; the fetch is tried again by itself",
    "ModelStoreLocked": "look at the pods that use the volume, and delete the one that stands still",
    "StoreLocked": "look at the pods that use the volume, and delete the one that stands still",
    "Stopped": "raise spec.replicas (kubectl scale), or leave it stopped",
    "SourceNotFound": "correct spec.model.source, or put the model where it points to",
    "VolumesNotMounted": "correct what the Events of the pod name",
    "ScaleIgnored": "change minReplicas and maxReplicas of spec.scaling, or remove spec.scaling",
    "ClaimNotFound": "create the PersistentVolumeClaim, or correct spec.model.cache.claimName or the pvc:// source",
    "Evicted": "raise spec.model.cache.sizeLimit if the message names it, else free the node's disk or memory",
    "RolloutHalted": "apply the previous manifest, or correct the change that the new replica fails with; the old ones "
    "serve meanwhile",
    "CanaryFailed": "apply the previous manifest, or one without what the message names; or set "
    "spec.rollout.canary.action to Promote, with the revision in status.rollout",
    "CanaryAnalyzing": "wait; an analysis needs requests: send some, lower minRequests of its analysis, or set "
    "spec.rollout.canary.action to Promote with the revision in status.rollout",
    "CanaryHeld": "set spec.rollout.canary.action to Promote or Abort, with the revision in status.rollout; or remove "
    "what holds: hold of spec.rollout.canary, or of its step, which action Continue lets go on as well",
    "WaitingForCapacity": "free what the message says is missing (a GPU, memory, the namespace's quota), or set "
    "spec.rollout.maxUnavailable to 1, with which a serving replica is stopped for its successor",
    "Untried": "send a request, which starts a replica, or wait for one",
    "NoGPUForSurge": "wait: replicas are replaced one at a time, without an additional one",
    "NoRoomForSurge": "wait: replicas are replaced one at a time, without an additional one",
    "SchedulingGated": "look at what holds the gate that the message names, such as the pod's Workload of Kueue",
    "WaitingForTurn": "wait: new defaults reach few services at a time, and only those whose replicas are all routable",
    "ProgressDeadlineExceeded": "look at the pods' logs; spec.rollout.progressDeadlineSeconds is the limit",
    "WaitingForRouter": "look at the routers' logs, in the operator's namespace",
    "NoRouter": "install routers (chart value router.replicas), or look at their pods, in the operator's namespace",
    "NodeLost": "wait for the node, or delete it so that its pods start elsewhere",
    "NodeCacheDisabled": "use spec.model.cache.type claim, or set the chart's nodeCache.enabled",
    "NodeCacheElsewhere": "change spec.placement.nodeSelector to nodes that have the cache",
    "InvalidEngineArgs": "correct the flag of spec.engine.args that the message names",
    "ServiceAccountNotAllowed": "leave spec.placement.serviceAccountName out, or have the administrator list the "
    "account in the chart's engine.serviceAccounts",
    "ObjectReserved": "remove what the message names from spec.podTemplate or spec.model, or give an object of yours "
    "another name",
    "DeploymentScaled": "let the HorizontalPodAutoscaler's scaleTargetRef be the InferenceService",
    "RouterUnreachable": "let the operator reach port 8081 of that pod (a NetworkPolicy, a sidecar), or delete the pod",
    "ScaledTwice": "remove one of the two that scale: spec.scaling, or the HorizontalPodAutoscaler or other client "
    "that the message names",
    "UnknownTimeZone": "correct spec.scaling.schedules: a time zone is an IANA name, such as Europe/Berlin",
    "CanaryNotFound": "create the canary's service, or remove spec.router.canary",
    "Paused": "set spec.paused to false",
    "FailedCreate": "change what the API server refused; a quota or Pod Security of the namespace, say. A quota may "
    "ask for limits: spec.resources",
    "Unschedulable": "add a node that fits, or change spec.resources and spec.placement",
    "Cordoned": "kubectl uncordon a node that fits, add one, or change spec.resources and spec.placement",
    "ImagePullBackOff": _IMAGE,
    "ErrImagePull": _IMAGE,
    "ErrImageNeverPull": "load the image onto the node, or change the chart's engine.image.pullPolicy",
    "InvalidImageName": "correct spec.engine.image",
    "CreateContainerConfigError": "create the Secret or ConfigMap that the message names, in the service's namespace",
    "OOMKilled": "raise spec.resources.memory, or lower spec.engine.kvCacheMemory",
    "CrashLoopBackOff": f"correct what the engine's last lines name{_AGAIN}",
    "ContainerExited": f"correct what the engine's last lines name{_AGAIN}",
    "ApiError": "correct the field of spec that the API server refuses, if the message names one; else look at the "
    "operator's log and at the API server",
    "ReconcileError": "look at the operator's log",
}
"""Reason -> remedy, as the end of the line `what to do: `."""


UNREACHABLE_SOURCE: Final = (
    "let the pods reach the source: look at the cluster's DNS, at the egress that the namespace's NetworkPolicies "
    "allow, and at the proxy, if there is one; or name a mirror (HF_ENDPOINT or AWS_ENDPOINT_URL, in the chart's "
    "modelFetch.env or the Secret of spec.model.secretRef), or use a pvc:// source. The fetch is tried again by itself"
)
_UNREACHABLE: Final = re.compile(
    r"there is no host |does not answer \(|no answer from |no connection to |name resolution"
)
"""What the fetcher says of sources that give no answer."""


def is_unreachable(message: str) -> bool:
    """Whether a fetch says that its source gives no answer."""
    return _UNREACHABLE.search(message) is not None


def remedy_of_halted(remedy: str) -> str:
    """What to do about a new replica that halts a rollout: its own remedy, or the way back."""
    own = remedy.replace(_AGAIN, "")
    return (
        f"{own}{'; or' if own else ''} apply the previous manifest (`git revert`, say): the rollout is halted, and no "
        "further replica is replaced"
    ).strip()


def remedy_of_image(reason: str, *, value: str, is_engine: bool) -> str:
    """What to do about an image that the manifest does not name, but the value of the chart."""
    if reason not in _IMAGE_REASONS:
        return remedy(reason)
    own = ", or set spec.engine.image" if is_engine else ""
    return (
        f"have the administrator correct {value} of the Helm chart, which names this image (the manifest does not), or "
        f"the registry's Secret in imagePullSecrets{own}"
    )


def remedy_of_hold(spec: Mapping[str, Any], rollout: Mapping[str, Any]) -> str:
    """What to do about a canary that is held, by `spec.rollout.canary` and `status.rollout`."""
    steps, number = spec.get("steps") or (), rollout.get("step") or 1
    action, revision = "set spec.rollout.canary.action to", f"with revision {rollout.get('revision', '?')}"
    if spec.get("hold"):
        return f"{action} Promote or Abort, {revision}; or remove spec.rollout.canary.hold"
    if number <= len(steps) and steps[number - 1].get("hold"):
        return (
            f"{action} Continue (with step: {number}), Promote or Abort, {revision}; or remove "
            f"spec.rollout.canary.steps[{number - 1}].hold"
        )
    return remedy("CanaryHeld")


def remedy(reason: str) -> str:
    """What to do about a reason; empty if nothing but to read its message."""
    return REMEDIES.get(reason, "")
