"""Replicas whose engine spans several nodes: a leader of the Deployment, and a StatefulSet of workers beside each."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import datetime
import json
from collections.abc import Iterable
from typing import Any

import pytest
from builders import CONFIG, isvc, isvc_object, pod
from fake_kubernetes import FakeKubernetes, Object
from harness import (
    Operator,
    condition,
    deployment,
    edit_engine,
    first_writes,
    is_ready,
    new_cluster,
    num_routable,
    settled,
)
from virtual_time import run, virtual_time

from argosy_engine.api.serve import check_headless, parse_args
from argosy_operator.desired.children import plan_children
from argosy_operator.desired.diff import compute_diff
from argosy_operator.names import (
    INFERENCE_SERVICES,
    LEADER_LABEL,
    NODE_TEMPLATE_ANNOTATION,
    PODS,
    REVISION_LABEL,
    STATEFUL_SETS,
    node_set_name,
)
from argosy_operator.observation import Observation
from argosy_operator.pod import MAX_CHARS, MAX_DEPTH, MAX_VALUES, OVERDUE_SECONDS, Pod, Problem, with_workers
from argosy_protocol.fleet import decode_fleet
from argosy_protocol.headers import node_key
from argosy_resource.engine_command import (
    COMPONENT_LABEL,
    INTERNAL_KEYS_ENV,
    NODE_COMPONENT,
    NODE_KEY_ENV,
    SERVICE_LABEL,
    selector,
)
from argosy_resource.validation import ManifestError, validate_manifest

TWO_NODES = {"tensor": 2, "nodes": 2}
STOPPED_AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
"""The deletion time that the fake cluster gives to pods."""


def after_stop(seconds: float) -> str:
    return (STOPPED_AT + datetime.timedelta(seconds=seconds)).isoformat()


def in_time() -> str:
    return after_stop(1)


def leaders(cluster: FakeKubernetes) -> list[Object]:
    return [each for each in cluster.pods() if not is_worker(each)]


def workers(cluster: FakeKubernetes) -> list[Object]:
    return [each for each in cluster.pods() if is_worker(each)]


def is_worker(obj: Object) -> bool:
    return bool(obj["metadata"]["labels"][COMPONENT_LABEL] == NODE_COMPONENT)


def node_sets(cluster: FakeKubernetes) -> list[Object]:
    return [obj for (kind, _, _), obj in cluster.objects.items() if kind is STATEFUL_SETS]


def expanded(container: Object, **fields: str) -> list[str]:
    """The arguments as the kubelet fills them in."""
    values = {
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
        if "value" in each or "fieldRef" in each["valueFrom"]
    }
    found = []
    for arg in container["args"]:
        for name, value in values.items():
            arg = arg.replace(f"$({name})", value)
        found.append(arg)
    return found


def node_template(*, workers: int, **more: Any) -> str:
    """The least that an annotation may say, and further fields of the pod's spec."""
    metadata, spec = {"labels": {}, "annotations": {}}, {"containers": [{"env": []}], **more}
    return json.dumps({"workers": workers, "template": {"metadata": metadata, "spec": spec}})


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth - 1):
        found = [found]
    return found


def names(container: Object) -> set[str]:
    return {each["name"] for each in container["env"]}


@virtual_time
async def test_each_replica_has_workers_of_its_own_and_is_one_replica() -> None:
    async with settled(isvc_object(replicas=2, parallelism=TWO_NODES)) as (cluster, _):
        assert is_ready(cluster)
        assert len(leaders(cluster)) == len(workers(cluster)) == 2
        assert cluster.isvc()["status"]["replicas"] == cluster.isvc()["status"]["routableReplicas"] == 2
        owners = {each["metadata"]["ownerReferences"][0]["uid"] for each in node_sets(cluster)}
        assert owners == {each["metadata"]["uid"] for each in leaders(cluster)}
        (service,) = decode_fleet(cluster.fleet()).services
        assert not any(
            service.selector.items() <= each["metadata"]["labels"].items() for each in workers(cluster)
        )
        assert all(
            service.selector.items() <= each["metadata"]["labels"].items() for each in leaders(cluster)
        )


