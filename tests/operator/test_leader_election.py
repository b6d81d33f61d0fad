"""Several operators and one Lease: one writes, another takes over, and never do two write at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import pytest
from builders import CONFIG, isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import FakeFetchers, FakeRouter, Operator, is_ready, new_cluster
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError, ObjectList
from argosy_operator.names import LEASES, SERVICES, Kind
from argosy_operator.reconcile.controller import Controller
from argosy_operator.reconcile.leadership import (
    LEASE_DURATION,
    RENEW_DEADLINE,
    LeaderElection,
    Leadership,
    fenced,
)

NAME = "argosy-operator"
TAKEOVER = 20.0
"""Seconds within which another operator writes after the leader has died."""


class Connection:
    """The API server as one process reaches it: counts its writes, and may be cut."""

    def __init__(self, cluster: FakeKubernetes) -> None:
        self._cluster = cluster
        self.is_cut = False
        self.writes: list[str] = []
        """Kinds of the objects it wrote, its Lease left out."""

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._cluster, name)
        if name in ("list_pages", "watch"):
            return functools.partial(self._stream, call)

        async def checked(*args: Any, **options: Any) -> Any:
            if self.is_cut:
                raise ApiError(name, 0, "cut off")
            if name in ("create_only", "replace", "apply", "patch_status", "patch", "delete"):
                kind = args[0].name if isinstance(args[0], Kind) else args[0]["kind"]
                if kind != LEASES.name:
                    self.writes.append(kind)
            return await call(*args, **options)

        return checked

    async def _stream(self, call: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        if self.is_cut:
            raise ApiError("stream", 0, "cut off")
        async with contextlib.aclosing(call(*args, **options)) as stream:
            async for each in stream:
                yield each


class Candidate(Operator):
    """An operator that takes part in the election; leaving the context kills it."""

    def __init__(self, cluster: FakeKubernetes, identity: str) -> None:
        super().__init__(cluster)
        self.connection = Connection(cluster)
        self.leadership = Leadership()
        config = dataclasses.replace(CONFIG, lease=NAME, identity=identity)
        router = FakeRouter(cluster)
        self.controller = Controller(
            self.connection,
            config,
            fetch=router.fetch,
            fetch_load=router.fetch_load,
            ask_progress=FakeFetchers(),
            leadership=self.leadership,
        )
        self.election = LeaderElection(
            self.connection, self.leadership, namespace=config.namespace, name=NAME, identity=identity
        )
        self._electing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._electing = asyncio.create_task(self.election.run())
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_election()
        await super().__aexit__(kind, error, trace)

    def stop_election(self) -> None:
        assert self._electing is not None
        self._electing.cancel()


def lease(cluster: FakeKubernetes) -> Object:
    return cluster.objects[LEASES, CONFIG.namespace, NAME]["spec"]


async def until(cluster: FakeKubernetes, condition: Callable[[], bool], limit: float = 300.0) -> float:
    """Let the cluster act until the condition holds. Returns the seconds that took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    while not condition():
        assert loop.time() - started < limit, "the condition does not come to hold"
        await asyncio.sleep(0.25)
        cluster.step()
    return loop.time() - started


@virtual_time
async def test_one_writes_and_another_takes_over_when_it_dies() -> None:
    cluster = new_cluster()
    async with Candidate(cluster, "b") as second, Candidate(cluster, "a") as first:
        cluster.create(isvc_object())
        await until(cluster, lambda: is_ready(cluster))
        leader, standby = (first, second) if first.leadership.is_held else (second, first)
        assert leader.connection.writes
        assert standby.connection.writes == []
        assert standby.controller.unready_reason == ""
        assert not standby.controller.is_leading
        leader.stop_election()
        leader.connection.is_cut = True
        cluster.remove((SERVICES, "team", "tiny-engine"))
        took = await until(cluster, lambda: (SERVICES, "team", "tiny-engine") in cluster.objects)
        assert took < TAKEOVER
        assert "Service" in standby.connection.writes
        assert lease(cluster)["leaseTransitions"] == 1


@virtual_time
async def test_a_lease_that_was_given_up_is_taken_at_once() -> None:
    cluster = new_cluster()
    async with Candidate(cluster, "a") as first:
        await until(cluster, lambda: first.leadership.is_held)
        async with Candidate(cluster, "b") as second:
            await asyncio.sleep(LEASE_DURATION * 3)
            assert first.leadership.is_held
            assert not second.leadership.is_held, "renewals keep the others away"
            first.stop_election()
            await first.election.release()
            assert not first.leadership.is_held
            assert lease(cluster)["holderIdentity"] == ""
            assert await until(cluster, lambda: second.leadership.is_held) < 3


@virtual_time
async def test_a_container_that_follows_a_dead_one_in_its_pod_need_not_wait() -> None:
    cluster = new_cluster()
    async with Candidate(cluster, "pod-0") as died:
        await until(cluster, lambda: died.leadership.is_held)
    async with Candidate(cluster, "pod-0") as follows:
        assert await until(cluster, lambda: follows.leadership.is_held) < 1
    assert lease(cluster)["leaseTransitions"] == 0


