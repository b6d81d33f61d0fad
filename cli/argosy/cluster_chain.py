"""The chain of a service in a cluster: from its resource and its pods as Kubernetes shows them, and from what of the
installation answers now, its routers and the operator.

A status is what an operator wrote last: after `helm uninstall` it says that a service is ready, for good. So the
routers' Service and the operator's Lease count as well.

Owns which object decides which link. Must not know how objects are read. Invariant: pure functions of the objects; a
field that a newer operator or Kubernetes leaves out makes a link less exact, never an error, and what cannot be read,
for want of a permission say, is no problem.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from argosy.diagnosis import (
    MAX_LINES,
    UNREACHABLE_SOURCE,
    Diagnosis,
    Link,
    is_unreachable,
    loading,
    remedy,
    remedy_of_halted,
    remedy_of_hold,
    remedy_of_image,
    served_meanwhile,
    until_first_problem,
)
from argosy_resource.engine_arguments import default_image_value
from argosy_resource.engine_command import COMPONENT_LABEL, NODE_COMPONENT, SERVICE_LABEL, claim_name
from argosy_resource.model import MODEL_MOUNT
from argosy_resource.pod_fields import ENGINE_CONTAINER, FETCH_CONTAINER, KEY_VOLUME
from argosy_resource.types import GROUP

Object = Mapping[str, Any]

LEASE: Final = "argosy-operator"
"""Name of the operator's Lease, in the routers' namespace."""
UNREADABLE: Final = f"{GROUP}/unreadable-namespaces"
"""Annotation of the Lease: why the operator cannot read namespaces, by their names, as JSON."""
NOT_WATCHED: Final = "NotWatched"
SILENT_S: Final = 120.0
"""Seconds without a renewal after which nobody holds the Lease. It is renewed every 2 s; the rest is for clocks."""
_REASON: Final = re.compile("[A-Za-z]{1,40}")
"""Whoever may write Leases of this name in another namespace would have a diagnosis say any sentence."""
_SERVICE: Final = re.compile(r"([a-z0-9-]+)\.([a-z0-9-]+)\.svc(\.|$)")


class Installation(Struct, frozen=True, kw_only=True):
    """Routers and operator of a service, as far as they could be read."""

    router: str = ""
    """The routers' Service, as `namespace/name`; empty if the status names none."""
    endpoints: int | None = None
    """Routers that are ready behind it; None if that is not known."""
    absence: str = ""
    """Why no operator runs; empty if one does, or if that is not known."""
    lease_namespace: str = ""
    """Where the operator's Lease is; empty if that is not known."""
    unreadable: str = ""
    """Why the operator cannot read the service's namespace; empty if it can, or if that is not known."""

    @property
    def is_status_old(self) -> bool:
        """Whether no operator keeps the status of the service up to date."""
        return bool(self.absence or self.unreadable)

    @property
    def has_no_router(self) -> bool:
        return self.endpoints == 0


def router_service(service: Object) -> tuple[str, str] | None:
    """Namespace and name of the routers' Service, by the URL of the status; None if it names none of the cluster's."""
    url = service.get("status", {}).get("url") or ""
    try:
        found = _SERVICE.match(urlsplit(url).hostname or "")
    except ValueError:  # such as a bracket that is not closed
        return None
    return (found[2], found[1]) if found else None


def num_ready(slices: Sequence[Object]) -> int:
    """Number of pods that are ready behind a Service, by its EndpointSlices, of which each address family has some."""
    ready = {
        (endpoint.get("targetRef") or {}).get("name") or (endpoint.get("addresses") or [""])[0]
        for each in slices
        for endpoint in each.get("endpoints") or ()
        if (endpoint.get("conditions") or {}).get("ready") is not False
    }
    return len(ready)