@virtual_time
async def test_the_engine_understands_what_both_pods_start() -> None:
    spec = {"tensor": 2, "pipeline": 3, "nodes": 3}
    async with settled(isvc_object(parallelism=spec, resources={"gpu": {}})) as (cluster, _):
        (leader,), (first, second) = leaders(cluster), workers(cluster)
    (engine,) = leader["spec"]["containers"]
    fields = {"metadata.name": "pod", "status.podIP": leader["status"]["podIP"]}
    options, args = parse_args(expanded(engine, **fields)[1:])
    check_headless(args, is_headless=options.headless)
    assert (args.nnodes, args.node_rank, args.master_addr) == (3, 0, leader["status"]["podIP"])
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "2"
    for rank, worker in ((1, first), (2, second)):
        (engine,) = worker["spec"]["containers"]
        index = worker["metadata"]["labels"]["apps.kubernetes.io/pod-index"]
        fields = {"metadata.name": "pod", "metadata.labels['apps.kubernetes.io/pod-index']": index}
        options, joining = parse_args(expanded(engine, **fields)[1:])
        check_headless(joining, is_headless=options.headless)
        assert (joining.node_rank, joining.master_addr) == (rank, args.master_addr)
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == "2"


@virtual_time
async def test_workers_have_the_key_of_nodes_and_none_of_the_api() -> None:
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, _):
        (leader,), (worker,) = leaders(cluster), workers(cluster)
        secret = next(obj for (kind, _, _), obj in cluster.objects.items() if kind.name == "Secret")
    (first,), (other,) = leader["spec"]["containers"], worker["spec"]["containers"]
    assert {"ARGOSY_API_KEY", NODE_KEY_ENV, "ARGOSY_WARM_UP_FROM"} <= names(first)
    assert NODE_KEY_ENV in names(other)
    assert not {"ARGOSY_API_KEY", INTERNAL_KEYS_ENV, "ARGOSY_WARM_UP_FROM"} & names(other)
    mounted = [each["name"] for each in leader["spec"]["volumes"] if "secret" in each]
    assert mounted == ["argosy-key"]
    assert "argosy-key" not in {each["name"] for each in (*other["volumeMounts"], *worker["spec"]["volumes"])}
    keys = {name: base64.b64decode(text).strip() for name, text in secret["data"].items()}
    assert keys["ARGOSY_API_KEY"] != keys[NODE_KEY_ENV], "the one key does not tell the other"
    assert all(len(key) >= 16 for key in keys.values())
    assert "readinessGates" not in worker["spec"], "nobody opens it"
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} & other.keys()
    assert other["securityContext"] == first["securityContext"]


def test_nodes_that_start_during_a_rotation_have_the_key_before_too() -> None:
    old, new, service = CONFIG.fleet_key, b"n" * 32, isvc(parallelism=TWO_NODES)
    config = dataclasses.replace(CONFIG, fleet_key=new, previous_fleet_keys=(old,))
    secret = plan_children(service, Observation(), config).secret
    keys = base64.b64decode(secret["data"][NODE_KEY_ENV]).decode().split("\n")
    assert keys == [node_key(each, service.metadata.uid) for each in (new, old)]


@virtual_time
async def test_a_rollout_replaces_groups_without_a_routable_gap() -> None:
    async with settled(isvc_object(replicas=2, parallelism=TWO_NODES)) as (cluster, operator):
        before = {each["metadata"]["uid"] for each in cluster.pods()}
        routable: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: routable.append(num_routable(cluster)))
        unlike: list[str] = []
        cluster.listeners.append(lambda kind, event, obj: unlike.extend(unfitting(cluster)))
        edit_engine(cluster, threads=2)
        await operator.settle()
        assert min(routable) >= 2
        assert not unlike, "a worker is always of its leader's revision"
        assert before.isdisjoint(each["metadata"]["uid"] for each in cluster.pods())
        assert len(leaders(cluster)) == len(workers(cluster)) == len(node_sets(cluster)) == 2
        assert is_ready(cluster)