@virtual_time
async def test_after_an_outage_of_the_api_server_the_only_operator_goes_on() -> None:
    cluster = new_cluster()
    async with Candidate(cluster, "a") as only:
        cluster.create(isvc_object())
        await until(cluster, lambda: is_ready(cluster))
        only.connection.is_cut = True
        await until(cluster, lambda: not only.leadership.is_held, RENEW_DEADLINE + 1)
        cluster.remove((SERVICES, "team", "tiny-engine"))
        await asyncio.sleep(60)
        only.connection.is_cut = False
        await until(cluster, lambda: (SERVICES, "team", "tiny-engine") in cluster.objects)


@virtual_time
async def test_a_lease_that_was_deleted_is_made_again() -> None:
    cluster = new_cluster()
    async with Candidate(cluster, "a") as only:
        await until(cluster, lambda: only.leadership.is_held)
        cluster.remove((LEASES, CONFIG.namespace, NAME))
        await asyncio.sleep(5)
        assert only.leadership.is_held
        assert lease(cluster)["holderIdentity"] == "a"


@pytest.mark.parametrize("seed", range(5))
@virtual_time
async def test_two_never_hold_the_lease_whatever_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    cluster = FakeKubernetes()
    connections = [Connection(cluster) for _ in range(3)]
    states = [Leadership() for _ in connections]
    tasks = [
        asyncio.create_task(LeaderElection(each, state, namespace="n", name=NAME, identity=str(number)).run())
        for number, (each, state) in enumerate(zip(connections, states, strict=True))
    ]
    leaders = set()
    for _ in range(2000):
        if chance.random() < 0.02:
            one = chance.choice(connections)
            one.is_cut = not one.is_cut
        await asyncio.sleep(chance.random())
        held = [number for number, state in enumerate(states) if state.is_held]
        assert len(held) <= 1
        leaders.update(held)
    assert len(leaders) > 1, "the lease has moved"
    for task in tasks:
        task.cancel()


@virtual_time
async def test_a_process_that_was_stopped_for_too_long_writes_nothing() -> None:
    """No task need have run since: each write looks at the clock."""
    cluster = FakeKubernetes()
    leadership = Leadership()
    api = fenced(cluster, leadership)
    made = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "n"}}
    leadership.extend(asyncio.get_running_loop().time() + 1.0)
    await api.apply(made)
    await asyncio.sleep(1.5)
    for write in (api.apply(made), api.create_only(made), api.replace(made)):
        with pytest.raises(ApiError, match="does not hold the lease"):
            await write
    with pytest.raises(ApiError, match="does not hold the lease"):
        await api.delete(SERVICES, "n", "s", uid="u")
    with pytest.raises(ApiError, match="does not hold the lease"):
        await api.patch_status(SERVICES, "n", "s", {}, strategic=True)
    assert len(cluster.writes) == 1
    found: ObjectList = await api.list(SERVICES, namespace="n")
    assert len(found.items) == 1


@virtual_time
async def test_a_write_that_hangs_is_given_up_before_another_takes_over() -> None:
    class Slow:
        def __init__(self) -> None:
            self.landed: list[float] = []

        def __getattr__(self, name: str) -> Any:
            async def answer_late(*_: Any, **__: Any) -> Object:
                await asyncio.sleep(LEASE_DURATION)
                self.landed.append(loop.time())
                return {}

            return answer_late

    loop = asyncio.get_running_loop()
    slow, leadership = Slow(), Leadership()
    api = fenced(slow, leadership)
    made = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "n"}}
    writes: list[Callable[[], Any]] = [
        lambda: api.apply(made),
        lambda: api.create_only(made),
        lambda: api.replace(made),
        lambda: api.patch(SERVICES, "n", "s", {}),
        lambda: api.patch_by_steps(SERVICES, "n", "s", []),
        lambda: api.patch_status(SERVICES, "n", "s", {}, strategic=True),
        lambda: api.delete(SERVICES, "n", "s", uid="u"),
    ]
    for write in writes:
        until = loop.time() + RENEW_DEADLINE
        leadership.extend(until)
        with pytest.raises(ApiError, match="lost the lease"):
            await write()
        assert loop.time() == until
    assert slow.landed == []


@pytest.mark.parametrize("is_renewed", [True, False])
@virtual_time
async def test_a_write_goes_on_while_the_lease_is_renewed(is_renewed: bool) -> None:
    class Slow(FakeKubernetes):
        async def apply(self, manifest: Object) -> Object:
            await asyncio.sleep(LEASE_DURATION)
            return await super().apply(manifest)

    cluster, leadership = Slow(), Leadership()
    loop = asyncio.get_running_loop()
    leadership.extend(loop.time() + RENEW_DEADLINE)
    made = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "n"}}
    writing = asyncio.create_task(fenced(cluster, leadership).apply(made))
    await asyncio.sleep(RENEW_DEADLINE / 2)
    if is_renewed:
        leadership.extend(loop.time() + RENEW_DEADLINE * 2)
        await writing
    else:
        leadership.drop()
        with pytest.raises(ApiError, match="lost the lease"):
            await writing
    assert len(cluster.writes) == is_renewed
