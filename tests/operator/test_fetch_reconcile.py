"""Pods that fetch their model over time: what the operator writes about them, and how often."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from builders import isvc_object
from fake_kubernetes import FakeKubernetes, Object
from fetching import GIB, report, so_far
from harness import Operator, condition, deployment, edit_engine, is_ready, living_pods, new_cluster
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError
from argosy_operator.names import EVENTS, MODEL_CACHED_CONDITION
from argosy_resource.pod_fields import FETCH_CONTAINER

ADDRESS = "10.0.0.1"


def fetching_cluster() -> FakeKubernetes:
    """A cluster whose pods fetch their model, and have not ended."""

    def add_fetch(pod: Object) -> None:
        pod["spec"]["initContainers"] = [{"name": FETCH_CONTAINER}]

    cluster = new_cluster()
    cluster.admit_pod = add_fetch
    cluster.fetch_exit_code = None
    return cluster


def cached(pod: Object) -> tuple[str, str, str]:
    """Status, reason and message of the pod's condition; empty if it has none."""
    for each in pod["status"].get("conditions", ()):
        if each["type"] == MODEL_CACHED_CONDITION:
            return each["status"], each["reason"], each["message"]
    return "", "", ""


async def steps(cluster: FakeKubernetes, count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(1.0)
        cluster.step()


@virtual_time
async def test_a_fetch_from_its_start_to_a_routable_replica() -> None:
    cluster = fetching_cluster()
    async with Operator(cluster) as operator:
        operator.fetchers.reports[ADDRESS] = so_far(43, eta_seconds=70.0)
        cluster.create(isvc_object())
        await operator.settle()
        (pod,) = living_pods(cluster)
        assert cached(pod) == ("False", "Fetching", "43 % 12.0/28.0 GiB, eta 70 s")
        assert condition(cluster, "WorkloadReady") == ("False", "FetchingModel")
        told = cluster.condition("WorkloadReady")["message"]
        assert f"fetching the model: pod {pod['metadata']['name']}: 43 % 12.0/28.0 GiB" in told
        cluster.fetch_exit_code = 0
        await operator.settle()
        (pod,) = living_pods(cluster)
        assert cached(pod) == ("True", "Cached", "28.0 GiB fetched in 70 s")
        assert is_ready(cluster)
        operator.fetchers.asked.clear()
        cluster.writes.clear()
        await asyncio.sleep(1000)
        assert operator.fetchers.asked == [], "what has ended is not polled"
        assert cluster.writes == []


@virtual_time
async def test_a_moving_fetch_is_written_every_few_seconds_and_a_still_one_not_at_all() -> None:
    cluster = fetching_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(model={"source": "hf://Qwen/Qwen3-8B"}))
        await operator.settle()
        cluster.writes.clear()
        for second in range(100):
            operator.fetchers.reports[ADDRESS] = so_far(second, eta_seconds=100.0 - second)
            await asyncio.sleep(1.0)
        writes = cluster.writes.copy()
        await asyncio.sleep(10)
        cluster.writes.clear()
        await asyncio.sleep(1000)
        assert cluster.writes == []
    pods = [name for verb, kind, name in writes if (verb, kind) == ("patch-status", "Pod")]
    services = [name for verb, kind, name in writes if (verb, kind) == ("patch-status", "InferenceService")]
    assert 10 <= len(pods) <= 21
    assert len(services) <= len(pods)
    documents = [name for verb, kind, name in writes if kind == "ConfigMap"]
    assert 5 <= len(documents) <= 11, "the routers are told in steps of a tenth"
    assert len(writes) == len(pods) + len(services) + len(documents), "nothing else is written"


@virtual_time
async def test_another_operator_goes_on_where_the_first_one_ended() -> None:
    cluster = fetching_cluster()
    async with Operator(cluster) as operator:
        operator.fetchers.reports[ADDRESS] = so_far(10)
        cluster.create(isvc_object())
        await operator.settle()
    async with Operator(cluster) as operator:
        await operator.settle()
        (pod,) = living_pods(cluster)
        assert cached(pod)[2].startswith("10 %"), "the last report counts while there is no newer one"
        operator.fetchers.reports[ADDRESS] = so_far(20)
        await operator.settle()
        (pod,) = living_pods(cluster)
        assert cached(pod)[2].startswith("20 %")
    cluster.fetch_exit_code = 0
    await steps(cluster, 3)
    async with Operator(cluster) as operator:
        await operator.settle()
    (pod,) = living_pods(cluster)
    assert cached(pod)[:2] == ("True", "Cached")


@virtual_time
async def test_an_operator_that_was_down_for_long_reports_no_stall_before_it_has_asked() -> None:
    cluster = fetching_cluster()
    async with Operator(cluster) as operator:
        operator.fetchers.reports[ADDRESS] = so_far(10)
        cluster.create(isvc_object())
        await operator.settle()
    (pod,) = living_pods(cluster)
    for each in pod["status"]["conditions"]:
        if each["type"] == MODEL_CACHED_CONDITION:
            each["lastProbeTime"] = "2020-01-01T00:00:00Z"
    overdue = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    deployment(cluster)["status"]["conditions"] = [overdue]
    seen: list[tuple[str, str]] = []
    cluster.listeners.append(lambda kind, event, obj: seen.append(condition(cluster, "Stalled")))
    async with Operator(cluster) as operator:
        operator.fetchers.reports[ADDRESS] = so_far(20)
        await operator.settle()
        assert condition(cluster, "Progressing") == ("True", "FetchingModel")
        assert set(seen) == {("False", "AsExpected")}
    for each in living_pods(cluster)[0]["status"]["conditions"]:
        if each["type"] == MODEL_CACHED_CONDITION:
            each["lastProbeTime"] = "2020-01-01T00:00:00Z"
    async with Operator(cluster) as operator:
        operator.fetchers.reports[ADDRESS] = so_far(20)
        await operator.settle()
        assert condition(cluster, "Stalled") == ("True", "ProgressDeadlineExceeded"), (
            "nothing has arrived since"
        )