def unfitting(cluster: FakeKubernetes) -> Iterable[str]:
    revisions = {
        each["metadata"]["uid"]: each["metadata"]["labels"][REVISION_LABEL] for each in leaders(cluster)
    }
    for each in node_sets(cluster):
        owner = each["metadata"]["ownerReferences"][0]["uid"]
        labels = each["spec"]["template"]["metadata"]["labels"]
        if owner in revisions and labels[REVISION_LABEL] != revisions[owner]:
            yield each["metadata"]["name"]


@virtual_time
async def test_a_leader_that_is_replaced_while_a_rollout_is_halted_gets_workers_of_its_own_revision() -> None:
    async with settled(isvc_object(replicas=3, parallelism=TWO_NODES)) as (cluster, operator):
        cluster.broken_images.add("broken")
        revision = leaders(cluster)[0]["metadata"]["labels"][REVISION_LABEL]
        edit_engine(cluster, image="broken")
        await operator.settle()
        assert condition(cluster, "Progressing")[1] == "RolloutHalted"
        gone = next(
            each for each in leaders(cluster) if each["metadata"]["labels"][REVISION_LABEL] == revision
        )
        cluster.remove((PODS, "team", gone["metadata"]["name"]))
        await operator.settle()
        assert not list(unfitting(cluster))
        held = [each for each in workers(cluster) if each["metadata"]["labels"][REVISION_LABEL] == revision]
        assert len(held) == 3


@pytest.mark.parametrize("gpus", [4, 5])
@virtual_time
async def test_a_rollout_that_finds_a_gpu_for_no_node_or_only_some_replaces_in_place(gpus: int) -> None:
    spec = {"replicas": 2, "parallelism": TWO_NODES, "resources": {"gpu": {}}}
    async with settled(isvc_object(**spec), gpus=gpus) as (cluster, operator):
        before = {each["metadata"]["uid"] for each in cluster.pods()}
        routable: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: routable.append(num_routable(cluster)))
        edit_engine(cluster, threads=2)
        await operator.settle()
        assert is_ready(cluster)
        assert min(routable) == 1, "one goes first, and the other one serves"
        assert before.isdisjoint(each["metadata"]["uid"] for each in cluster.pods())


@virtual_time
async def test_nothing_is_written_at_rest_and_a_restart_of_the_operator_changes_nothing() -> None:
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, operator):
        written = len(cluster.writes)
        await operator.controller.resync()
        await operator.settle()
    async with Operator(cluster) as another:
        await another.settle()
    assert cluster.writes[written:] == []


async def _rolled(fatal: int) -> list[tuple[str, str, str]]:
    """Create a service and change it, with an operator that dies at a write of it; return the writes."""
    cluster, crashed = new_cluster(), asyncio.Event()

    def kill(number: int) -> None:
        if crashed.is_set() or len(cluster.writes) == fatal:
            crashed.set()
            raise asyncio.CancelledError

    cluster.before_write = kill
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(parallelism=TWO_NODES))
        router, is_edited = operator.router, False
        for _ in range(60):
            await asyncio.sleep(1.0)
            cluster.step()
            if crashed.is_set():
                break
            if is_ready(cluster) and not is_edited:
                is_edited = True
                edit_engine(cluster, threads=2)
    if not is_edited:
        edit_engine(cluster, threads=2)
    cluster.before_write = lambda number: None
    async with Operator(cluster, router) as successor:
        await successor.settle()
    assert is_ready(cluster), f"killed before write {fatal}"
    assert len(leaders(cluster)) == len(workers(cluster)) == len(node_sets(cluster)) == 1
    assert not list(unfitting(cluster))
    return cluster.writes


