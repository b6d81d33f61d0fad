"""Services with spec.scaling, as the whole operator scales them."""

from __future__ import annotations

import asyncio
import copy
import datetime
from typing import Any

import msgspec
import pytest
from builders import isvc_object
from fake_kubernetes import FakeKubernetes
from harness import (
    ROUTER_POD,
    FakeRouter,
    Operator,
    condition,
    deployment,
    is_ready,
    living_pods,
    new_cluster,
)
from virtual_time import virtual_time

from argosy_operator.cluster.store import Store
from argosy_operator.names import EVENTS, INFERENCE_SERVICES, Name
from argosy_operator.observation import Scalers, ServiceLoad
from argosy_operator.reconcile.autoscaler import Autoscaler
from argosy_protocol.fleet import decode_fleet
from argosy_protocol.reports import LoadReport, RoutableReport

SCALING: dict[str, Any] = {"maxReplicas": 4, "metrics": {"concurrency": 10}}
ZERO = {**SCALING, "minReplicas": 0, "idleSeconds": 60}


def replicas(cluster: FakeKubernetes) -> int:
    number: int = deployment(cluster)["spec"]["replicas"]
    return number


def set_load(operator: Operator, *, sequences: int = 0, idle_s: float = 0.0) -> None:
    """What the router reports: sequences at each replica."""
    router = operator.router
    router.load = msgspec.structs.replace(router.load, held=0, queued=0, idle_s=idle_s)
    router.each = msgspec.structs.replace(router.each, requests=sequences)


@virtual_time
async def test_the_load_decides_and_the_spec_stays_the_users() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=SCALING, replicas=2))
        await operator.settle()
        assert replicas(cluster) == 2, "the number to start with"
        set_load(operator, sequences=16)
        await asyncio.sleep(20)
        await operator.settle()
        assert (replicas(cluster), len(living_pods(cluster))) == (4, 4)
        found = cluster.isvc()
        assert found["spec"]["replicas"] == 2
        status = found["status"]["scaling"]
        assert (status["wanted"], status["reason"]) == (4, "Concurrency")
        assert found["status"]["routable"] == "4/4"
        assert is_ready(cluster)


@virtual_time
async def test_a_scaled_service_at_rest_causes_no_write() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=SCALING))
        set_load(operator, sequences=8)
        await operator.settle()
        before = len(cluster.writes)
        for sequences in (7, 9, 10, 8):
            set_load(operator, sequences=sequences)
            await asyncio.sleep(120)
        assert cluster.writes[before:] == []
        assert operator.router.asked_for_load > 50


class PartlyReachable(FakeRouter):
    """Two routers, of which the operator reaches one."""

    unreachable = ""

    async def fetch(self, address: str, seen: int | None, epoch: str = "") -> RoutableReport:
        if address == self.unreachable:
            raise TimeoutError
        return await super().fetch(address, seen, epoch)

    async def fetch_load(self, address: str, seen: int | None) -> LoadReport:
        if address == self.unreachable:
            raise TimeoutError
        return await super().fetch_load(address, seen)


@virtual_time
async def test_a_router_that_cannot_be_reached_is_named_and_keeps_only_the_last_replica() -> None:
    cluster = new_cluster()
    second = copy.deepcopy(ROUTER_POD)
    second["metadata"]["name"], second["status"]["podIP"] = "argosy-router-1", "10.0.0.10"
    cluster.create(second)
    router = PartlyReachable(cluster)
    router.unreachable = "10.0.0.10"
    async with Operator(cluster, router) as operator:
        cluster.create(isvc_object(scaling=ZERO, replicas=4))
        cluster.create(isvc_object("fixed"))
        await operator.settle()
        set_load(operator, sequences=10)
        await asyncio.sleep(30)
        assert (replicas(cluster), condition(cluster, "Degraded")) == (4, ("False", "AsExpected"))
        set_load(operator, idle_s=9999.0)
        await asyncio.sleep(3600)
        await operator.settle()
        assert replicas(cluster) == 1
        assert condition(cluster, "Degraded") == ("True", "RouterUnreachable")
        assert "router argosy-router-1 runs" in cluster.condition("Degraded")["message"]
        assert condition(cluster, "Degraded", "fixed") == ("False", "AsExpected")
        registry = operator.controller.metrics.registry
        assert registry.get_sample_value("argosy_operator_unreachable_routers") == 1
        router.unreachable = ""
        await asyncio.sleep(3600)
        await operator.settle()
        assert replicas(cluster) == 0
        assert condition(cluster, "Degraded") == ("False", "AsExpected")