def operator_absence(lease: Object | None, namespace: str, now: datetime.datetime) -> str:
    """Why no operator runs, by its Lease, which is None if there is none; empty if one does."""
    name = f"Lease {namespace}/{LEASE}"
    if lease is None:
        return f"there is no {name}"
    spec = lease.get("spec", {})
    if not spec.get("holderIdentity"):
        return f"nobody holds {name}"
    try:
        renewed = datetime.datetime.fromisoformat(spec.get("renewTime") or "")
        silent = (now - renewed).total_seconds()
    except (ValueError, TypeError):
        return ""
    return f"{name} was last renewed at {spec['renewTime']}" if silent > SILENT_S else ""


def unreadable_reason(lease: Object | None, namespace: str) -> str:
    """Why the operator that holds a Lease cannot read a namespace; empty if it can, or does not say so."""
    told = ((lease or {}).get("metadata", {}).get("annotations") or {}).get(UNREADABLE) or "{}"
    try:
        reasons = msgspec.json.decode(told, type=dict[str, str])
    except msgspec.MsgspecError:
        return ""
    reason = reasons.get(namespace) or reasons.get("*") or ""
    return reason if _REASON.fullmatch(reason) else ""


def shortcoming(found: Installation, namespace: str) -> str:
    """What the operator does not do for a namespace that it cannot read, or not watch."""
    verb = "has no watch of" if found.unreadable == NOT_WATCHED else "cannot read"
    return f"{verb} namespace {namespace} ({found.unreadable})"


def remedy_of_unreadable(found: Installation, namespace: str) -> str:
    """What to do about a namespace that the operator cannot read."""
    where = f"`kubectl describe lease -n {found.lease_namespace} {LEASE}` shows the answer that it got"
    if found.unreadable not in ("Forbidden", "NamespaceGone"):
        return where
    return (
        f"restore the RoleBinding argosy-operator-{found.lease_namespace} in namespace {namespace}, which helm upgrade "
        f"does, or take the namespace out of the chart's watchNamespaces; {where}"
    )


def router_link(found: Installation) -> tuple[Link, ...]:
    """Whether a router answers at the service's URL; nothing if that is not known."""
    if found.endpoints is None:
        return ()
    where = f"Service {found.router}"
    if found.has_no_router:
        detail = f"{where} has no endpoint that is ready, whatever the status says"
        return (Link(name="router", state="failed", detail=detail, remedy=remedy("NoRouter")),)
    return (Link(name="router", state="done", detail=f"{where}, {found.endpoints} ready"),)


def operator_note(found: Installation, namespace: str) -> tuple[str, ...]:
    """What it means for the service that no operator runs, or that it may not read the service; nothing otherwise."""
    if found.unreadable:
        late = "and changes, new pods and scaling wait for it"
        if found.unreadable == NOT_WATCHED:
            late = "and changes take until the next resync, minutes"
        return (
            f"the operator {shortcoming(found, namespace)}. The status is its last one, {late}. What helps: "
            f"{remedy_of_unreadable(found, namespace)}",
        )
    if not found.absence:
        return ()
    return (
        f"no operator runs: {found.absence}. The status is its last one; changes, new pods and scaling wait for it. "
        "`kubectl get deployment,lease -A | grep argosy-operator` shows it",
    )