@pytest.mark.parametrize("is_any", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_at_any_write_each_replica_has_its_workers_in_the_end(is_any: bool) -> None:
    writes = run(_rolled(-1))
    assert len(writes) > 10
    for fatal in range(len(writes)) if is_any else first_writes(writes):
        run(_rolled(fatal))


@virtual_time
async def test_scaling_to_zero_and_deletion_leave_nothing() -> None:
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, operator):
        cluster.edit("tiny", lambda spec: spec.update(replicas=0))
        await operator.settle()
        assert cluster.pods() == []
        assert node_sets(cluster) == []
        cluster.edit("tiny", lambda spec: spec.update(replicas=1))
        await operator.settle()
        assert len(workers(cluster)) == 1
        cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
        await operator.settle()
        assert cluster.pods() == []
        assert cluster.children() == {}


@virtual_time
async def test_from_one_node_to_two_and_back() -> None:
    async with settled(isvc_object(parallelism={"tensor": 2})) as (cluster, operator):
        cluster.edit("tiny", lambda spec: spec["parallelism"].update(nodes=2))
        await operator.settle()
        assert is_ready(cluster)
        assert len(workers(cluster)) == 1
        cluster.edit("tiny", lambda spec: spec["parallelism"].update(nodes=1))
        await operator.settle()
        assert is_ready(cluster)
        assert workers(cluster) == node_sets(cluster) == []
        secret = next(obj for (kind, _, _), obj in cluster.objects.items() if kind.name == "Secret")
        assert NODE_KEY_ENV not in secret["data"], "no pod needs it any more"


@virtual_time
async def test_a_worker_that_cannot_go_costs_its_replica() -> None:
    """A StatefulSet waits for a pod of a lost machine forever."""
    now = [in_time()]
    cluster = new_cluster()
    async with Operator(cluster, now=lambda: now[0]) as operator:
        cluster.create(isvc_object(parallelism=TWO_NODES))
        await operator.settle()
        (leader,), (worker,) = leaders(cluster), workers(cluster)
        cluster.is_stuck = lambda each: each["metadata"]["uid"] == worker["metadata"]["uid"]
        cluster.remove((PODS, "team", worker["metadata"]["name"]))
        await until_still(cluster)
        assert [each["metadata"]["uid"] for each in leaders(cluster)] == [leader["metadata"]["uid"]], (
            "it has time"
        )
        now[0] = after_stop(OVERDUE_SECONDS + 1)
        await operator.controller.resync()
        for _ in range(40):
            await asyncio.sleep(1.0)
            cluster.step()
        (successor,) = leaders(cluster)
        assert successor["metadata"]["uid"] != leader["metadata"]["uid"]
        assert is_ready(cluster)
        fresh = [each for each in workers(cluster) if not each["metadata"].get("deletionTimestamp")]
        assert len(fresh) == 1


@pytest.mark.parametrize("state", ["", "refused", "paused", "budget refused"])
@virtual_time
async def test_a_leader_that_cannot_go_keeps_no_workers(state: str) -> None:
    now = [in_time()]
    cluster = new_cluster()
    async with Operator(cluster, now=lambda: now[0]) as operator:
        cluster.create(isvc_object(parallelism=TWO_NODES))
        await operator.settle()
        (leader,), (worker,) = leaders(cluster), workers(cluster)
        if state == "paused":
            cluster.edit("tiny", lambda spec: spec.update(paused=True))
        elif state == "refused":
            cluster.is_refused = lambda obj: obj["kind"] == "Deployment"
            edit_engine(cluster, threads=2)
        elif state == "budget refused":
            cluster.is_refused = lambda obj: obj["kind"] == "PodDisruptionBudget"
            cluster.edit("tiny", lambda spec: spec.update(podDisruptionBudget={"maxUnavailable": 0}))
        cluster.is_stuck = lambda each: each["metadata"]["uid"] == leader["metadata"]["uid"]
        cluster.remove((PODS, "team", leader["metadata"]["name"]))
        await until_still(cluster)
        assert worker["metadata"]["uid"] in {each["metadata"]["uid"] for each in workers(cluster)}, (
            "it drains"
        )
        now[0] = after_stop(OVERDUE_SECONDS + 1)
        await operator.controller.resync()
        for _ in range(20):
            await asyncio.sleep(1.0)
            cluster.step()
        assert worker["metadata"]["uid"] not in {each["metadata"]["uid"] for each in workers(cluster)}
        assert len(workers(cluster)) == 1, "those of its successor"
        assert is_ready(cluster) is ("refused" not in state)