@virtual_time
async def test_without_scaling_no_router_is_asked_for_its_load() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        await asyncio.sleep(60)
        assert operator.router.asked_for_load == 0


def test_a_hold_has_only_its_own_service_evaluated() -> None:
    store = Store()
    for name in ("a", "b"):
        store.put(INFERENCE_SERVICES, isvc_object(name, scaling=ZERO))
    held = {f"team/{name}": ServiceLoad(held=1, queued=1) for name in ("a", "b")}
    changed: list[Name] = []
    autoscaler = Autoscaler(
        store,
        loads=lambda: held,
        scalers=lambda name: Scalers(),
        now=lambda: 0.0,
        wall=lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        on_change=changed.append,
    )
    autoscaler.evaluate_some({"team/a", "team/gone"})
    assert changed == [("team", "a")]
    assert not list(autoscaler.evaluate())
    assert changed == [("team", "a"), ("team", "b")]


@virtual_time
async def test_a_restarted_operator_changes_nothing() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=SCALING))
        set_load(operator, sequences=35)
        await asyncio.sleep(20)
        await operator.settle()
        assert replicas(cluster) == 4
    async with Operator(cluster) as operator:
        operator.router.set(reachable=False)
        await operator.settle()
        await asyncio.sleep(100)
        assert replicas(cluster) == 4, "no report"
        operator.router.set(reachable=True)
        set_load(operator, sequences=1)
        await asyncio.sleep(200)
        assert replicas(cluster) == 4, "the window is not covered yet"
        await asyncio.sleep(300)
        assert replicas(cluster) < 4


@virtual_time
async def test_a_service_without_requests_goes_to_zero_and_a_held_request_wakes_it() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=ZERO))
        await operator.settle()
        set_load(operator, idle_s=30.0)
        await asyncio.sleep(100)
        assert replicas(cluster) == 1
        set_load(operator, idle_s=90.0)
        await asyncio.sleep(20)
        await operator.settle()
        assert (replicas(cluster), len(living_pods(cluster))) == (0, 0)
        assert condition(cluster, "Ready") == ("True", "ScaledToZero")
        (service,) = decode_fleet(cluster.fleet()).services
        assert service.limits.hold_timeout_s == 600
        loop = asyncio.get_running_loop()
        started = asyncio.Event()
        cluster.listeners.append(lambda kind, event, obj: replicas(cluster) and started.set())
        operator.router.hold(1)
        began = loop.time()
        async with asyncio.timeout(30):
            await started.wait()
        assert loop.time() - began < 1.0, "within a second"
        await operator.settle()
        assert cluster.isvc()["status"]["scaling"]["reason"] == "Held"
        assert len(living_pods(cluster)) == 1