NOT_READ: Final = Installation()
ROUTABLE: Final = f"{GROUP}/routable"
MODEL_CACHED: Final = f"{GROUP}/ModelCached"
REVISION_LABEL: Final = f"{GROUP}/revision"
LEADER_LABEL: Final = f"{GROUP}/leader"
"""On the further nodes of a replica: the UID of the replica's pod."""
COMPONENTS: Final = f"{COMPONENT_LABEL} in (engine,{NODE_COMPONENT})"
"""Label selector of the pods of all services."""
_BEGINNING: Final = ("ContainerCreating", "PodInitializing")
_LOST_NAME: Final = ("NameConflict", "NameRefused", "NameReserved")
"""Reasons for which a service does not have its main name."""
_REFUSED: Final = (
    "InvalidSpec",
    "InvalidEngineArgs",
    "ServiceAccountNotAllowed",
    "ObjectReserved",
    *_LOST_NAME,
    "ChildNotOwned",
    "ChildContested",
    "NodeCacheDisabled",
    "NodeCacheElsewhere",
    "ApiError",
    "ReconcileError",
)
"""Reasons for which the operator applies nothing or not all, or publishes the service under no name of its own."""
_BESIDE: Final = ("ScaledTwice", "DeploymentScaled", "UnknownTimeZone", "RouterUnreachable", "CanaryNotFound")
"""Reasons for which a service is Degraded that keep no replica from starting."""
LINKS: Final = ("manifest", "operator", "accepted", "pods", "node", "volumes", "model", "engine", "loaded")
"""Names of the links, in their order; behind them LAST_LINKS."""
LAST_LINKS: Final = ("routable", "router", "ready")
_CANARY_GOES_ON: Final = ("CanaryStarting", "CanaryAnalyzing")
"""Reasons whose message does not say what the canary waits for, since it would change with each figure."""


def cluster_diagnosis(
    service: Object,
    pods: Sequence[Object],
    *,
    log: Sequence[str] = (),
    events: Sequence[str] = (),
    installation: Installation = NOT_READ,
    unread: str = "",
) -> Diagnosis:
    """The chain of a service.

    Args:
        service: the InferenceService.
        pods: those of its engines, and of the further nodes of their replicas.
        log: the last lines of `log_source`'s container. The links show the last `MAX_LINES` of them.
        events: the newest warnings about `suspect`.
        installation: what runs of it now. Without an operator the pods are looked at whatever its last status says.
        unread: why the pods could not be read; empty if they could. The status alone is told then.
    """
    pod, doing, log = suspect(service, pods), loading(log), log[-MAX_LINES:]
    replicas = [each for each in pods if not _is_node(each)]
    links = [_manifest(service), _operator(service, installation), _accepted(service)]
    if not unread:
        links.append(_pods(service, replicas))
    if pod is not None:
        links += [
            _node(pod),
            _volumes(pod, events),
            _model(pod, log, service),
            _engine(pod, log, service),
            _loaded(pod, log, doing, _missing_nodes(service, pod, pods)),
            _routable(pod, service),
        ]
    last = [*router_link(installation), _ready(service)]
    metadata = service["metadata"]
    is_ready = _condition(service, "Ready").get("status") == "True" and links[1].state == "done"
    found = until_first_problem(
        [*(links[:1] if is_ready and not installation.is_status_old else links), *last]
    )
    if _is_of_one_replica(found[-1]) and found[-1].state == "failed" and _is_halted(service):
        found = (*found[:-1], replace(found[-1], remedy=remedy_of_halted(found[-1].remedy)))
    notes: list[str] = []
    serving, newest = 0, 0
    if _others_may_serve(found[-1], service) and not installation.has_no_router:
        serving, newest = _serving_by_status(service) if unread else _serving(service, replicas)
    if serving:
        notes.append(served_meanwhile(serving, newest))
    is_told = found[-1].name == "operator" and bool(installation.unreadable)
    if unread:
        notes.append(f"its pods could not be read, and the status alone is shown: {unread}")
    return Diagnosis(
        service=f"{metadata.get('namespace', 'default')}/{metadata['name']}",
        links=found,
        notes=(
            *notes,
            *_beside(service, is_done=found[-1].state == "done"),
            *(() if is_told else operator_note(installation, metadata.get("namespace", "default"))),
        ),
        serving=serving,
    )


def _beside(service: Object, *, is_done: bool) -> tuple[str, ...]:
    """The problem of the service, unless it is the one that the chain tells."""
    degraded = _condition(service, "Degraded")
    reason = degraded.get("reason", "")
    if degraded.get("status") != "True" or not (is_done or reason in _BESIDE):
        return ()
    what_to_do = remedy(reason)
    return (f"{reason}: {degraded.get('message')}" + (f". {what_to_do}" if what_to_do else ""),)


