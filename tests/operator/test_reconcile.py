"""The operator over time, against the fake cluster: it converges, then writes nothing, and survives faults."""

from __future__ import annotations

import asyncio
import copy
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builders import isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import (
    ROUTER_POD,
    FakeRouter,
    Operator,
    deployment,
    edit_engine,
    first_writes,
    is_ready,
    new_cluster,
    num_routable,
    settled,
)
from virtual_time import run, virtual_time

from argosy_operator.cluster.api import ApiError, ObjectList
from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, PODS, SERVICES, Kind, Name
from argosy_operator.reconcile.controller import GATHER_FACTOR, GATHER_FAILED_S, GATHER_MAX_S
from argosy_operator.reconcile.reporter import Reporter
from argosy_operator.reconcile.workqueue import BACKOFF_MAX
from argosy_protocol.fleet import decode_fleet

RESYNC = "argosy_operator_last_resync_timestamp_seconds"


@virtual_time
async def test_create_to_ready() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
    kinds = {name.partition("/")[0] for name in cluster.children()}
    assert kinds == {"Deployment", "Service", "PodDisruptionBudget", "Secret"}
    assert is_ready(cluster)
    status = cluster.isvc()["status"]
    assert (status["replicas"], status["routable"], status["observedGeneration"]) == (2, "2/2", 1)
    (service,) = decode_fleet(cluster.fleet()).services
    assert (service.qualified_name, service.model) == ("team/tiny", "tiny")


@virtual_time
async def test_a_converged_cluster_gets_no_writes() -> None:
    async with settled(isvc_object(replicas=2, resources={"cpu": "1000m", "memory": "1024Mi"})) as (
        cluster,
        operator,
    ):
        cluster.writes.clear()
        await asyncio.sleep(3600)
        assert operator.controller.metrics.registry.get_sample_value(RESYNC)
    assert cluster.writes == []
    async with Operator(cluster):
        await asyncio.sleep(3600)
    assert cluster.writes == [], "a restarted operator has nothing to write either"


@virtual_time
async def test_scale_touches_nothing_but_the_deployment() -> None:
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        survivors = {pod["metadata"]["name"] for pod in cluster.pods()}
        cluster.writes.clear()
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        await operator.settle()
        assert survivors < {pod["metadata"]["name"] for pod in cluster.pods()}
        assert is_ready(cluster)
        applied = {kind for verb, kind, _ in cluster.writes if verb == "apply"}
        assert applied - {"Event"} == {"Deployment"}
        cluster.edit("tiny", lambda spec: spec.update(replicas=0))
        await operator.settle()
    assert cluster.pods() == []
    assert cluster.condition("Ready")["reason"] == "Stopped"


@virtual_time
async def test_a_pod_with_copied_labels_is_no_replica() -> None:
    """As `kubectl debug --copy-to --keep-labels` makes one, or a user's copy of the Deployment."""
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        own = cluster.pods()
        metadata = {name: own[0]["metadata"][name] for name in ("namespace", "labels", "annotations")}
        waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}}
        copied = {
            **own[0],
            "metadata": {**metadata, "name": "tiny-debug"},
            "status": {"phase": "Running", "containerStatuses": [{"name": "engine", **waiting}]},
        }
        cluster.create(copied)
        await asyncio.sleep(60)
        assert is_ready(cluster)
        assert cluster.isvc()["status"]["replicas"] == 2
        edit_engine(cluster, threads=2)
        await operator.settle()
        assert is_ready(cluster), "nor does it halt a rollout"
        assert not {pod["metadata"]["name"] for pod in own} & {
            pod["metadata"]["name"] for pod in cluster.pods()
        }


@virtual_time
async def test_delete_leaves_nothing() -> None:
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        assert "finalizers" not in cluster.isvc()["metadata"]
        cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
        await operator.settle()
    assert cluster.children() == {}
    assert cluster.pods() == []
    assert decode_fleet(cluster.fleet()).services == ()


