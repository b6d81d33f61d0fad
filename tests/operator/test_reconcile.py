"""The operator over time, against the fake cluster: it converges, rests, and survives faults."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from builders import isvc_object
from fake_kubernetes import FakeKubernetes, Object, is_pod_ready, pod_key
from harness import FakeRouter, Operator, new_cluster
from virtual_time import run, virtual_time

from argosy_operator.errors import ApiError
from argosy_operator.kinds import CONFIGMAPS, DEPLOYMENTS, INFERENCE_SERVICES, SECRETS, SERVICES
from argosy_operator.names import REVISION_LABEL
from argosy_protocol.fleet import Canary, decode_fleet

RESYNC = "argosy_operator_last_resync_timestamp_seconds"


def deployment(cluster: FakeKubernetes, name: str = "tiny") -> Object:
    return cluster.objects[DEPLOYMENTS, "team", f"{name}-engine"]


def is_ready(cluster: FakeKubernetes, name: str = "tiny") -> bool:
    return cluster.condition("Ready", name).get("status") == "True"


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
    assert (service.key, service.model) == ("team/tiny", "tiny")


@virtual_time
async def test_rest_costs_no_writes() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2, resources={"cpu": "1000m", "memory": "1024Mi"}))
        await operator.settle()
        cluster.writes.clear()
        await asyncio.sleep(3600)
        assert operator.controller.metrics.registry.get_sample_value(RESYNC)
    assert cluster.writes == []
    async with Operator(cluster):
        await asyncio.sleep(3600)
    assert cluster.writes == [], "a restarted operator has nothing to write either"


@virtual_time
async def test_scale_touches_nothing_but_the_deployment() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
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
    assert cluster.condition("Ready")["reason"] == "ScaledToZero"


@virtual_time
async def test_edit_rolls_without_a_routable_gap() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        before = {pod["metadata"]["labels"][REVISION_LABEL] for pod in cluster.pods()}
        lowest: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: lowest.append(_routable(cluster)))
        cluster.edit("tiny", lambda spec: spec["engine"].update(threads=2))
        await asyncio.sleep(0.1)
        assert not is_ready(cluster), "Ready ends with the edit, before the rollout"
        await operator.settle()
    after = {pod["metadata"]["labels"][REVISION_LABEL] for pod in cluster.pods()}
    assert before.isdisjoint(after)
    assert min(lowest) >= 2
    assert is_ready(cluster)
    assert cluster.isvc()["status"]["observedGeneration"] == 2


def _routable(cluster: FakeKubernetes) -> int:
    return sum(is_pod_ready(pod) and not pod["metadata"].get("deletionTimestamp") for pod in cluster.pods())


@virtual_time
async def test_rapid_edits_and_a_revert_keep_what_serves() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        lowest: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: lowest.append(_routable(cluster)))
        for threads in (2, 3, 4, 5):
            cluster.edit("tiny", lambda spec, threads=threads: spec["engine"].update(threads=threads))
            await asyncio.sleep(0.5)
            cluster.step()
        cluster.edit("tiny", lambda spec: spec["engine"].pop("threads"))
        await operator.settle()
    assert min(lowest) >= 2
    assert is_ready(cluster)
    assert len(cluster.pods()) == 2


@virtual_time
async def test_delete_leaves_nothing() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
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
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
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
        lambda: cluster.edit("tiny", lambda spec: spec["engine"].update(threads=2)),
        lambda: cluster.create(isvc_object("other", replicas=1)),
    ]
    changes[step]()


LIFE = range(4)
SURGE = {"maxSurge": 1, "maxUnavailable": 0}


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


async def undisturbed() -> tuple[FakeKubernetes, int]:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        for step in LIFE:
            life(step, cluster)
            await operator.settle()
    return cluster, len(cluster.writes)


def test_killed_at_every_write_it_converges_to_the_same_state() -> None:
    """A new process takes over after each possible intermediate state (Sieve's first fault pattern)."""
    reference, writes = run(undisturbed())
    expected = end_state(reference)
    assert writes > 20

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

    for fatal in range(1, writes + 1):
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
async def test_what_will_not_go_away_by_itself_is_in_the_status() -> None:
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


@pytest.mark.parametrize("kind", [SERVICES, DEPLOYMENTS], ids=lambda kind: kind.name)
@virtual_time
async def test_somebody_elses_object_is_not_taken_over(kind: Any) -> None:
    cluster = new_cluster()
    foreign = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {"name": "tiny-engine", "namespace": "team"},
        "spec": {
            "replicas": 0,
            "template": {},
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        },
    }
    cluster.create(foreign)
    async with Operator(cluster):
        cluster.create(isvc_object())
        await asyncio.sleep(5)
        assert cluster.condition("Ready")["reason"] == "ChildNotOwned"
        assert cluster.objects[kind, "team", "tiny-engine"]["spec"] == foreign["spec"]
        cluster.remove((kind, "team", "tiny-engine"))
        await asyncio.sleep(120)
    assert cluster.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize("kind", [SERVICES, DEPLOYMENTS, CONFIGMAPS], ids=lambda kind: kind.name)