@virtual_time
async def test_an_edit_at_zero_is_not_ready_before_a_replica_has_shown_that_it_works() -> None:
    cluster = new_cluster()
    cluster.broken_images.add("broken:1")
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=ZERO))
        await operator.settle()
        set_load(operator, idle_s=90.0)
        await asyncio.sleep(100)
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ScaledToZero")
        cluster.edit("tiny", lambda spec: spec["engine"].update(image="broken:1"))
        await operator.settle()
        assert replicas(cluster) == 0
        assert condition(cluster, "Ready") == ("Unknown", "Untried")
        assert "the next request" in cluster.condition("Ready")["message"]
        assert condition(cluster, "Stalled") == ("False", "AsExpected")
        assert condition(cluster, "Progressing") == ("False", "Complete")
        cluster.edit("tiny", lambda spec: spec["engine"].pop("image"))
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ScaledToZero"), "this has served"
        cluster.edit("tiny", lambda spec: spec["engine"].update(image="broken:1"))
        await operator.settle()
        operator.router.hold(1)
        await operator.settle()
        assert condition(cluster, "Ready") == ("False", "ImagePullBackOff")
        cluster.edit("tiny", lambda spec: spec["engine"].update(image="good:1"))
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        set_load(operator, idle_s=90.0)
        await asyncio.sleep(100)
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ScaledToZero"), "it has served since"


@virtual_time
async def test_the_cold_start_is_learned_and_told_to_routers() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=ZERO))
        await operator.settle()
        learned = cluster.isvc()["status"]["scaling"]["coldStartSeconds"]
        assert learned > 0, "the pod was created in the fake cluster's past"
        (service,) = decode_fleet(cluster.fleet()).services
        assert service.cold_start_s == learned


@virtual_time
async def test_two_autoscalers_are_told_of() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=SCALING))
        await operator.settle()
        assert condition(cluster, "Degraded") == ("False", "AsExpected")
        key = (INFERENCE_SERVICES, "team", "tiny")
        for manager, expected in (
            ("kubectl-scale", ("False", "AsExpected")),
            ("other-autoscaler", ("True", "ScaledTwice")),
        ):
            changed = copy.deepcopy(cluster.isvc())
            entry = {"manager": manager, "operation": "Update", "subresource": "scale", "fieldsV1": {}}
            changed["metadata"]["managedFields"] = [entry]
            changed["spec"]["replicas"] += 1
            cluster.overwrite(key, changed)
            await operator.settle()
            assert condition(cluster, "Degraded") == expected
        assert "other-autoscaler" in cluster.condition("Degraded")["message"]
        assert replicas(cluster) == 1, "spec.scaling decides"


def scale(cluster: FakeKubernetes, number: int, time: str) -> None:
    """`kubectl scale isvc tiny --replicas=number`."""
    changed = copy.deepcopy(cluster.isvc())
    changed["spec"]["replicas"] = number
    entry = {
        "manager": "kubectl",
        "operation": "Update",
        "subresource": "scale",
        "time": time,
        "fieldsV1": {},
    }
    applied = {"manager": "kubectl", "operation": "Apply", "time": "2026-01-01T00:00:00Z", "fieldsV1": {}}
    status = {
        "manager": "argosy",
        "operation": "Update",
        "subresource": "status",
        "time": "2027-01-01T00:00:00Z",
    }
    changed["metadata"]["managedFields"] = [applied, entry, status]
    cluster.overwrite((INFERENCE_SERVICES, "team", "tiny"), changed)


def told_of_scales(cluster: FakeKubernetes) -> list[tuple[str, int]]:
    found = [obj for (kind, *_), obj in cluster.objects.items() if kind is EVENTS]
    return [(each["type"], each["count"]) for each in found if each["reason"] == "ScaleIgnored"]


@virtual_time
async def test_a_scale_that_changes_nothing_is_told_of_once() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=SCALING))
        await operator.settle()
        scale(cluster, 3, "2026-01-01T00:01:00Z")
        await operator.settle()
        assert told_of_scales(cluster) == [("Warning", 1)]
        (message,) = (
            obj["message"] for obj in cluster.objects.values() if obj.get("reason") == "ScaleIgnored"
        )
        assert message.startswith("spec.replicas is 3, which has no effect while spec.scaling is set")
        assert replicas(cluster) == 1
        before = len(cluster.writes)
        await asyncio.sleep(700)
        assert cluster.writes[before:] == []

        changed = copy.deepcopy(cluster.isvc())
        changed["spec"]["rollout"] = {"progressDeadlineSeconds": 900}
        changed["metadata"]["managedFields"][0]["time"] = "2026-01-01T00:02:00Z"
        cluster.overwrite((INFERENCE_SERVICES, "team", "tiny"), changed)
        await operator.settle()
        assert told_of_scales(cluster) == [("Warning", 1)], "another edit"
        scale(cluster, 1, "2026-01-01T00:03:00Z")
        await operator.settle()
        assert told_of_scales(cluster) == [("Warning", 1)], "as decided"
    async with Operator(cluster) as operator:
        await operator.settle()
        assert told_of_scales(cluster) == [("Warning", 1)], "a restarted operator"