@virtual_time
async def test_delete_while_the_operator_is_down() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
    cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
    async with Operator(cluster) as operator:
        await operator.settle()
    assert decode_fleet(cluster.fleet()).services == ()


@virtual_time
async def test_delete_and_create_anew() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        first = cluster.isvc()["metadata"]["uid"]
        cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
        cluster.create(isvc_object(engine={"threads": 2}))
        await operator.settle()
        second = cluster.isvc()["metadata"]["uid"]
    (owner,) = deployment(cluster)["metadata"]["ownerReferences"]
    assert owner["uid"] == second != first
    assert decode_fleet(cluster.fleet()).services[0].uid == second
    assert is_ready(cluster)


def life(step: int, cluster: FakeKubernetes) -> None:
    """What a user does, in order."""
    changes: list[Callable[[], None]] = [
        lambda: cluster.create(isvc_object(replicas=2)),
        lambda: cluster.edit("tiny", lambda spec: spec.update(replicas=3)),
        lambda: edit_engine(cluster, threads=2),
        lambda: cluster.create(isvc_object("other", replicas=1)),
    ]
    changes[step]()


LIFE = range(4)


def end_state(cluster: FakeKubernetes) -> tuple[Any, ...]:
    secrets = {f"Secret/{name}-engine-key" for name in ("tiny", "other")}
    children = {
        name: None if name in secrets or name.startswith("Deployment") else obj
        for name, obj in cluster.children().items()
    }
    statuses = [
        [
            (each["type"], each["status"], each["reason"])
            for each in cluster.isvc(name)["status"]["conditions"]
        ]
        for name in ("tiny", "other")
    ]
    specs = [
        (spec["replicas"], spec["strategy"], spec["template"]["spec"])
        for spec in (deployment(cluster, name)["spec"] for name in ("tiny", "other"))
    ]
    return children, statuses, specs, len(cluster.pods())


async def undisturbed() -> FakeKubernetes:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        for step in LIFE:
            life(step, cluster)
            await operator.settle()
    return cluster