@virtual_time
async def test_an_operator_whose_clock_is_ahead_lets_replicas_drain() -> None:
    """Else it takes the workers of a leader that stops, and with them its requests, at once."""
    now = [after_stop(600)]
    cluster = new_cluster()
    async with Operator(cluster, now=lambda: now[0]) as operator:
        cluster.create(isvc_object(parallelism=TWO_NODES))
        await operator.settle()
        (leader,), (worker,) = leaders(cluster), workers(cluster)
        cluster.is_stuck = lambda each: each["metadata"]["uid"] == leader["metadata"]["uid"]
        cluster.objects[PODS, "team", leader["metadata"]["name"]]["metadata"][
            "deletionGracePeriodSeconds"
        ] = 30
        cluster.remove((PODS, "team", leader["metadata"]["name"]))
        for since in (600, 600 + OVERDUE_SECONDS + 29):
            now[0] = after_stop(since)
            await operator.controller.resync()
            await until_still(cluster)
            assert worker["metadata"]["uid"] in {each["metadata"]["uid"] for each in workers(cluster)}
        now[0] = after_stop(600 + OVERDUE_SECONDS + 31)
        await operator.controller.resync()
        for _ in range(20):
            await asyncio.sleep(1.0)
            cluster.step()
        assert worker["metadata"]["uid"] not in {each["metadata"]["uid"] for each in workers(cluster)}


async def until_still(cluster: FakeKubernetes) -> None:
    for _ in range(10):
        await asyncio.sleep(1.0)
        cluster.step()


@virtual_time
async def test_a_paused_service_gets_the_workers_of_a_leader_that_kubernetes_replaces() -> None:
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, operator):
        cluster.edit("tiny", lambda spec: spec.update(paused=True))
        (leader,) = leaders(cluster)
        cluster.remove((PODS, "team", leader["metadata"]["name"]))
        await operator.settle()
        (successor,) = leaders(cluster)
        (owned,) = node_sets(cluster)
        assert owned["metadata"]["ownerReferences"][0]["uid"] == successor["metadata"]["uid"]


@virtual_time
async def test_a_stateful_set_of_others_is_left_alone() -> None:
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, operator):
        (own,) = node_sets(cluster)
        foreign = {
            **own,
            "metadata": {
                **own["metadata"],
                "name": "other",
                "ownerReferences": [{"kind": "Pod", "name": "x", "uid": "somebody", "controller": True}],
            },
        }
        cluster.create(foreign)
        await operator.settle()
        assert {each["metadata"]["name"] for each in node_sets(cluster)} == {"other", own["metadata"]["name"]}


@virtual_time
async def test_an_annotation_that_was_changed_changes_no_workers() -> None:
    """Who may only change a pod's annotations must not have the operator start other containers."""
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, operator):
        (leader,) = copy.deepcopy(leaders(cluster))
        annotations, image = leader["metadata"]["annotations"], leader["spec"]["containers"][0]["image"]
        assert image in annotations[NODE_TEMPLATE_ANNOTATION]
        annotations[NODE_TEMPLATE_ANNOTATION] = annotations[NODE_TEMPLATE_ANNOTATION].replace(image, "evil")
        cluster.overwrite((PODS, "team", leader["metadata"]["name"]), leader)
        await operator.settle()
        (own,) = node_sets(cluster)
        assert own["spec"]["template"]["spec"]["containers"][0]["image"] == image