def _is_of_one_replica(link: Link) -> bool:
    """Whether the link says nothing of the other replicas."""
    return link.state != "done" and LINKS.index("pods") < (*LINKS, *LAST_LINKS).index(link.name)


def _others_may_serve(link: Link, service: Object) -> bool:
    """Whether clients may be served although this link is not done: by other replicas, or as the service was before a
    change that is not applied. Not if it does not have its name: another service may answer for it."""
    if link.name == "accepted":
        return link.state != "done" and _condition(service, "Ready").get("reason") not in _LOST_NAME
    return _is_of_one_replica(link)


def _is_halted(service: Object) -> bool:
    """Whether a new replica that fails has halted a rollout: the old ones are kept."""
    return any(
        _condition(service, kind).get("reason") == "RolloutHalted" for kind in ("Ready", "Progressing")
    )


def _serving(service: Object, pods: Sequence[Object]) -> tuple[int, int]:
    """Number of routable replicas, and of those that are of the newest revision: old ones serve during a rollout, and
    while a canary is held or has failed. A gate stays open while an engine is started again, or its node is lost: such
    a pod is not ready."""
    if _has_no_router(service):
        return 0, 0
    routable = [
        pod
        for pod in pods
        if not pod["metadata"].get("deletionTimestamp")
        and all(_pod_condition(pod, kind).get("status") == "True" for kind in (ROUTABLE, "Ready"))
    ]
    revision = service.get("status", {}).get("revision", "")
    return len(routable), sum(
        pod["metadata"].get("labels", {}).get(REVISION_LABEL) == revision for pod in routable
    )


def _serving_by_status(service: Object) -> tuple[int, int]:
    """As `_serving`, for who may not read pods. Nothing is claimed of the newest revision."""
    serving: int = service.get("status", {}).get("routableReplicas") or 0
    return (0, 0) if _has_no_router(service) else (serving, serving)


def _has_no_router(service: Object) -> bool:
    return bool(_condition(service, "Routable").get("reason") == "NoRouter")


def suspect(service: Object, pods: Sequence[Object]) -> Object | None:
    """The pod that has come least far, of those of the newest revision if there are any; None without pods. It may be a
    further node of a replica: a replica's own pod waits for its nodes while it loads."""
    alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    revision = service.get("status", {}).get("revision", "")
    newest = [pod for pod in alive if pod["metadata"].get("labels", {}).get(REVISION_LABEL) == revision]
    return min(newest or alive, key=_progress, default=None)


def log_source(pod: Object) -> tuple[str, bool] | None:
    """Container of the pod whose log says why it is not ready, and whether that of its last run; None if none does."""
    fetch, engine = _container(pod, FETCH_CONTAINER), _container(pod, ENGINE_CONTAINER)
    if fetch and not fetch.get("ready") and (_ended(fetch) or "running" in fetch.get("state", {})):
        return FETCH_CONTAINER, "running" not in fetch.get("state", {})
    if "running" in engine.get("state", {}) and not engine.get("ready"):
        return ENGINE_CONTAINER, False
    if _ended(engine):
        return ENGINE_CONTAINER, "terminated" not in engine.get("state", {})
    return None


def selector(name: str) -> str:
    """Label selector of the pods of a service: of its replicas, and of their further nodes."""
    return f"{SERVICE_LABEL}={name},{COMPONENTS}"


def _progress(pod: Object) -> tuple[int, str]:
    links = (_node(pod), _volumes(pod, ()), _model(pod, (), {}), _engine(pod, (), {}), _loaded(pod, ()))
    used = "ContainersReady" if _is_node(pod) else ROUTABLE
    is_used = _pod_condition(pod, used).get("status") == "True"
    return sum(link.state == "done" for link in links) + is_used, pod["metadata"]["name"]


def _is_node(pod: Object) -> bool:
    """Whether the pod is a further node of a replica, which answers no requests."""
    return bool(pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == NODE_COMPONENT)