@pytest.mark.timeout(900)  # computes for half a minute on a machine that does nothing else
@pytest.mark.parametrize("is_any", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_at_every_write_it_converges_to_the_same_state(is_any: bool) -> None:
    """A new process takes over after each possible intermediate state (Sieve's first fault pattern)."""
    reference = run(undisturbed())
    expected = end_state(reference)
    writes = reference.writes
    assert len(writes) > 20

    async def scenario(fatal: int) -> FakeKubernetes:
        cluster = new_cluster()
        crashed = asyncio.Event()

        def kill(number: int) -> None:
            if number == fatal or crashed.is_set():
                crashed.set()
                raise asyncio.CancelledError

        cluster.before_write = kill
        operator = Operator(cluster)
        await operator.__aenter__()
        step, seen = 0, -1
        while step in LIFE or len(cluster.writes) > seen:
            seen = len(cluster.writes)
            if step in LIFE:
                life(step, cluster)
            for _ in range(3):
                await asyncio.sleep(1)
                cluster.step()
                if crashed.is_set():
                    await operator.__aexit__(None, None, None)
                    crashed.clear()
                    operator = Operator(cluster)
                    await operator.__aenter__()
            step += 1
        await operator.settle()
        await operator.__aexit__(None, None, None)
        return cluster

    for place in range(len(writes)) if is_any else first_writes(writes):
        fatal = place + 1
        cluster = run(scenario(fatal))
        assert end_state(cluster) == expected, f"killed before write {fatal}"


@virtual_time
async def test_refused_writes_are_tried_again() -> None:
    cluster = new_cluster()

    def refuse(number: int) -> None:
        if number % 3 == 0:
            raise ApiError("PATCH", 500, "etcd is busy")

    cluster.before_write = refuse
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await asyncio.sleep(60)
        await operator.settle()
    assert is_ready(cluster)


@virtual_time
async def test_permanent_errors_are_in_the_status() -> None:
    cluster = new_cluster()

    async def forbidden(manifest: Object) -> Object:
        if manifest["kind"] == "Deployment":
            raise ApiError("PATCH deployments", 403, "no permission")
        return await FakeKubernetes.apply(cluster, manifest)

    cluster.apply = forbidden  # type: ignore[method-assign]
    async with Operator(cluster):
        cluster.create(isvc_object())
        await asyncio.sleep(5)
    assert cluster.condition("Ready")["reason"] == "ApiError"
    assert "no permission" in cluster.condition("Degraded")["message"]


@pytest.mark.parametrize("status", [500, 503, 0])
@virtual_time
async def test_a_failure_that_lasts_is_in_the_status(status: int) -> None:
    """A webhook that does not answer, say: every change is refused, and one that passes by itself is not told."""
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    cluster = new_cluster()
    apply, is_down = cluster.apply, True

    async def call_webhook(manifest: Object) -> Object:
        if is_down and manifest["kind"] == "Deployment":
            raise ApiError("PATCH deployments", status, 'failed calling webhook "policies"')
        return await apply(manifest)

    def now() -> str:
        passed = datetime.timedelta(seconds=asyncio.get_running_loop().time())
        return (begin + passed).strftime("%Y-%m-%dT%H:%M:%SZ")

    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object())
        is_down = False
        await operator.settle()
        cluster.apply, is_down = call_webhook, True  # type: ignore[method-assign]
        edit_engine(cluster, maxNumSeqs=7)
        await asyncio.sleep(30)
        assert is_ready(cluster)
        for pod in cluster.pods():
            cluster.failing_images.add(pod["spec"]["containers"][0]["image"])
            cluster.evict(pod)
        await asyncio.sleep(120)
        assert cluster.condition("Ready")["status"] == "False"
        assert "failed calling webhook" in cluster.condition("Degraded")["message"]
        is_down = False
        cluster.failing_images.clear()
        await asyncio.sleep(60)
        await operator.settle()
        assert is_ready(cluster)
        cluster.apply, is_down = call_webhook, True  # type: ignore[method-assign]
        edit_engine(cluster, maxNumSeqs=8)
        await asyncio.sleep(30)
        assert cluster.condition("Degraded")["status"] == "False", "an earlier failure does not count"


@virtual_time
async def test_on_a_dead_node_nothing_is_ready() -> None:
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        assert is_ready(cluster)
        cluster.is_node_dead = True
        await operator.settle()
        for kind in ("Ready", "Routable", "WorkloadReady"):
            assert cluster.condition(kind)["status"] == "False", kind
        assert "node-a does not answer" in cluster.condition("Ready")["message"]
        assert cluster.isvc()["status"]["routable"] == "0/2"


@virtual_time
async def test_paused_reports_and_writes_nothing_else() -> None:
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        cluster.edit("tiny", lambda spec: spec.update(paused=True))
        cluster.edit("tiny", lambda spec: spec.update(replicas=5))
        await operator.settle()
        assert deployment(cluster)["spec"]["replicas"] == 2
        assert cluster.condition("Ready")["reason"] == "Paused"
        assert len(decode_fleet(cluster.fleet()).services) == 1
        cluster.edit("tiny", lambda spec: spec.update(paused=False))
        await operator.settle()
    assert len(cluster.pods()) == 5


@virtual_time
async def test_other_namespaces_are_left_alone() -> None:
    cluster = new_cluster()
    async with Operator(cluster, watch_namespaces=("team",)) as operator:
        cluster.create(isvc_object("mine"))
        cluster.create(isvc_object("theirs", namespace="elsewhere"))
        await operator.settle()
    assert is_ready(cluster, "mine")
    assert cluster.children(namespace="elsewhere") == {}