@virtual_time
async def test_what_is_deleted_by_hand_comes_back(kind: Any) -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        key = next(key for key in cluster.objects if key[0] is kind)
        cluster.remove(key)
        await asyncio.sleep(400 if kind is CONFIGMAPS else 1)  # the fleet document is not watched
        await operator.settle()
    assert key in cluster.objects
    assert is_ready(cluster)


@virtual_time
async def test_a_key_secret_that_is_gone_comes_back_when_a_pod_misses_it() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        key = (SECRETS, "team", "tiny-engine-key")
        cluster.remove(key)
        (pod,) = cluster.pods()
        waiting = {
            "reason": "CreateContainerConfigError",
            "message": 'secret "tiny-engine-key" not found',
        }
        changed = {
            **pod,
            "status": {"containerStatuses": [{"name": "engine", "state": {"waiting": waiting}}]},
        }
        cluster.overwrite(pod_key(pod), changed)
        await asyncio.sleep(1)
    assert key in cluster.objects


@virtual_time
async def test_drift_is_undone_once() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        cluster.writes.clear()
        changed = {**deployment(cluster), "spec": {**deployment(cluster)["spec"], "replicas": 7}}
        cluster.overwrite((DEPLOYMENTS, "team", "tiny-engine"), changed)
        await operator.settle()
    assert deployment(cluster)["spec"]["replicas"] == 1
    assert [write for write in cluster.writes if write[:2] == ("apply", "Deployment")] == [
        ("apply", "Deployment", "tiny-engine")
    ]


@virtual_time
async def test_a_mutating_webhook_is_not_fought() -> None:
    cluster = new_cluster()

    async def mutated(manifest: Object) -> Object:
        if manifest["kind"] == "Deployment":
            template = manifest["spec"]["template"]
            sidecar = {"name": "mesh", "image": "mesh"}
            pod = {**template["spec"], "containers": [*template["spec"]["containers"], sidecar]}
            manifest = {**manifest, "spec": {**manifest["spec"], "template": {**template, "spec": pod}}}
        return await FakeKubernetes.apply(cluster, manifest)

    cluster.apply = mutated  # type: ignore[method-assign]
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        cluster.writes.clear()
        await asyncio.sleep(3600)
        assert cluster.writes == []
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await operator.settle()
    assert deployment(cluster)["spec"]["replicas"] == 2


@virtual_time
async def test_no_gpu_for_a_surge_replaces_in_place_and_goes_back() -> None:
    cluster = new_cluster(gpus=2)
    reasons: list[str] = []
    surges: list[int] = []

    def note(kind: Any, event: str, obj: Object) -> None:
        if kind is INFERENCE_SERVICES:
            reasons.append(cluster.condition("Progressing").get("reason", ""))
        if kind is DEPLOYMENTS:
            surges.append(obj["spec"]["strategy"]["rollingUpdate"]["maxSurge"])

    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2, resources={"gpu": {}}))
        await operator.settle()
        assert is_ready(cluster)
        cluster.listeners.append(note)
        cluster.edit("tiny", lambda spec: spec["engine"].update(threads=2))
        await operator.settle()
    assert "NoGPUForSurge" in reasons
    assert reasons[-1] == "Complete"
    assert [surge for surge, _ in itertools.groupby(surges)] == [1, 0, 1], "it must not flap"
    assert is_ready(cluster)
    assert len(cluster.pods()) == 2


@virtual_time
async def test_one_spare_gpu_is_enough_for_a_rollout_without_a_gap() -> None:
    """The GPU of a replica that terminates is not free yet; that is no reason to give up the surge."""
    cluster = new_cluster(gpus=4)
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=3, resources={"gpu": {}}))
        await operator.settle()
        lowest: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: lowest.append(_routable(cluster)))
        cluster.edit("tiny", lambda spec: spec["engine"].update(threads=2))
        await operator.settle()
    assert min(lowest) >= 3
    assert is_ready(cluster)


@virtual_time
async def test_a_broken_change_keeps_the_old_replicas() -> None:
    cluster = new_cluster()
    cluster.broken_images.add("broken:1")
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec["engine"].update(image="broken:1"))
        await operator.settle()
        ready = cluster.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "ImagePullBackOff")
        assert cluster.condition("Routable")["status"] == "True"
        assert _routable(cluster) == 2
        cluster.edit("tiny", lambda spec: spec["engine"].pop("image"))
        await operator.settle()
    assert is_ready(cluster)
    assert cluster.condition("Degraded")["status"] == "False"