def test_a_canary_tries_its_change_with_workers_too() -> None:
    service = isvc(parallelism=TWO_NODES)
    plan = plan_children(service, Observation(), CONFIG)
    template = plan.deployment["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    node_template = annotations[NODE_TEMPLATE_ANNOTATION]
    canary = pod("canary", "r2", is_canary=True, address="10.0.0.3", node_template=node_template)
    (found,) = plan_children(service, Observation(pods=(canary,)), CONFIG).node_sets
    assert found["metadata"]["ownerReferences"][0]["name"] == "canary"
    assert found["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] == "r2"


@pytest.mark.parametrize(
    "leader",
    [
        pod("a", "r", node_template="", address="10.0.0.1"),
        pod("a", "r", node_template="{}", address="10.0.0.1"),
        pod("a", "r", node_template='{"workers":1,"template":{},"more":1}', address="10.0.0.1"),
        *(
            pod("a", "r", node_template=text, address="10.0.0.1")
            for text in (
                '{"workers":1,"template":{}}',
                '{"workers":1,"template":{"metadata":{"labels":{},"annotations":{}},"spec":{"containers":[]}}}',
                '{"workers":1,"template":{"metadata":{"labels":{},"annotations":{}},"spec":{"containers":[{}]}}}',
                '{"workers":1,"template":' + "[" * 5000 + "]" * 5000 + "}",
                node_template(workers=1, volumes=nested(MAX_DEPTH)),
                node_template(workers=-1),
                node_template(workers=0),
                node_template(workers=16),
                node_template(workers=1).replace("[]", "5"),
                node_template(workers=1, volumes=[[]] * MAX_VALUES),
                node_template(workers=1, schedulerName="x" * MAX_CHARS),
            )
        ),
    ],
)
def test_a_pod_that_says_nothing_of_workers_gets_none(leader: Pod) -> None:
    diff = compute_diff(isvc(), Observation(pods=(leader,)), CONFIG)
    assert diff.plan.node_sets == ()


@pytest.mark.parametrize(
    "env",
    [[{"name": f"V{n}", "value": text} for n in range(5)] for text in ("x" * 30_000, "," * 2_000)],
    ids=["long", "many values"],
)
@virtual_time
async def test_a_template_that_is_too_large_for_workers_is_refused_with_the_remedy(
    env: list[dict[str, str]],
) -> None:
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, operator):
        before = deployment(cluster)["metadata"]["generation"]
        edit_engine(cluster, env=env)
        await operator.settle()
        assert deployment(cluster)["metadata"]["generation"] == before
        assert len(workers(cluster)) == num_routable(cluster) == 1, "what serves goes on"
        for kind, status in (("Ready", "False"), ("Degraded", "True")):
            assert condition(cluster, kind) == (status, "InvalidSpec")
            message = cluster.condition(kind)["message"]
            assert f"of which the operator takes {MAX_CHARS} and {MAX_VALUES}" in message
            assert "into a ConfigMap that podTemplate mounts" in message
        edit_engine(cluster, env=[])
        await operator.settle()
        assert is_ready(cluster)


def test_the_least_that_a_pod_may_say_of_workers_is_enough() -> None:
    for text in (node_template(workers=15), node_template(workers=1, volumes=nested(MAX_DEPTH - 4))):
        leader = pod("a", "r", node_template=text, address="10.0.0.1")
        assert len(compute_diff(isvc(), Observation(pods=(leader,)), CONFIG).plan.node_sets) == 1


@virtual_time
async def test_workers_that_are_refused_hold_up_nothing_else() -> None:
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, operator):
        (forged,) = copy.deepcopy(leaders(cluster))
        (owner,) = forged["metadata"]["ownerReferences"]
        forged["metadata"].update(name="forged", ownerReferences=[{**owner, "uid": "another"}])
        cluster.create(forged)
        name = node_set_name(isvc(), cluster.objects[PODS, "team", "forged"]["metadata"]["uid"])
        cluster.is_refused = lambda obj: bool(obj["metadata"]["name"] == name)
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await operator.settle()
        assert ("apply", "StatefulSet", name) in cluster.writes
        assert len(leaders(cluster)) == 3
        assert len(workers(cluster)) == 2
        cluster.edit("tiny", lambda spec: spec.update(replicas=0))
        cluster.remove((PODS, "team", "forged"))
        await operator.settle()
        assert leaders(cluster) == node_sets(cluster) == []