@virtual_time
async def test_lost_events_are_healed_by_the_resync() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        await operator.settle()
        listeners, cluster.listeners = cluster.listeners, []
        cluster.create(isvc_object())
        await asyncio.sleep(10)
        assert cluster.children() == {}
        cluster.listeners = listeners
        await asyncio.sleep(400)
        await operator.settle()
    assert is_ready(cluster)


@virtual_time
async def test_a_defect_in_one_resource_does_not_stop_the_others() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        unreadable = isvc_object("strange")
        cluster.create(unreadable)
        cluster.edit("strange", lambda spec: spec.update(replicas="many"))
        cluster.create(isvc_object())
        await operator.settle()
        assert cluster.condition("Ready", "strange")["reason"] == "InvalidSpec"
    assert is_ready(cluster)


@virtual_time
async def test_a_spec_that_is_too_large_is_refused_and_costs_no_other_service_anything() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        variables = [{"name": f"V{number}", "value": "x" * 32_000} for number in range(10)]
        cluster.create(isvc_object("large", engine={"env": variables}))
        cluster.create(isvc_object())
        await operator.settle()
        refused = cluster.condition("Ready", "large")
        assert refused["reason"] == "InvalidSpec"
        assert "move large variables and annotations into a ConfigMap" in refused["message"]
        assert (DEPLOYMENTS, "team", "large-engine") not in cluster.objects
        assert is_ready(cluster)
        cluster.edit("large", lambda spec: spec["engine"].update(env=variables[:2]))
        await operator.settle()
    assert is_ready(cluster, "large")


@virtual_time
async def test_a_service_of_very_many_values_is_refused_and_costs_nothing_at_rest() -> None:
    cluster = new_cluster()
    items = [{"key": "k", "path": f"p{number}"} for number in range(32)]
    sources = [{"configMap": {"name": "c", "items": items}}] * 16
    volumes = [{"name": f"v{number}", "projected": {"sources": sources}} for number in range(12)]
    async with Operator(cluster) as operator:
        cluster.create(isvc_object("large", podTemplate={"spec": {"volumes": volumes}}))
        cluster.create(isvc_object())
        await operator.settle()
        refused = cluster.condition("Ready", "large")
        assert refused["reason"] == "InvalidSpec"
        assert "too many values" in refused["message"]
        assert is_ready(cluster)
        cluster.writes.clear()
        await asyncio.sleep(3600)
        assert cluster.writes == []
        cluster.edit("large", lambda spec: spec["podTemplate"]["spec"].update(volumes=volumes[:2]))
        await operator.settle()
    assert is_ready(cluster, "large")


class StaleServices(FakeKubernetes):
    """Lists InferenceServices as they were at an earlier moment, if told."""

    earlier: ObjectList | None = None

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        if kind is INFERENCE_SERVICES and self.earlier is not None:
            return self.earlier
        return await super().list(kind, namespace=namespace, labels=labels)


@virtual_time
async def test_an_old_resource_beside_a_new_deployment_costs_no_replica() -> None:
    cluster = StaleServices()
    cluster.create(ROUTER_POD)
    async with Operator(cluster, FakeRouter(cluster)) as operator:
        cluster.create(isvc_object(replicas=1))
        await operator.settle()
        earlier = await cluster.list(INFERENCE_SERVICES, namespace=None)
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        await operator.settle()
    before = {pod["metadata"]["uid"] for pod in cluster.pods()}
    assert len(before) == 3
    cluster.earlier, written = earlier, len(cluster.writes)
    async with Operator(cluster, FakeRouter(cluster)) as operator:
        await operator.settle()
    assert {pod["metadata"]["uid"] for pod in cluster.pods()} == before
    assert not [write for write in cluster.writes[written:] if write[1] == "Deployment"]
    assert cluster.condition("Ready")["status"] == "True"


