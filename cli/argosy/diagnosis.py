"""A diagnosis: the links of a chain, in the order in which a service comes up, and what to do about a reason.

Must not know where the facts come from (`cluster_chain`, `commands.cluster`). docs/operations.md explains the
operator's reasons at length. Invariant: links follow from each other, so nothing is said of the links behind the first
one that is not done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from argosy_fetcher.progress import printable

State = Literal["done", "failed", "waiting", "stopped"]
"""`failed`: it stays so until somebody acts. `waiting`: it goes on by itself. `stopped`: the spec wants it so."""
_MARKS: Final[dict[State, str]] = {
    "done": "ok",
    "failed": "FAILED",
    "waiting": "waiting",
    "stopped": "stopped",
}
MAX_LINES: Final = 10
"""Lines of a log that are shown."""
MAX_WIDTH: Final = 2048
"""Characters of a row that are shown. An engine may log its whole input as one line."""
READ_LINES: Final = 100
"""Lines of a log that are read, since one of them may say how far the load is."""
_LOADING: Final = re.compile(r"\bloading (?:the model: (?P<step>.+?)|weights: .*\((?P<share>\d+ %)\).*)\s*$")


class Link(Struct, frozen=True, kw_only=True):
    """One step on the way to a service that is ready."""

    name: str
    state: State
    detail: str = ""
    remedy: str = ""
    lines: tuple[str, ...] = ()
    """The last lines of the log that says why."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The chain of one service, up to its first link that is not done."""

    service: str
    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()
    """What is beside the chain, such as a problem that keeps no request from its answer."""
    serving: int = 0
    """Routable replicas, of whatever revision, although another one's link is not done."""

    @property
    def state(self) -> State:
        """That of the last link."""
        return self.links[-1].state if self.links else "waiting"

    @property
    def is_served(self) -> bool:
        """Whether clients are served."""
        return self.state == "done" or self.serving > 0


def served_meanwhile(serving: int, newest: int) -> str:
    """The note on replicas that serve although the chain does not end well: all that are routable, and those of the
    newest revision."""
    number = "1 replica is routable" if serving == 1 else f"{serving} replicas are routable"
    of = "" if newest == serving else f", {newest or 'none'} of the newest revision"
    return f"clients are served meanwhile: {number}{of}"


def until_first_problem(links: Iterable[Link]) -> tuple[Link, ...]:
    """The links up to the first one that is not done, which is among them."""
    kept: list[Link] = []
    for link in links:
        kept.append(link)
        if link.state != "done":
            break
    return tuple(kept)


def load_step(log: Iterable[str]) -> str:
    """How far an engine's load is, by the last line of its log that says so, such as `weights, 43 %`; empty if none
    does."""
    found = ""
    for line in log:
        if match := _LOADING.search(line):
            found = match["step"] or f"weights, {match['share']}"
    return found


def loading(log: Iterable[str]) -> str:
    """What the engine does, as part of a link's detail."""
    step = load_step(log)
    return f"the engine loads the model ({step})" if step else "the engine loads the model"


def render(diagnosis: Diagnosis) -> str:
    """The chain as text: one line for each link, then the problem's lines and its remedy. Whoever may look at a service
    reads what its tenant's programs have written, so what is not printable is replaced."""
    width = max((len(link.name) for link in diagnosis.links), default=0)
    rows = [
        f"{_MARKS[link.state]:<8}{link.name:<{width}}  {link.detail}".rstrip() for link in diagnosis.links
    ]
    last = diagnosis.links[-1] if diagnosis.links else None
    if last is not None and last.lines:
        rows += ["", *(f"    {line}" for line in last.lines[-MAX_LINES:])]
    if last is not None and last.remedy:
        rows += ["", f"what to do: {last.remedy}"]
    rows += [f"note: {note}" for note in diagnosis.notes]
    return "\n".join(printable(_shortened(row.expandtabs())) for row in (diagnosis.service, *rows))


def render_json(diagnosis: Diagnosis) -> str:
    """The chain as JSON. What is not printable is written as its number, as JSON has it: a terminal obeys some
    characters that JSON allows as they are."""
    text = msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode()
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1] if char != "\x7f" else "\\u007f"


def _shortened(row: str) -> str:
    return row if len(row) <= MAX_WIDTH else f"{row[:MAX_WIDTH]} ... ({len(row) - MAX_WIDTH} more characters)"


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
