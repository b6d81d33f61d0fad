"""The changes that one reconcile makes: a pure function of the resource and of one observation.

Owns the comparison of the desired objects with the observed ones: children to apply, objects to delete, and the two pod
conditions of which the operator is the sole writer, the `routable` readiness gate and `ModelCached`. Owns how a live
object is compared with a manifest, and what others have added to it, which applying does not remove. Must not talk to
an API server, look at a clock or remember anything. Invariants:

    the diff        if nothing differs, it is empty; the plan takes into account the gates that the same diff changes;
                    a paused service keeps its children as they are, but for the nodes of replicas; a Deployment that
                    cannot be had stays as it is
    a gate          opens when a router sends the pod requests, or when it is known that no router is alive, so that a
                    fleet without routers does not lock up; it closes only on drain or deletion, so that a router which
                    loses a replica for a moment does not disturb rollouts and disruption budgets; one that has closed
                    opens again REOPEN_SECONDS later at the earliest, because an engine may say that it drains as often
                    as it likes, and each change is a write
    ModelCached     changes only if its text does; a report never overrides what the init container's end says: it is
                    False while that runs (Fetching, with its progress, or StoreLocked, if it waits for a process that
                    makes none), True (Cached) once it has succeeded, and False (FetchFailed) from a failure until the
                    next attempt fetches
    an object       that was applied as wanted, and has not been changed since, is never written again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec
import xxhash
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import Plan, broken_leaders, is_node_set, kept_sets, plan_children
from argosy_operator.desired.upgrades import has_ended_while_paused
from argosy_operator.names import (
    APPLIED_ANNOTATION,
    DEPLOYMENTS,
    KEY_ANNOTATION,
    MODEL_CACHED_CONDITION,
    ROUTABLE_GATE,
    STATEFUL_SETS,
    TRACK_LABEL,
    Kind,
    Object,
    annotations_of,
    kind_of,
    object_name,
)
from argosy_operator.observation import Observation, Routers, controller_uid, has_the_turn, is_owned
from argosy_operator.pod import Pod, seconds_between
from argosy_protocol.reports import ModelProgress, summary
from argosy_resource.types import InferenceService

GateStatus = Literal["True", "False"]

Path = tuple[str | int, ...]
"""Names of fields and indices of entries, from an object to a part of it."""
REOPEN_SECONDS: Final = 15
"""An engine that drains ends, and starts anew in the same pod only if it was killed for want of an answer, say."""


class GateChange(Struct, frozen=True):
    """A pod's readiness gate is to change."""

    pod: Pod
    status: GateStatus


class CachedChange(Struct, frozen=True, kw_only=True):
    """A pod's condition `ModelCached` is to change."""

    pod: Pod
    status: Literal["True", "False"]
    reason: Literal["Cached", "Fetching", "StoreLocked", "FetchFailed"]
    message: str


class ChildChange(Struct, frozen=True):
    """A child is to be applied, or an object of another owner that has its name is to be reported."""

    wanted: Object
    """The manifest to send, with its hash."""
    live: Mapping[str, Any] | None
    """The observed object; None if there was none. An object without our labels is never observed, so the writer asks
    the API server before it creates one."""

    @property
    def removed_replicas(self) -> int:
        """By how many replicas this makes a Deployment smaller; not if none is left, since all go then."""
        if self.live is None or kind_of(self.wanted) is not DEPLOYMENTS or self._is_canary:
            return 0
        left: int = self.wanted["spec"]["replicas"]
        present: int = self.live["spec"].get("replicas", 1)
        return max(0, present - left) if left else 0

    @property
    def _is_canary(self) -> bool:
        return TRACK_LABEL in self.wanted["spec"]["template"]["metadata"]["labels"]