def _missing_nodes(service: Object, pod: Object, pods: Sequence[Object]) -> str:
    """What is said of the further nodes of a replica that do not exist; empty if all do."""
    wanted = service.get("spec", {}).get("parallelism", {}).get("nodes", 1) - 1
    uid = pod["metadata"].get("uid", "")
    there = sum(each["metadata"].get("labels", {}).get(LEADER_LABEL) == uid for each in pods)
    return f"{there} of its {wanted} workers exist" if there < wanted else ""


def _manifest(service: Object) -> Link:
    spec = service.get("spec", {})
    source = spec.get("model", {}).get("source", "?")
    if since := service["metadata"].get("deletionTimestamp"):
        holders = ", ".join(service["metadata"].get("finalizers") or ())
        return Link(
            name="manifest",
            state="failed",
            detail=f"it is being deleted since {since}, and served no more"
            + (f"; finalizers hold it: {holders}" if holders else ""),
            remedy="wait until it is gone, and apply the manifest again"
            + ("; whoever has set a finalizer removes it" if holders else ""),
        )
    return Link(name="manifest", state="done", detail=f"{source}, {_wanted(service)} replicas wanted")


def _wanted(service: Object) -> int:
    """Number of replicas: spec.replicas, or what spec.scaling has decided."""
    spec = service.get("spec", {})
    given: int = spec.get("replicas", 1)
    if spec.get("scaling") is None:
        return given
    least: int = max(given, spec["scaling"].get("minReplicas", 1))
    decided: int = (service.get("status", {}).get("scaling") or {}).get("wanted", least)
    return decided


def _operator(service: Object, installation: Installation) -> Link:
    generation = service["metadata"].get("generation", 0)
    seen = service.get("status", {}).get("observedGeneration", -1)
    if seen >= generation:
        return Link(name="operator", state="done", detail=f"has seen generation {generation}")
    namespace = service["metadata"].get("namespace", "default")
    what = "has never seen this service" if seen < 0 else f"has seen generation {seen}, not {generation}"
    if installation.unreadable:
        return Link(
            name="operator",
            state="failed",
            detail=f"it {shortcoming(installation, namespace)}, and {what}",
            remedy=remedy_of_unreadable(installation, namespace),
        )
    return Link(
        name="operator",
        state="failed",
        detail=f"no operator runs, or none serves this namespace: it {what}",
        remedy="look at the Deployment argosy-operator: `kubectl get deployment,lease -A | grep argosy-operator`; "
        "the chart's watchNamespaces says which namespaces are served",
    )


def _accepted(service: Object) -> Link:
    ready = _condition(service, "Ready")
    if service.get("spec", {}).get("paused") and ready.get("reason") == "Paused":
        return _failed("accepted", ready)
    for kind in ("Stalled", "Degraded", "Ready"):
        condition = _condition(service, kind)
        if condition.get("reason") in _REFUSED and condition.get("status") != _good(kind):
            return _failed("accepted", condition)
    return Link(name="accepted", state="done")


def _pods(service: Object, pods: Sequence[Object]) -> Link:
    if _wanted(service) == 0:
        if service.get("spec", {}).get("scaling") is not None:
            return Link(name="pods", state="done", detail="none is wanted while no request comes")
        return Link(
            name="pods",
            state="stopped",
            detail="spec.replicas is 0: requests get 503 until it is raised, which no request does without "
            "spec.scaling or an autoscaler",
            remedy=f"kubectl scale isvc {service['metadata']['name']} --replicas=1, or leave it stopped",
        )
    if pods:
        return Link(name="pods", state="done", detail=f"{len(pods)} exist")
    cause = _condition(service, "WorkloadReady")
    state = "waiting" if cause.get("reason") in (None, "Starting", "Reconciling") else "failed"
    return Link(
        name="pods",
        state="failed" if state == "failed" else "waiting",
        detail=cause.get("message") or "none exist yet",
        remedy=remedy(cause.get("reason", "")),
    )