@virtual_time
async def test_a_scale_without_scaling_is_obeyed_in_silence() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        scale(cluster, 3, "2026-01-01T00:01:00Z")
        await operator.settle()
        assert (replicas(cluster), told_of_scales(cluster)) == (3, [])


# which replica goes

COSTS = "controller.kubernetes.io/pod-deletion-cost"


def names(cluster: FakeKubernetes) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in living_pods(cluster))


@virtual_time
async def test_the_replicas_whose_caches_are_worth_least_go() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=4))
        await operator.settle()
        first, second, third, fourth = names(cluster)
        operator.router.cache_values = {first: 9.0, second: 0.5, third: 4.0, fourth: 1.0}
        before = len(cluster.writes)
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await operator.settle()
        assert names(cluster) == [first, third]
        patched = {name for verb, kind, name in cluster.writes[before:] if (verb, kind) == ("patch", "Pod")}
        assert patched == {second, fourth}, "only those that go are written"
        assert not any(COSTS in pod["metadata"]["annotations"] for pod in living_pods(cluster))


@virtual_time
async def test_without_routers_kubernetes_chooses() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=3))
        await operator.settle()
        operator.router.set(reachable=False)
        before = len(cluster.writes)
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await operator.settle()
        assert len(names(cluster)) == 2
        assert ("patch", "Pod") not in {write[:2] for write in cluster.writes[before:]}


@virtual_time
async def test_all_replicas_go_unmarked() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=3))
        await operator.settle()
        before = len(cluster.writes)
        cluster.edit("tiny", lambda spec: spec.update(replicas=0))
        await operator.settle()
        assert names(cluster) == []
        assert ("patch", "Pod") not in {write[:2] for write in cluster.writes[before:]}


def test_a_service_whose_figures_cannot_be_judged_holds_up_no_other_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store()
    for name in ("a", "b"):
        store.put(INFERENCE_SERVICES, isvc_object(name, scaling=ZERO))
    loads = {"team/a": ServiceLoad(queued=10**400), "team/b": ServiceLoad(held=1, queued=1)}
    changed: list[Name] = []
    autoscaler = Autoscaler(
        store,
        loads=lambda: loads,
        scalers=lambda name: Scalers(),
        now=lambda: 0.0,
        wall=lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        on_change=changed.append,
    )
    assert not list(autoscaler.evaluate())
    assert changed == [("team", "b")]
    assert "team/a: scaling failed" in caplog.text
    autoscaler.evaluate_some({"team/a", "team/b"})


@virtual_time
async def test_a_replica_that_lies_about_its_load_neither_ends_the_operator_nor_exceeds_the_bounds() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        metrics = {"kvCacheUtilization": 0.05, "queuedTokens": 1}
        cluster.create(isvc_object(scaling={"maxReplicas": 3, "metrics": metrics}))
        await operator.settle()
        for figures in ({"kv_usage": 1e308}, {"queued_tokens": 10**400}, {"requests": -(10**400)}):
            operator.router.each = msgspec.structs.replace(operator.router.each, **figures)
            await asyncio.sleep(30)
            await operator.settle()
            assert replicas(cluster) <= 3
        assert replicas(cluster) == 3
        cluster.edit("tiny", lambda spec: spec.update(scaling={"maxReplicas": 2, "metrics": metrics}))
        await operator.settle()
        assert replicas(cluster) == 2, "it is alive"