@virtual_time
async def test_a_deployment_that_is_refused_takes_no_workers_from_its_pods() -> None:
    async with settled(isvc_object(parallelism=TWO_NODES)) as (cluster, operator):
        cluster.is_refused = lambda obj: obj["kind"] == "Deployment"
        edit_engine(cluster, threads=2)
        (leader,) = leaders(cluster)
        cluster.remove((PODS, "team", leader["metadata"]["name"]))
        await operator.settle()
        (successor,) = leaders(cluster)
        (own,) = node_sets(cluster)
        assert own["metadata"]["ownerReferences"][0]["uid"] == successor["metadata"]["uid"]


def test_what_a_worker_waits_for_is_shown_of_its_replica() -> None:
    service, template = isvc(parallelism={"tensor": 3, "nodes": 3}), node_template(workers=2)
    name = node_set_name(service, "uid-a")
    of_a: dict[str, Any] = {"leader": "uid-a", "stateful_set": name}
    failing = pod(f"{name}-1", "r", **of_a, problem=Problem("ImagePullBackOff", "not found"))
    waiting = pod(
        f"{name}-2", "r", **of_a, unschedulable="0/1 nodes", unschedulable_since="2026-01-01T00:00:00Z"
    )
    pods = (pod("a", "r", node_template=template), failing, pod("b", "r"), waiting)
    found, other = with_workers(service, pods)
    assert found.problem == Problem("ImagePullBackOff", f"its node {name}-1: not found")
    assert (found.unschedulable, found.unschedulable_since) == ("0/1 nodes", "2026-01-01T00:00:00Z")
    assert other == pod("b", "r")


@pytest.mark.parametrize(
    "forged", ["no owner", "another kind", "another set", "another name", "another rank"]
)
@virtual_time
async def test_a_pod_that_only_claims_to_be_a_worker_costs_no_replica(forged: str) -> None:
    """Whoever may create pods must not have the operator delete replicas."""
    now = [in_time()]
    cluster = new_cluster()
    async with Operator(cluster, now=lambda: now[0]) as operator:
        cluster.create(isvc_object(parallelism=TWO_NODES))
        await operator.settle()
        (leader,), (worker,) = leaders(cluster), workers(cluster)
        (own,) = node_sets(cluster)
        claims = copy.deepcopy(worker)
        (owner,) = claims["metadata"]["ownerReferences"]
        claims["metadata"].update(uid="forged", name=f"{own['metadata']['name']}-2")
        if forged == "no owner":
            del claims["metadata"]["ownerReferences"]
        elif forged == "another kind":
            owner["kind"] = "ReplicaSet"
        elif forged == "another set":
            owner["name"] = "other"
        elif forged == "another name":
            claims["metadata"]["name"] = "other-1"
        await hang(cluster, claims)
        now[0] = after_stop(OVERDUE_SECONDS + 1)
        await operator.controller.resync()
        await until_still(cluster)
        assert [each["metadata"]["uid"] for each in leaders(cluster)] == [leader["metadata"]["uid"]]


@virtual_time
async def test_a_replica_of_one_node_has_no_workers_to_lose() -> None:
    now = [in_time()]
    cluster = new_cluster()
    async with Operator(cluster, now=lambda: now[0]) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        (leader,) = leaders(cluster)
        uid = leader["metadata"]["uid"]
        name = node_set_name(isvc(), uid)
        claims = copy.deepcopy(leader)
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": "x", "controller": True}
        claims["metadata"].update(name=f"{name}-1", uid="forged", ownerReferences=[owner])
        claims["metadata"]["labels"].update({LEADER_LABEL: uid, COMPONENT_LABEL: NODE_COMPONENT})
        await hang(cluster, claims)
        now[0] = after_stop(OVERDUE_SECONDS + 1)
        await operator.controller.resync()
        await until_still(cluster)
        assert [each["metadata"]["uid"] for each in leaders(cluster)] == [uid]