def _node(pod: Object) -> Link:
    scheduled = _pod_condition(pod, "PodScheduled")
    if scheduled.get("status") == "True" or pod.get("spec", {}).get("nodeName"):
        return Link(name="node", state="done", detail=f"{_name(pod)} on {pod['spec'].get('nodeName', '?')}")
    message = scheduled.get("message") or "the scheduler has not looked at it yet"
    missing = "persistentvolumeclaim" in message and "not found" in message
    is_cordoned = "node(s) were unschedulable" in message
    return Link(
        name="node",
        state="failed" if scheduled.get("reason") == "Unschedulable" else "waiting",
        detail=f"{_name(pod)}: {message}",
        remedy=remedy("ClaimNotFound" if missing else "Cordoned" if is_cordoned else "Unschedulable"),
    )


def _volumes(pod: Object, events: Sequence[str]) -> Link:
    if _pod_condition(pod, "PodReadyToStartContainers").get("status") != "False":
        return Link(name="volumes", state="done")
    return Link(
        name="volumes",
        state="failed" if events else "waiting",
        detail=f"{_name(pod)}: its volumes are not mounted yet, or its network is not set up",
        lines=tuple(events),
        remedy=_remedy_of_volumes(pod, events),
    )


def _remedy_of_volumes(pod: Object, events: Sequence[str]) -> str:
    if not events:
        return ""
    for volume in pod.get("spec", {}).get("volumes", ()):
        key = volume.get("secret", {}).get("secretName", "") if volume["name"] == KEY_VOLUME else ""
        if key and any(f'secret "{key}" not found' in each for each in events):
            return f"the operator makes the Secret {key} anew by itself; if it does not, look whether it runs"
    return "correct what the event names"


def _model(pod: Object, log: Sequence[str], service: Object) -> Link:
    fetch = _container(pod, FETCH_CONTAINER)
    wanted = any(each["name"] == FETCH_CONTAINER for each in pod.get("spec", {}).get("initContainers", ()))
    if not wanted or fetch.get("ready"):
        return Link(name="model", state="done", detail="" if not wanted else "fetched")
    condition = _pod_condition(pod, MODEL_CACHED)
    told = condition.get("message") or ""
    if waiting := _waiting(fetch):
        ended = _ended(fetch) if _is_backing_off(waiting) else None
        detail = f"{_name(pod)}, container {FETCH_CONTAINER}: {_exit(ended) if ended else _why(waiting)}"
        what_to_do = (
            _remedy_of_failed_fetch(service, detail)
            if ended
            else remedy_of_image(waiting.get("reason", ""), value="engine.image", is_engine=False)
        )
        return Link(name="model", state="failed", detail=detail, lines=tuple(log), remedy=what_to_do)
    if ended := fetch.get("state", {}).get("terminated"):
        detail = f"{_name(pod)}, container {FETCH_CONTAINER}: {_exit(ended)}"
        what_to_do = _remedy_of_failed_fetch(service, detail)
        return Link(name="model", state="failed", detail=detail, lines=tuple(log), remedy=what_to_do)
    if condition.get("reason") == "StoreLocked":
        return Link(
            name="model", state="failed", detail=f"{_name(pod)}: {told}", remedy=remedy("StoreLocked")
        )
    detail = f"{_name(pod)} fetches the model" + (f": {told}" if told else "")
    return Link(name="model", state="waiting", detail=detail, remedy=_remedy_of_fetch(pod, told))


def _remedy_of_failed_fetch(service: Object, detail: str) -> str:
    name = service.get("spec", {}).get("model", {}).get("secretRef", {}).get("name", "")
    namespace = service.get("metadata", {}).get("namespace", "default")
    if name and "spec.model.secretRef" in detail:
        return (
            f"create the Secret {namespace}/{name}, or give it its keys; the fetch is tried again by itself"
        )
    return UNREACHABLE_SOURCE if is_unreachable(detail) else remedy("ModelFetchFailed")