class Diff(Struct, frozen=True, kw_only=True):
    """Everything that one reconcile changes, in the order in which it is done."""

    plan: Plan
    gates: tuple[GateChange, ...] = ()
    secret: Object | None = None
    """The Secret to ensure; None while the service is paused."""
    is_key_suspect: bool = False
    """Whether the Secret may be missing, or hold an old key."""
    takes_turn: bool = False
    """Whether the operator's own change starts to be rolled out to this service."""
    ends_turn: bool = False
    """Whether the Deployment must not say any more that it has the turn, whoever has written that."""
    children: tuple[ChildChange, ...] = ()
    surplus: tuple[tuple[Kind, Mapping[str, Any]], ...] = ()
    """Children that the plan does not name any more."""
    broken: tuple[Pod, ...] = ()
    """Replicas to delete, because one of their nodes can be replaced in no other way."""
    cached: tuple[CachedChange, ...] = ()

    @property
    def creates(self) -> bool:
        """Whether a child is to be created, as far as the observation shows."""
        return any(child.live is None for child in self.children)


def compute_diff(service: InferenceService, observed: Observation, config: OperatorConfig) -> Diff:
    """Compare what should exist with one observation of a service."""
    gates = tuple(
        GateChange(pod, status)
        for pod in observed.pods
        if (status := gate_status(pod, observed.routers, observed.time)) is not None
    )
    cached = tuple(
        change
        for pod in observed.pods
        if (change := cached_change(pod, observed.fetches.get(pod.uid))) is not None
    )
    observed = _with_gates(observed, gates)
    plan = plan_children(service, observed, config)
    broken = broken_leaders(observed.pods, observed.time)
    if service.spec.paused:
        # A replica that Kubernetes replaces meanwhile gets its nodes all the same.
        nodes = _changes(plan.node_sets, observed)
        # Nor does its key outlive a rotation: routers send the fleet's keys.
        secret = None if observed.deployment is None else with_applied_hash(plan.secret)
        return Diff(
            plan=plan,
            gates=gates,
            secret=secret,
            cached=cached,
            children=nodes,
            broken=broken,
            surplus=tuple(each for each in _surplus(service, plan, observed) if each[0] is STATEFUL_SETS),
            ends_turn=has_the_turn(observed.deployment) and has_ended_while_paused(service, observed),
        )
    return Diff(
        plan=plan,
        gates=gates,
        secret=with_applied_hash(plan.secret),
        is_key_suspect=_is_key_suspect(plan, observed),
        takes_turn=plan.rollout.turn is not None
        and plan.problem is None
        and not has_the_turn(observed.deployment),
        ends_turn=has_the_turn(observed.deployment) and plan.rollout.turn is None and plan.problem is None,
        children=_children(plan, observed),
        broken=broken,
        surplus=_surplus(service, plan, observed),
        cached=cached,
    )


def _with_gates(observed: Observation, gates: tuple[GateChange, ...]) -> Observation:
    """The observation as it will be once the gates have changed. A pod whose gate opens is not ready at once: the
    kubelet says so."""
    changed = {gate.pod.uid: gate.status for gate in gates}
    pods = tuple(
        msgspec.structs.replace(pod, gate=changed[pod.uid], is_lost=False) if pod.uid in changed else pod
        for pod in observed.pods
    )
    return msgspec.structs.replace(observed, pods=pods)


def _children(plan: Plan, observed: Observation) -> tuple[ChildChange, ...]:
    deployments = () if plan.problem is not None else plan.deployments
    return _changes((plan.service, plan.budget, *deployments, *plan.node_sets), observed)


def _changes(manifests: Iterable[Object], observed: Observation) -> tuple[ChildChange, ...]:
    found = []
    for manifest in manifests:
        wanted = with_applied_hash(manifest)
        live = observed.children.get((kind_of(wanted), object_name(wanted)))
        is_ours = live is not None and controller_uid(live) == controller_uid(wanted)
        if not is_ours or must_apply(wanted, live):
            found.append(ChildChange(wanted, live))
    return tuple(found)