async def hang(cluster: FakeKubernetes, obj: Object) -> None:
    """Create a pod that is deleted and stays."""
    cluster.is_stuck = lambda each: each["metadata"]["name"] == obj["metadata"]["name"]
    cluster.create(obj)
    cluster.remove((PODS, "team", obj["metadata"]["name"]))
    await until_still(cluster)
    assert any(each["metadata"].get("deletionTimestamp") for each in cluster.pods())


@virtual_time
async def test_workers_that_cannot_be_created_are_told() -> None:
    cluster = new_cluster()
    cluster.has_quota = lambda name: not name.endswith("-2")
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(parallelism={"tensor": 3, "nodes": 3}))
        await operator.settle()
        assert not is_ready(cluster)
        message = cluster.condition("WorkloadReady")["message"]
        assert "1 of its 2 workers exist: kubectl describe statefulset -l" in message
        cluster.has_quota = lambda name: True
        await operator.settle()
        assert is_ready(cluster)


def test_all_pods_of_a_service_are_one_budget_and_one_spread() -> None:
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    placement = {"topologySpreadConstraints": [spread]}
    plan = plan_children(isvc(parallelism=TWO_NODES, placement=placement), Observation(), CONFIG)
    whole = {"matchLabels": {"inference.argosy.dev/service": "tiny"}}
    assert plan.budget["spec"]["selector"] == whole
    (constraint,) = plan.deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert constraint["labelSelector"] == whole


def test_the_budget_covers_workers_until_the_last_has_gone() -> None:
    service, other = isvc(), pod("b", "s")
    serves = pod("a", "r", node_template=node_template(workers=1))
    before, after = (
        plan_children(service, Observation(pods=pods), CONFIG).budget["spec"]["selector"]["matchLabels"]
        for pods in ((serves, other), (other,))
    )
    assert before == {SERVICE_LABEL: "tiny"}
    assert after == selector(service)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"parallelism": {"tensor": 3, "nodes": 2}}, "must divide"),
        ({"parallelism": {"nodes": 2}}, "must divide"),
        ({"parallelism": {"tensor": 2, "data": 2, "nodes": 2}}, "set data to 1"),
        ({"parallelism": {"tensor": 2, "nodes": 0}}, "greater than or equal to 1"),
        ({"parallelism": {"tensor": 16, "nodes": 17}}, "less than or equal to 16"),
        (
            {"parallelism": TWO_NODES, "engine": {"type": "vllm"}, "model": {"source": "pvc://claim/model"}},
            "only engines of type argosy",
        ),
        (
            {"parallelism": TWO_NODES, "engine": {"args": ["--nnodes=2"]}},
            "--nnodes is set by spec.parallelism.nodes",
        ),
        (
            {"parallelism": TWO_NODES, "engine": {"args": ["--headless"]}},
            "--headless cannot be set here: use spec.parallelism.nodes",
        ),
        ({"engine": {"env": [{"name": NODE_KEY_ENV, "value": "x"}]}}, "is set by the operator"),
    ],
)
def test_what_cannot_be_divided_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError) as refused:
        validate_manifest(isvc_object(**spec))
    assert message in str(refused.value)


def test_one_node_is_the_default_and_changes_nothing() -> None:
    plain, said = (
        plan_children(isvc(parallelism=each), Observation(), CONFIG) for each in ({}, {"nodes": 1})
    )
    assert plain == said
    assert plain.node_sets == ()
    assert list(plain.secret["data"]) == ["ARGOSY_API_KEY", "api-keys"]