def _remedy_of_fetch(pod: Object, told: str) -> str:
    """What to do about a fetch that goes on, or has not begun. `told`: what it said last."""
    if is_unreachable(told):
        return UNREACHABLE_SOURCE
    where = f"-n {pod['metadata'].get('namespace', 'default')} {pod['metadata']['name']}"
    return (
        f"wait while it goes on; if it stands still, `kubectl logs {where} -c {FETCH_CONTAINER}` says at what"
    )


def _engine(pod: Object, log: Sequence[str], service: Object) -> Link:
    status = pod.get("status", {})
    if status.get("phase") in ("Failed", "Succeeded"):
        reason = status.get("reason") or "PodFailed"
        detail = f"{_name(pod)}: {reason}: {status.get('message') or 'the pod has ended'}"
        return Link(name="engine", state="failed", detail=detail, remedy=remedy(reason))
    container = _container(pod, ENGINE_CONTAINER)
    state, where = container.get("state", {}), f"{_name(pod)}, container {ENGINE_CONTAINER}"
    if "running" in state:
        restarts = container.get("restartCount", 0)
        note = f", restarted {restarts} times; last: {_exit(_ended(container))}" if restarts else ""
        return Link(name="engine", state="done", detail=f"runs{note}")
    ended, waiting = _ended(container), _waiting(container)
    if waiting and not (ended and _is_backing_off(waiting)):
        last = f"; last run: {_exit(ended)}" if ended else ""
        return Link(
            name="engine",
            state="failed",
            detail=f"{where}: {_why(waiting)}{last}",
            remedy=_remedy_of_engine(service, waiting.get("reason", "")),
        )
    if ended:
        reason = "OOMKilled" if ended.get("reason") == "OOMKilled" else "ContainerExited"
        times = f", {container['restartCount']} restarts" if container.get("restartCount") else ""
        return Link(
            name="engine",
            state="failed",
            detail=f"{where}: {_exit(ended)}{times}",
            lines=tuple(log),
            remedy=remedy(reason) + _mounted_claim(service, _exit(ended)),
        )
    return Link(
        name="engine", state="waiting", detail=f"{where}: its image is pulled, or it is being created"
    )


def _mounted_claim(service: Object, message: str) -> str:
    """Which claim a path of the engine's message is in; empty if the model is in none."""
    claim = claim_name(service.get("spec", {}).get("model", {}).get("source", ""))
    if claim is None or MODEL_MOUNT not in message:
        return ""
    return f". {MODEL_MOUNT} is the root of the PersistentVolumeClaim {claim} of spec.model.source"


def _remedy_of_engine(service: Object, reason: str) -> str:
    """What to do about an engine's container that does not start."""
    engine = service.get("spec", {}).get("engine", {})
    if engine.get("image"):
        return remedy(reason)
    return remedy_of_image(reason, value=default_image_value(engine.get("type", "argosy")), is_engine=True)


def _loaded(pod: Object, log: Sequence[str], doing: str = "", missing_nodes: str = "") -> Link:
    if _pod_condition(pod, "ContainersReady").get("status") == "True":
        return Link(name="loaded", state="done", detail="the engine is ready")
    if missing_nodes:
        owned = f"{LEADER_LABEL}={pod['metadata'].get('uid', '')}"
        return Link(
            name="loaded",
            state="waiting",
            detail=f"{_name(pod)} waits for its other nodes: {missing_nodes}",
            lines=tuple(log),
            remedy=f"`kubectl describe statefulset -l {owned}` says why, unless it is a matter of seconds",
        )
    since = _container(pod, ENGINE_CONTAINER).get("state", {}).get("running", {}).get("startedAt", "")
    detail = f"{_name(pod)}: {doing}" + (f" since {since}" if since else "")
    return Link(name="loaded", state="waiting", detail=detail, lines=tuple(log))