@virtual_time
async def test_objects_that_a_tenant_labels_as_children_hold_up_no_other_service() -> None:
    cluster = new_cluster()
    delete = cluster.delete

    async def delete_slowly(kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        await asyncio.sleep(0.1)
        await delete(kind, namespace, name, uid=uid)

    async with Operator(cluster) as operator:
        names = [f"owner-{number}" for number in range(8)]
        cluster.create(isvc_object())
        for name in names:
            cluster.create(isvc_object(name, namespace="other"))
        await operator.settle()
        cluster.delete = delete_slowly  # type: ignore[method-assign]
        for name in names:
            service = cluster.objects[SERVICES, "other", f"{name}-engine"]["metadata"]
            kept = {field: service[field] for field in ("namespace", "labels", "ownerReferences")}
            for number in range(60):
                metadata = {**kept, "name": f"{name}-{number}"}
                cluster.create({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {}})
        await asyncio.sleep(1)
        edit_engine(cluster, maxNumSeqs=77)
        await asyncio.sleep(3)
        assert "'77'" in str(deployment(cluster)["spec"]["template"]["spec"]["containers"])
        await asyncio.sleep(60)
        left = [name for kind, namespace, name in cluster.objects if (kind, namespace) == (SERVICES, "other")]
        assert sorted(left) == sorted(f"{name}-engine" for name in names)


async def touch_pods(cluster: FakeKubernetes, *, times: int, seconds: float) -> int:
    """Change something of each pod of the service that the operator does not read; return the number of changes."""
    names = [pod["metadata"]["name"] for pod in cluster.pods()]
    for number in range(times * len(names)):
        key = (PODS, "team", names[number % len(names)])
        obj = copy.deepcopy(cluster.objects[key])
        obj["status"]["qosClass"] = str(number)
        cluster.overwrite(key, obj)
        await asyncio.sleep(seconds)
    return times * len(names)


def change_each_write(cluster: FakeKubernetes) -> None:
    """Have a webhook change every Deployment that is applied."""

    async def mutated(manifest: Object) -> Object:
        if manifest["kind"] == "Deployment":
            manifest = {**manifest, "spec": {**manifest["spec"], "minReadySeconds": 99}}
        return await FakeKubernetes.apply(cluster, manifest)

    cluster.apply = mutated  # type: ignore[method-assign]


def refuse_deployments(cluster: FakeKubernetes) -> None:
    cluster.is_refused = lambda obj: obj["kind"] == "Deployment"


def reserve_secret(cluster: FakeKubernetes) -> None:
    """Have the service name a Secret that an operator has made."""
    labels = {"app.kubernetes.io/managed-by": "argosy-operator"}
    metadata = {"name": "made", "namespace": "team", "labels": labels}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
    cluster.edit("tiny", lambda spec: spec["model"].update(secretRef={"name": "made"}))


@pytest.mark.parametrize(
    ("prepare", "is_refused"),
    [(None, False), (change_each_write, False), (refuse_deployments, True), (reserve_secret, True)],
)
@virtual_time
async def test_pods_that_change_cause_no_requests(
    prepare: Callable[[FakeKubernetes], None] | None, is_refused: bool
) -> None:
    """Neither while nothing is to be written, nor while others change what is written. What is refused is tried again
    every few seconds."""
    async with settled(isvc_object(replicas=4)) as (cluster, _):
        if prepare is not None:
            prepare(cluster)
            edit_engine(cluster, threads=3)
        await asyncio.sleep(200)
        asked: list[Name] = []

        async def get(kind: Kind, namespace: str, name: str) -> Object | None:
            asked.append((kind.name, name))
            return await FakeKubernetes.get(cluster, kind, namespace, name)

        cluster.get = get  # type: ignore[method-assign]
        cluster.writes.clear()
        cluster.metadata_reads.clear()
        assert await touch_pods(cluster, times=10, seconds=0.1) == 40
        if is_refused:
            tries = 4.0 / GATHER_FAILED_S + 1
            assert len(cluster.writes) <= tries
            assert len(asked) <= 2 * tries
        else:
            assert (asked, cluster.writes, cluster.metadata_reads) == ([], [], [])


@virtual_time
async def test_a_change_that_was_refused_is_made_once_it_is_not() -> None:
    async with settled(isvc_object(replicas=2)) as (cluster, operator):
        refuse_deployments(cluster)
        edit_engine(cluster, threads=3)
        await asyncio.sleep(200)
        await touch_pods(cluster, times=10, seconds=0.1)
        cluster.is_refused = lambda obj: False
        await asyncio.sleep(BACKOFF_MAX + 1)
        assert operator.controller.queue.is_idle
        assert cluster.condition("Degraded")["status"] == "False"
        refuse_deployments(cluster)
        edit_engine(cluster, threads=4)
        await asyncio.sleep(200)
        cluster.is_refused = lambda obj: False
        cluster.writes.clear()
        edit_engine(cluster, threads=5)
        await asyncio.sleep(0.1)
        assert ("apply", "Deployment", "tiny-engine") in cluster.writes, "another manifest is sent at once"


@virtual_time
async def test_changes_of_many_pods_are_gathered() -> None:
    """A reconcile reads all pods of the service."""
    async with settled(isvc_object(replicas=1)) as (cluster, operator):
        (pod,) = cluster.pods()
        for number in range(300):
            obj = copy.deepcopy(pod)
            obj["metadata"] |= {"name": f"more-{number}", "uid": f"more-{number}"}
            cluster.create(obj)
        await asyncio.sleep(GATHER_MAX_S)
        count = "argosy_operator_reconcile_seconds_count", {"outcome": "ok"}
        before = operator.controller.metrics.registry.get_sample_value(*count)
        assert await touch_pods(cluster, times=1, seconds=0.001) == 301
        await asyncio.sleep(GATHER_MAX_S)
        after = operator.controller.metrics.registry.get_sample_value(*count)
        assert before is not None
        assert after is not None
        assert 1 <= after - before <= 2


@virtual_time
async def test_what_a_report_costs_is_gathered_for_as_well(
    monkeypatch: pytest.MonkeyPatch, cpu_clock: Any
) -> None:
    """The second look at a service, and its status, are half of what a reconcile computes."""
    reports = 0
    told = Reporter.report

    async def report(self: Reporter, *given: Any, **named: Any) -> None:
        nonlocal reports
        reports += 1
        cpu_clock.spent_s += 0.02
        await told(self, *given, **named)

    monkeypatch.setattr(Reporter, "report", report)
    async with settled(isvc_object(replicas=1)) as (cluster, _):
        reports = 0
        await touch_pods(cluster, times=100, seconds=0.01)
        assert 1 <= reports <= 1 + 1 / (0.02 * GATHER_FACTOR) + 1


class SlowNamespace(FakeKubernetes):
    """A webhook of one namespace does not answer: each change there is refused with 500 after its deadline."""

    async def apply(self, manifest: Object) -> Object:
        if manifest["metadata"]["namespace"] == "slow":
            await asyncio.sleep(10)
            raise ApiError("PATCH", 500, "failed calling webhook: context deadline exceeded")
        return await super().apply(manifest)


@virtual_time
async def test_services_whose_changes_take_long_hold_up_no_other_namespace() -> None:
    cluster = SlowNamespace()
    cluster.create(ROUTER_POD)
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        for number in range(100):
            cluster.create(isvc_object(f"slow-{number}", namespace="slow"))
        await asyncio.sleep(30)
        for number in range(77, 80):
            edit_engine(cluster, maxNumSeqs=number)
            await asyncio.sleep(2)
            assert f"'{number}'" in str(deployment(cluster)["spec"]["template"]["spec"]["containers"])


@virtual_time
async def test_a_service_that_cannot_be_read_stays_with_routers_as_it_was() -> None:
    cluster = new_cluster()

    def published() -> dict[str, tuple[str, ...]]:
        return {
            each.qualified_name: (each.model, *each.aliases)
            for each in decode_fleet(cluster.fleet()).services
        }

    async with Operator(cluster) as operator:
        cluster.create(isvc_object(model={"source": "builtin://tiny", "aliases": ["wanted"]}))
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec.update(replicas="many"))
        cluster.create(
            isvc_object("new", namespace="other", model={"source": "builtin://tiny", "servedName": "wanted"})
        )
        await operator.settle()
        assert cluster.condition("Ready")["reason"] == "InvalidSpec"
        assert num_routable(cluster) == 1
        assert published() == {"team/tiny": ("tiny", "wanted"), "other/new": ("other/new",)}
        operator.controller.count_services()
        reported = operator.controller.metrics.registry.get_sample_value(
            "argosy_operator_service_not_ready",
            {"service_namespace": "team", "service_name": "tiny", "reason": "InvalidSpec"},
        )
        assert reported == 1
    async with Operator(cluster) as operator:  # which never saw it as it was
        await operator.settle()
        assert published()["team/tiny"] == ("tiny", "wanted")
    cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
    cluster.create(isvc_object())
    cluster.edit("tiny", lambda spec: spec.update(replicas="many"))
    async with Operator(cluster) as operator:
        await operator.settle()
        assert "team/tiny" not in published(), "it is another one of this name"