@virtual_time
async def test_on_a_dead_node_nothing_is_ready() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        assert is_ready(cluster)
        cluster.is_node_dead = True
        await operator.settle()
        for kind in ("Ready", "Routable", "WorkloadReady"):
            assert cluster.condition(kind)["status"] == "False", kind
        assert "node-a does not answer" in cluster.condition("Ready")["message"]
        assert cluster.isvc()["status"]["routable"] == "0/2"


@virtual_time
async def test_the_older_service_keeps_a_contested_name() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object("first", model={"source": "builtin://tiny", "servedName": "chat"}))
        late = isvc_object("second", model={"source": "builtin://tiny", "servedName": "chat"})
        late["metadata"]["creationTimestamp"] = "2025-06-01T00:00:00Z"
        cluster.create(late)
        await operator.settle()
        assert is_ready(cluster, "first")
        conflict = cluster.condition("Ready", "second")
        assert (conflict["status"], conflict["reason"]) == ("False", "NameConflict")
        assert "team/first" in conflict["message"]
        cluster.remove((INFERENCE_SERVICES, "team", "first"))
        await operator.settle()
    assert is_ready(cluster, "second")


@virtual_time
async def test_a_service_and_its_canary_may_serve_the_same_name() -> None:
    cluster = new_cluster()
    model = {"source": "builtin://tiny", "servedName": "chat"}
    canary = {"service": "next", "weight": 10}
    async with Operator(cluster) as operator:
        cluster.create(isvc_object("next", model=model))
        late = isvc_object("stable", model=model)
        late["metadata"]["creationTimestamp"] = "2025-06-01T00:00:00Z"
        cluster.create(late)
        await operator.settle()
        assert cluster.condition("Ready", "stable")["reason"] == "NameConflict"
        cluster.edit("stable", lambda spec: spec.update(router={"canary": canary}))
        await operator.settle()
        assert is_ready(cluster, "stable")
        assert is_ready(cluster, "next")
        cluster.edit("stable", lambda spec: spec.pop("router"))
        await operator.settle()
        assert cluster.condition("Ready", "stable")["reason"] == "NameConflict"


@virtual_time
async def test_a_canary_may_come_and_go() -> None:
    cluster = new_cluster()
    canary = {"service": "next", "weight": 10}

    def degraded() -> str:
        reason: str = cluster.condition("Degraded", "stable")["reason"]
        return reason

    async with Operator(cluster) as operator:
        cluster.create(isvc_object("stable", router={"canary": canary}))
        await operator.settle()
        assert is_ready(cluster, "stable")
        assert degraded() == "CanaryNotFound"
        before = deployment(cluster, "stable")["metadata"]["generation"]
        cluster.create(isvc_object("next"))
        await operator.settle()
        assert degraded() == "AsExpected"
        published = decode_fleet(cluster.fleet()).services
        entry = next(each for each in published if each.name == "stable")
        assert entry.canary == Canary(service="next", weight=10)
        cluster.remove((INFERENCE_SERVICES, "team", "next"))
        await operator.settle()
        assert degraded() == "CanaryNotFound"
        assert deployment(cluster, "stable")["metadata"]["generation"] == before, "no pod is touched"


@virtual_time
async def test_paused_reports_and_writes_nothing_else() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
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
async def test_gate_waits_for_a_router_that_lives() -> None:
    cluster = new_cluster()
    router = FakeRouter(cluster)
    router.set(synced=False)
    async with Operator(cluster, router) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        assert cluster.condition("Ready")["reason"] == "WaitingForRouter"
        router.set()
        await operator.settle()
        assert is_ready(cluster)
        router.set(synced=False)
        await operator.settle()
    assert _routable(cluster) == 1, "a router that loses a replica does not close the gate"


@virtual_time
async def test_gate_opens_when_no_router_lives_and_status_says_so() -> None:
    cluster = new_cluster(router=False)
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        await asyncio.sleep(30)
        await operator.settle()
        assert _routable(cluster) == 1
        assert cluster.condition("Ready")["reason"] == "NoRouter"
    async with Operator(cluster, router_url="") as operator:
        await asyncio.sleep(30)
        await operator.settle()
    assert is_ready(cluster), "where no router is expected, none is missed"


@virtual_time
async def test_router_that_stops_answering_does_not_lock_the_fleet() -> None:
    cluster = new_cluster()
    router = FakeRouter(cluster)
    async with Operator(cluster, router) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        router.set(reachable=False)
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await asyncio.sleep(60)
        await operator.settle()
    assert _routable(cluster) == 2


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