def _surplus(
    service: InferenceService, plan: Plan, observed: Observation
) -> tuple[tuple[Kind, Mapping[str, Any]], ...]:
    wanted = {(kind_of(manifest), object_name(manifest)) for manifest in plan.objects}
    kept = kept_sets(service, observed.pods, observed.time)
    found = (
        (key[0], obj)
        for key, obj in observed.children.items()
        if key not in wanted
        and not obj["metadata"].get("deletionTimestamp")  # whatever its finalizers wait for
        and not (key[0] is DEPLOYMENTS and plan.problem is not None)
        and (
            is_node_set(obj) and key[1][1] not in kept if key[0] is STATEFUL_SETS else is_owned(obj, service)
        )
    )
    return tuple(sorted(found, key=lambda each: each[0] is not DEPLOYMENTS))  # whose pods take most


def _is_key_suspect(plan: Plan, observed: Observation) -> bool:
    """Whether the Secret may be missing or old, without reading it: the Deployment, which is applied after the Secret,
    may carry its digest, and a pod reports when the Secret is gone. When the fleet key changes, all are checked."""
    if observed.deployment is None:
        return True
    wanted = annotations_of(plan.deployment["spec"]["template"]).get(KEY_ANNOTATION)
    live = annotations_of(observed.deployment["spec"]["template"]).get(KEY_ANNOTATION)
    return wanted != live or any(
        pod.problem is not None and pod.problem.reason == "CreateContainerConfigError"
        for pod in observed.pods
    )


def gate_status(pod: Pod, routers: Routers, time: str = "") -> GateStatus | None:
    """The status that the gate should change to at `time` (RFC 3339); None to leave it as it is."""
    is_open = pod.gate == "True"
    if pod.is_terminating:
        return "False" if is_open else None
    if pod.is_finished or not routers.known:
        return None
    if is_open:
        return "False" if pod.uid in routers.draining else None
    if seconds_until_reopened(pod, time) > 0:
        return None
    if pod.uid in routers.routable:
        return "True"
    if routers.alive == 0 and pod.containers_ready:
        return "True"
    return None


def seconds_until_reopened(pod: Pod, time: str) -> float:
    """Seconds until a gate that has closed may open again; 0 or less if it may. A time that is still to come is of
    another operator's clock, and counts as long past."""
    if pod.gate != "False" or not pod.gate_since or not time:
        return 0.0
    closed_for = seconds_between(pod.gate_since, time)
    return REOPEN_SECONDS - closed_for if closed_for >= 0 else 0.0


def gate_patch(pod: Pod, status: GateStatus, *, now: str, router_lives: bool) -> dict[str, Any]:
    """Strategic merge patch of the pod's status. Its UID keeps the patch from another pod of the same name
    (StatefulSet, fast recreation)."""
    if status == "False":
        reason, message = "Draining", "the replica takes no new requests"
    elif router_lives:
        reason, message = "RouterSynced", "a router sends requests to the replica"
    else:
        reason, message = "NoRouter", "no router answers; only the Service leads to the replica"
    condition = {
        "type": ROUTABLE_GATE,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now,
    }
    return {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}


def cached_change(pod: Pod, progress: ModelProgress | None) -> CachedChange | None:
    """The condition as it should become; None to leave it as it is. `progress` is the pod's last report, if any."""
    fetch = pod.fetch
    if fetch is None or not pod.is_alive:
        return None
    if fetch.state == "succeeded":
        message = fetch.exit_message or "the model is stored"
        change = CachedChange(pod=pod, status="True", reason="Cached", message=message)
    elif fetch.state == "failed":
        change = CachedChange(pod=pod, status="False", reason="FetchFailed", message=fetch.exit_message)
    elif fetch.state == "running" and progress is not None:
        if fetch.has_failed and progress.phase in ("resolving", "waiting"):
            return None
        is_blocked = progress.phase == "blocked" and bool(progress.note)
        change = CachedChange(
            pod=pod,
            status="False",
            reason="StoreLocked" if is_blocked else "Fetching",
            message=summary(progress),
        )
    else:
        return None
    present = (fetch.condition_status, fetch.condition_reason, fetch.condition_message)
    return None if present == (change.status, change.reason, change.message) else change