@virtual_time
async def test_pods_that_tenants_label_as_routers_cost_no_look_at_all_pods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = new_cluster()

    def pod(namespace: str, name: str, component: str, version: int) -> Object:
        labels = {"app.kubernetes.io/name": "argosy", "app.kubernetes.io/component": component}
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": labels}
        return {**ROUTER_POD, "metadata": {**metadata, "resourceVersion": str(version)}}

    async with Operator(cluster) as operator:
        await operator.settle()
        looks, of_kind = 0, operator.controller.store.all

        def counted(kind: Kind) -> Iterator[Object]:
            nonlocal looks
            looks += kind is PODS
            return of_kind(kind)

        monkeypatch.setattr(operator.controller.store, "all", counted)
        for component in ("engine", "router"):
            for version in range(2000, 2100):
                operator.controller.handle(PODS, "MODIFIED", pod("team", component, component, version))
        assert looks == 0
        operator.controller.handle(PODS, "ADDED", pod("argosy-system", "router", "router", 2000))
        assert looks == 1, "one of the installation's own"


LABELLED = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {
        "name": "mine",
        "namespace": "team",
        "labels": {"app.kubernetes.io/managed-by": "argosy-operator", "inference.argosy.dev/service": "tiny"},
    },
    "spec": {},
}


