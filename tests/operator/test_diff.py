"""The actions that one reconcile derives from one observation."""

from __future__ import annotations

from typing import Any

from builders import CONFIG, isvc, pod

from argosy_operator.desired.children import plan_children
from argosy_operator.desired.diff import compute_diff, with_applied_hash
from argosy_operator.names import SERVICES, Kind, Name, kind_of, object_name
from argosy_operator.observation import Observation, Routers
from argosy_operator.pod import Problem
from argosy_resource.types import InferenceService

Children = dict[tuple[Kind, Name], Any]


def children_of(service: InferenceService) -> Children:
    """The children as the operator applied them."""
    plan = plan_children(service, Observation(), CONFIG)
    made = [with_applied_hash(manifest) for manifest in (plan.service, plan.budget, plan.deployment)]
    return {(kind_of(obj), object_name(obj)): obj for obj in made}


def observation(service: InferenceService, **more: Any) -> Observation:
    children = children_of(service)
    (deployment,) = (obj for (kind, _), obj in children.items() if kind.name == "Deployment")
    return Observation(**{"children": children, "deployment": deployment, **more})


def test_nothing_is_done_at_rest() -> None:
    service = isvc()
    diff = compute_diff(service, observation(service), CONFIG)
    assert (diff.gates, diff.children, diff.surplus) == ((), (), ())
    assert not diff.creates
    assert not diff.is_key_suspect


def test_a_new_service_has_every_child_created() -> None:
    diff = compute_diff(isvc(), Observation(), CONFIG)
    kinds = [kind_of(change.wanted).name for change in diff.children]
    assert kinds == ["Service", "PodDisruptionBudget", "Deployment"]
    assert diff.creates
    assert diff.is_key_suspect


def test_a_paused_service_has_its_gates_set_and_nothing_else() -> None:
    ready = pod("a", "r", gate="")
    routers = Routers(known=True, alive=1, routable=frozenset({ready.uid}))
    diff = compute_diff(isvc(paused=True), Observation(pods=(ready,), routers=routers), CONFIG)
    assert [gate.status for gate in diff.gates] == ["True"]
    assert diff.secret is None
    assert diff.children == ()


def test_an_object_of_another_owner_is_reported_and_never_deleted() -> None:
    service = isvc()
    children = children_of(service)
    key = next(key for key in children if key[0] is SERVICES)
    foreign = {**children[key], "metadata": {**children[key]["metadata"], "ownerReferences": []}}
    stray: Any = {"metadata": {"name": "stray", "namespace": "team"}}
    more: Children = {**children, key: foreign, (SERVICES, ("team", "stray")): stray}
    diff = compute_diff(service, observation(service, children=more), CONFIG)
    assert [change.live for change in diff.children] == [foreign]
    assert diff.surplus == ()


def test_a_child_that_the_plan_does_not_name_is_surplus() -> None:
    service = isvc()
    children = children_of(service)
    owned = next(obj for key, obj in children.items() if key[0] is SERVICES)
    old = {**owned, "metadata": {**owned["metadata"], "name": "old"}}
    more: Children = {**children, (SERVICES, ("team", "old")): old}
    diff = compute_diff(service, observation(service, children=more), CONFIG)
    assert diff.surplus == ((SERVICES, old),)


def test_the_plan_knows_of_a_gate_that_closes() -> None:
    """A replica that drains serves no more, so a failed replacement has nothing left to protect."""
    service = isvc()
    revision = plan_children(service, Observation(), CONFIG).revision
    serving = pod("old", "old")
    failed = pod("new", revision, ready=False, gate="", problem=Problem("ImagePullBackOff", "not found"))
    halted = compute_diff(service, observation(service, pods=(serving, failed)), CONFIG)
    assert halted.plan.rollout.phase == "halted"
    routers = Routers(known=True, alive=1, draining=frozenset({serving.uid}))
    drained = compute_diff(service, observation(service, pods=(serving, failed), routers=routers), CONFIG)
    assert [gate.status for gate in drained.gates] == ["False"]
    assert drained.plan.rollout.phase == "normal"