def cached_patch(change: CachedChange, *, now: str) -> dict[str, Any]:
    """Strategic merge patch of the pod's status. Its UID keeps the patch from another pod of the same name."""
    condition = {
        "type": MODEL_CACHED_CONDITION,
        "status": change.status,
        "reason": change.reason,
        "message": change.message,
        "lastProbeTime": now,
    }
    assert change.pod.fetch is not None
    if change.pod.fetch.condition_status != change.status:
        condition["lastTransitionTime"] = now
    return {"metadata": {"uid": change.pod.uid}, "status": {"conditions": [condition]}}


_QUANTITY_FIELDS: Final = ("limits", "requests", "sizeLimit")
_ATOMIC_FIELDS: Final = ("selector", "nodeSelector")
"""Maps that have one owner as a whole (`x-kubernetes-map-type: atomic`), where a further key changes what is meant: a
Service that also asks for another label has no endpoints."""
_KEYED_LISTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets"), ("name",)),
    **dict.fromkeys(("resourceClaims", "schedulingGates", "claims"), ("name",)),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "port", "protocol"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "hostAliases": ("ip",),
}
"""Lists whose entries may have different owners, and the fields by which server-side apply tells the entries apart
(`x-kubernetes-list-map-keys`). Applying leaves entries of others in them."""
_KEY_DEFAULTS: Final = {"protocol": "TCP"}
_FREE_MAPS: Final = ("labels", "annotations", "matchLabels")
"""Maps whose keys users choose: one that is called as a field is none."""
_AMOUNTS: Final = ("limits", "requests")
"""Maps whose keys are never filled in, whatever they are."""
_NEVER_DEFAULTED: Final = frozenset(
    {
        *_KEYED_LISTS,
        *_AMOUNTS,
        *("affinity", "nodeName", "nodeSelector", "tolerations", "priorityClassName", "runtimeClassName"),
        *("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"),
        *("serviceAccountName", "serviceAccount", "hostname", "subdomain", "setHostnameAsFQDN", "dnsConfig"),
        *("command", "args", "envFrom", "workingDir", "lifecycle", "stdin", "stdinOnce", "tty"),
        *("livenessProbe", "readinessProbe", "startupProbe", "hostPort", "hostIP"),
        *("add", "privileged", "runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "sysctls"),
        *("seLinuxOptions", "windowsOptions"),
    }
)
"""Fields of pod templates, their containers and security contexts which the API server leaves empty: a value that is
not wanted is somebody's addition."""
_SECOND_NAMES: Final = {"serviceAccount": "serviceAccountName"}
"""Old names of fields. The API server fills each in from the other, so that removing one alone has no effect; nor has
it when a manifest that is applied does not have the field any more."""
_ONE_OF: Final = ("env", "volumes")
"""Lists whose entries have exactly one of several fields besides their name."""
_SUFFIXES: Final = {
    "n": Decimal("0.000000001"),
    "u": Decimal("0.000001"),
    "m": Decimal("0.001"),
    **{suffix: Decimal(10 ** (3 * power)) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(2 ** (10 * power)) for power, suffix in enumerate("KMGTPE", 1)},
}
"""The API server's own forms, which are more than the resource takes: 2048Ti is stored as 2Pi, and 0.0005 as 500u."""


def with_applied_hash(manifest: Object) -> Object:
    """The manifest to send: with a hash of itself as annotation, by which removed fields are noticed."""
    digest = xxhash.xxh3_64_hexdigest(msgspec.json.encode(manifest, order="deterministic"))
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def must_apply(wanted: Object, live: Mapping[str, Any] | None) -> bool:
    """Whether `wanted` (with its hash) has to be applied: it never was, has other contents, or was changed since."""
    return live is None or not contains(live, wanted)


def contains(live: Any, wanted: Any, *, field: str = "") -> bool:
    """Whether every value of `wanted` is in `live`. Further fields of `live` (server defaults, status, other managers')
    are ignored, but not within a selector, and not if they are additions of others to a pod template; quantities are
    compared by value, since the API server rewrites them."""
    if field in _ATOMIC_FIELDS:
        return bool(live == wanted)
    if isinstance(wanted, Mapping):
        return (
            isinstance(live, Mapping)
            and not _added_fields(live, wanted, field)
            and all(
                contains(live.get(name), value, field=field if field in _QUANTITY_FIELDS else name)
                for name, value in wanted.items()
            )
        )
    if isinstance(wanted, list):
        return (
            isinstance(live, list)
            and len(live) == len(wanted)
            and all(contains(*pair, field=field) for pair in zip(live, wanted, strict=True))
        ) or (not wanted and live is None)
    if live is None:
        return wanted in ("", None, False)  # the API server omits what is empty
    if field in _QUANTITY_FIELDS:
        return _quantity(live) == _quantity(wanted)
    return live == wanted


def additions(live: Any, wanted: Any, *, field: str = "") -> list[Path]:
    """What `live` has in its pod template beyond `wanted`: fields that the API server never fills in, and entries of
    lists. In an order in which they can be removed one by one: later entries of a list before earlier ones."""
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        if field in _ATOMIC_FIELDS:
            return []  # applying replaces it
        found: list[Path] = [(name,) for name in _added_fields(live, wanted, field)]
        for name, value in wanted.items():
            found += [(name, *rest) for rest in additions(live.get(name), value, field=name)]
        return found
    if isinstance(wanted, list) and isinstance(live, list) and field in _KEYED_LISTS:
        entries = {_entry_key(entry, field): entry for entry in wanted}
        found = []
        for index, entry in reversed(list(enumerate(live))):
            key = _entry_key(entry, field)
            if key in entries:
                found += [(index, *rest) for rest in additions(entry, entries[key])]
            else:
                found.append((index,))
        return found
    return []


def clashes(live: Any, wanted: Any, *, field: str = "") -> bool:
    """Whether others have given an entry of a list a value of another kind, so that a variable which came from a Secret
    has a value, say. Applying is refused then: it would leave both."""
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return any(clashes(live.get(name), value, field=name) for name, value in wanted.items())
    if not (isinstance(wanted, list) and isinstance(live, list) and field in _KEYED_LISTS):
        return False
    entries = {_entry_key(entry, field): entry for entry in wanted}
    pairs = [(each, entries[key]) for each in live if (key := _entry_key(each, field)) in entries]
    if field in _ONE_OF:
        return any(entry[name] and name not in own for entry, own in pairs for name in entry)
    return any(clashes(*pair) for pair in pairs)


def _added_fields(live: Mapping[str, Any], wanted: Mapping[str, Any], field: str) -> list[str]:
    if field in _FREE_MAPS:
        return []
    return [
        name
        for name in live
        if (name in _NEVER_DEFAULTED or field in _AMOUNTS)
        and name not in wanted
        and _SECOND_NAMES.get(name) not in wanted
        and live[name] is not False
        and live[name] not in ("", None, [], {})  # but 0 is a value: a user id, say
    ]


def _entry_key(entry: Any, field: str) -> tuple[Any, ...]:
    given = entry if isinstance(entry, Mapping) else {}
    return tuple(given.get(name, _KEY_DEFAULTS.get(name)) for name in _KEYED_LISTS[field])


def _quantity(text: object) -> Decimal | str:
    digits = str(text).rstrip("numkKMGTPEi")
    suffix = str(text)[len(digits) :]
    if not digits.replace(".", "", 1).isdecimal() or (suffix and suffix not in _SUFFIXES):
        return str(text)
    return Decimal(digits) * _SUFFIXES.get(suffix, Decimal(1))