def _routable(pod: Object, service: Object) -> Link:
    if _pod_condition(pod, ROUTABLE).get("status") == "True":
        return Link(name="routable", state="done", detail="a router is synced with it")
    condition = _condition(service, "Routable")
    reason = condition.get("reason", "")
    return Link(
        name="routable",
        state="failed" if reason in ("NoRouter", "NodeLost") else "waiting",
        detail=f"{_name(pod)}: {condition.get('message') or 'no router is synced with it'}",
        remedy=remedy(reason),
    )


def _ready(service: Object) -> Link:
    """The operator's summary. Nothing is asked for a token."""
    ready, status = _condition(service, "Ready"), service.get("status", {})
    if ready.get("status") == "True":
        routable = f"{status.get('routable') or status.get('routableReplicas', 0)} replicas routable"
        where = f", {status['url']}" if status.get("url") else ""
        name = f" as {status['model']!r}" if status.get("model") else ""
        if ready.get("reason") in ("Stopped", "ScaledToZero"):  # an older operator has the second for both
            if service.get("spec", {}).get("scaling") is None:
                return _pods(service, ())
            return Link(name="ready", state="done", detail=f"idle: {ready.get('message', '')}{where}{name}")
        return Link(name="ready", state="done", detail=f"{routable}{where}{name}")
    stalled = _condition(service, "Stalled").get("status") == "True"
    reason = ready.get("reason", "")
    what_to_do = remedy(reason)
    if reason == "CanaryHeld":
        canary = service.get("spec", {}).get("rollout", {}).get("canary") or {}
        what_to_do = remedy_of_hold(canary, status.get("rollout") or {})
    detail = f"{reason}: {ready.get('message', '')}".strip(": ") or "the service is not ready"
    if reason in _CANARY_GOES_ON and (waits_for := (status.get("rollout") or {}).get("message")):
        detail += f"; {waits_for}"
    return Link(
        name="ready",
        state="failed" if stalled else "waiting",
        detail=detail,
        remedy=what_to_do,
    )


def _failed(name: str, condition: Object) -> Link:
    reason = condition.get("reason", "")
    detail = f"{reason}: {condition.get('message', '')}".strip(": ")
    return Link(name=name, state="failed", detail=detail, remedy=remedy(reason))


def _good(kind: str) -> str:
    """Status of a condition of this type when all is well."""
    return "True" if kind == "Ready" else "False"


def _condition(obj: Object, kind: str) -> Object:
    found = obj.get("status", {}).get("conditions") or ()
    return next((each for each in found if each.get("type") == kind), {})


_pod_condition = _condition


def _container(pod: Object, name: str) -> Object:
    status = pod.get("status", {})
    found = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return next((each for each in found if each.get("name") == name), {})


def _ended(container: Object) -> Object | None:
    """How the container's run that failed ended: the current one, or the last one."""
    now = container.get("state", {}).get("terminated")
    ended: Object | None = now or container.get("lastState", {}).get("terminated")
    return ended


def _waiting(container: Object) -> Object | None:
    """What the container waits for, unless it merely starts."""
    waiting: Object | None = container.get("state", {}).get("waiting")
    return waiting if waiting and waiting.get("reason") not in _BEGINNING else None


def _is_backing_off(waiting: Object) -> bool:
    """Whether it waits because its last run has ended, which says more than the waiting. A container that has run may
    wait for its image, or for a Secret, as well."""
    return bool(waiting.get("reason") == "CrashLoopBackOff")


def _why(waiting: Object) -> str:
    return f"{waiting.get('reason', 'Waiting')}: {waiting.get('message', '')}".rstrip(": ")


def _exit(ended: Object | None) -> str:
    """How a run ended: reason, exit code, and the last line that it left."""
    if ended is None:
        return "ended"
    lines = [line.strip() for line in (ended.get("message") or "").splitlines() if line.strip()]
    text = f"{ended.get('reason') or 'Error'}, exit code {ended.get('exitCode', '?')}"
    return f"{text}: {lines[-1][:512]}" if lines else text


def _name(pod: Object) -> str:
    return f"pod {pod['metadata']['name']}"
