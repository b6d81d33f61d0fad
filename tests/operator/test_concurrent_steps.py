"""Steps of one reconcile that run at the same time."""

from __future__ import annotations

import asyncio

import pytest
from builders import isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import ROUTER_POD, FakeRouter, Operator, is_ready
from virtual_time import virtual_time

from argosy_operator.names import PODS, Kind
from argosy_operator.reconcile.workqueue import REQUESTS_AT_ONCE, run_together


async def test_steps_run_at_the_same_time_and_results_keep_their_order() -> None:
    both = asyncio.Barrier(2)

    async def step(result: int) -> int:
        await both.wait()  # in a row, the first would wait for ever
        return result

    async with asyncio.timeout(30):
        assert await run_together([lambda: step(1), lambda: step(2)]) == [1, 2]


async def test_no_more_than_a_bound_run_at_once() -> None:
    running = most = 0

    async def step() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await run_together([step] * (3 * REQUESTS_AT_ONCE))
    assert (running, most) == (0, REQUESTS_AT_ONCE)


async def test_every_step_ends_before_the_first_failure_is_raised() -> None:
    failed, ended = asyncio.Event(), []

    async def fail() -> None:
        failed.set()
        raise ValueError("first")

    async def fail_later() -> None:
        await failed.wait()
        raise KeyError("second")

    async def end() -> None:
        await failed.wait()
        ended.append(True)

    with pytest.raises(ValueError, match="first"):
        await run_together([end, fail, fail_later])
    assert ended == [True]


async def test_a_cancellation_reaches_every_step() -> None:
    begun, cancelled = asyncio.Barrier(3), 0

    async def step() -> None:
        nonlocal cancelled
        try:
            await begun.wait()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise

    task = asyncio.create_task(run_together([step, step]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == 2


async def test_no_steps_have_no_results() -> None:
    assert await run_together([]) == []


class SlowCluster(FakeKubernetes):
    """Answers each patch of a pod's status a second late."""

    pending = most = 0

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, strategic: bool
    ) -> Object:
        if kind is PODS:
            self.pending += 1
            self.most = max(self.most, self.pending)
            await asyncio.sleep(1)
            self.pending -= 1
        return await super().patch_status(kind, namespace, name, patch, strategic=strategic)


@virtual_time
async def test_gates_of_a_service_open_together_and_its_secret_comes_before_its_deployment() -> None:
    cluster = SlowCluster()
    cluster.create(ROUTER_POD)
    async with Operator(cluster, FakeRouter(cluster)) as operator:
        cluster.create(isvc_object(replicas=4))
        await operator.settle()
    assert is_ready(cluster)
    assert cluster.most == 4, "one after another they would take four seconds"
    first = {kind: at for at, (_, kind, _) in reversed(list(enumerate(cluster.writes)))}
    assert first["Secret"] < first["Deployment"]
    assert max(first["Service"], first["PodDisruptionBudget"]) < first["Deployment"]
