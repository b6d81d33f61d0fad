"""The changes that one reconcile makes: a pure function of the resource and of one observation.

Owns the comparison of the desired objects with the observed ones: pod conditions to set, children to apply, objects to
delete. Must not talk to an API server, look at a clock or remember anything. Invariants: the plan takes into account
the gates that the same diff changes; a paused service keeps its children as they are, but for the nodes of replicas; a
Deployment that cannot be had stays as it is; if nothing differs, the diff is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.cached_condition import CachedChange, cached_change
from argosy_operator.desired.children import Plan, plan_children
from argosy_operator.desired.drift import must_apply, with_applied_hash
from argosy_operator.desired.engine_nodes import broken_leaders, is_node_set, kept_sets
from argosy_operator.desired.readiness_gate import GateStatus, gate_status
from argosy_operator.desired.staged_rollout import has_ended_while_paused
from argosy_operator.kinds import DEPLOYMENTS, STATEFUL_SETS, Kind, Object, kind_of, object_name
from argosy_operator.names import KEY_ANNOTATION, TRACK_LABEL
from argosy_operator.observed.deployment import has_the_turn
from argosy_operator.observed.observation import Observation, controller_uid, is_owned
from argosy_operator.observed.pod import Pod
from argosy_resource.types import InferenceService


class GateChange(Struct, frozen=True):
    """A pod's readiness gate is to change."""

    pod: Pod
    status: GateStatus


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
    wanted = plan.deployment["spec"]["template"]["metadata"].get("annotations", {}).get(KEY_ANNOTATION)
    live = observed.deployment["spec"]["template"]["metadata"].get("annotations", {}).get(KEY_ANNOTATION)
    return wanted != live or any(
        pod.problem is not None and pod.problem.reason == "CreateContainerConfigError"
        for pod in observed.pods
    )