async def touch(cluster: FakeKubernetes, key: tuple[Kind, str, str], *, times: int, seconds: float) -> None:
    """Change a label of an object, of which nothing follows."""
    for number in range(times):
        obj = copy.deepcopy(cluster.objects[key])
        obj["metadata"].setdefault("labels", {})["app.kubernetes.io/part-of"] = str(number)
        cluster.overwrite(key, obj)
        await asyncio.sleep(seconds)


@virtual_time
async def test_what_a_tenant_labels_repeats_no_write_that_failed() -> None:
    """A change of a Service, or of a service's own labels, is a tenant's as a pod is."""
    for key in ((SERVICES, "team", "mine"), (INFERENCE_SERVICES, "team", "tiny")):
        async with settled(isvc_object(replicas=1)) as (cluster, _):
            cluster.create(copy.deepcopy(LABELLED))
            cluster.is_refused = lambda obj: obj["kind"] == "Deployment"
            edit_engine(cluster, threads=2)
            await asyncio.sleep(100)
            cluster.writes.clear()
            await touch(cluster, key, times=80, seconds=0.05)
            assert sum(each[:2] == ("apply", "Deployment") for each in cluster.writes) <= 3
            cluster.is_refused = lambda obj: False
            edit_engine(cluster, threads=3)
            await asyncio.sleep(0.5)
            assert ("apply", "Deployment", "tiny-engine") in cluster.writes[-4:]