@virtual_time
async def test_a_lock_that_is_held_for_ever_is_told_once() -> None:
    cluster = fetching_cluster()
    note = "pod-7 (process 1) holds the lock of hf://Qwen/Qwen3-8B in the store, and has made no progress for 10 min"
    async with Operator(cluster) as operator:
        operator.fetchers.reports[ADDRESS] = report("waiting")
        cluster.create(isvc_object())
        await operator.settle()
        assert condition(cluster, "Stalled") == ("False", "AsExpected")
        operator.fetchers.reports[ADDRESS] = report("blocked", note=note)
        await operator.settle()
        assert cached(living_pods(cluster)[0]) == ("False", "StoreLocked", note)
        assert condition(cluster, "Stalled") == ("True", "ModelStoreLocked")
        assert note in cluster.condition("Stalled")["message"]
        cluster.writes.clear()
        await asyncio.sleep(3600)
        assert cluster.writes == []
        operator.fetchers.reports[ADDRESS] = so_far(5)
        await operator.settle()
        assert condition(cluster, "Stalled") == ("False", "AsExpected")
        assert condition(cluster, "WorkloadReady") == ("False", "FetchingModel")
    events = [obj for (kind, _, _), obj in cluster.objects.items() if kind is EVENTS]
    assert [each["count"] for each in events if each["reason"] == "ModelStoreLocked"] == [1]


@virtual_time
async def test_a_pod_that_does_not_report_is_served_like_any_other() -> None:
    cluster = fetching_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        assert cached(living_pods(cluster)[0]) == ("", "", "")
        assert condition(cluster, "WorkloadReady") == ("False", "FetchingModel")
        cluster.fetch_exit_code = 0
        await operator.settle()
    assert is_ready(cluster)


@virtual_time
async def test_a_failed_fetch_halts_the_rollout_and_a_working_one_goes_on() -> None:
    cluster = fetching_cluster()
    cluster.fetch_exit_code = 0
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        cluster.fetch_exit_code = 1
        operator.fetchers.reports[ADDRESS] = report("resolving")
        edit_engine(cluster, threads=3)
        for _ in range(40):
            await steps(cluster, 1)
            assert len(starting_pods(cluster)) <= 1
        assert condition(cluster, "Progressing") == ("False", "RolloutHalted")
        assert condition(cluster, "Degraded") == ("True", "ModelFetchFailed")
        assert "gave up" in cluster.condition("Degraded")["message"]
        assert deployment(cluster)["spec"]["paused"]
        (failing,) = starting_pods(cluster)
        assert cached(failing) == ("False", "FetchFailed", "gave up")
        reasons = set()
        for _ in range(20):
            await steps(cluster, 1)
            reasons.add(condition(cluster, "Progressing")[1])
        assert reasons == {"RolloutHalted"}, "attempts that fail at once do not make it alternate"
        cluster.fetch_exit_code = 0
        await operator.settle()
    assert is_ready(cluster)


def starting_pods(cluster: FakeKubernetes) -> list[Object]:
    return [
        pod
        for pod in living_pods(cluster)
        if {"type": "ContainersReady", "status": "True"} not in pod["status"]["conditions"]
    ]


@virtual_time
async def test_a_fetch_that_resumes_is_no_failure_any_more() -> None:
    cluster = fetching_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await steps(cluster, 3)
        cluster.fetch_exit_code = 1
        await steps(cluster, 1)
        cluster.fetch_exit_code = None
        await operator.settle()
        assert condition(cluster, "Degraded") == ("True", "ModelFetchFailed")
        operator.fetchers.reports[ADDRESS] = so_far(43)
        await operator.settle()
        assert condition(cluster, "Degraded") == ("False", "AsExpected")
        assert condition(cluster, "WorkloadReady") == ("False", "FetchingModel")


@pytest.mark.parametrize("status", [404, 409])
@virtual_time
async def test_a_pod_that_is_gone_meanwhile_fails_no_reconcile(status: int) -> None:
    cluster = fetching_cluster()
    patch_status = cluster.patch_status

    async def gone(kind: Any, namespace: str, name: str, patch: Object, *, strategic: bool) -> Object:
        if strategic:
            raise ApiError("PATCH", status, "gone")
        return await patch_status(kind, namespace, name, patch, strategic=strategic)

    cluster.patch_status = gone  # type: ignore[method-assign]
    async with Operator(cluster) as operator:
        operator.fetchers.reports[ADDRESS] = so_far(50, total=GIB)
        cluster.create(isvc_object())
        await operator.settle()
        failed = operator.controller.metrics.registry.get_sample_value(
            "argosy_operator_reconcile_seconds_count", {"outcome": "error"}
        )
    assert not failed
    assert condition(cluster, "WorkloadReady") == ("False", "FetchingModel")
