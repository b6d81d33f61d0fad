"""Flow control counts sequences: a call of many choices, prompts or beams takes as much capacity, and frees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from argosy_protocol.errors import ApiError
from argosy_protocol.fleet import ServiceLimits
from argosy_protocol.telemetry import Load
from argosy_router.auth.accounts import Account
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.fair_queue import QueuedRequest
from argosy_router.flow_control import HOLD_BACK_S, Bounds, ServiceQueue
from argosy_router.prefixes import MODEL_ITSELF

from .fake_engine import MODEL, Connection, FakeEngine, Received, answer_normally
from .harness import Rig, raw, rig
from .raw_requests import request_bytes

SEQS = 4
SEATS = 6
"""Of a fake engine with that batch, half of it again waiting in the engine."""
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CALLS: dict[str, tuple[str, dict[str, Any], int]] = {
    "choices": ("chat/completions", {**CHAT, "n": 5}, 5),
    "a batch": ("completions", {"prompt": ["a", "b", "c", "d", "e"]}, 5),
    "a batch with choices": ("completions", {"prompt": ["a", "b"], "n": 2}, 4),
    "the best of": ("completions", {"prompt": "a", "best_of": 5}, 5),
    "beams": ("completions", {"prompt": "a", "use_beam_search": True, "n": 5}, 5),
    "inputs": ("embeddings", {"input": ["a", "b", "c", "d", "e"]}, 5),
}


class Held:
    """A script that keeps each request until the test lets it go."""

    def __init__(self) -> None:
        self.asked = 0
        self._permits = asyncio.Semaphore(0)

    async def __call__(self, connection: Connection, request: Received) -> None:
        self.asked += 1
        await self._permits.acquire()
        await answer_normally(connection, request)

    def let(self, count: int = 1000) -> None:
        for _ in range(count):
            self._permits.release()


@contextlib.asynccontextmanager
async def fleet(count: int = 1, **fields: Any) -> AsyncIterator[tuple[Rig, Held]]:
    """Replicas with a batch of `SEQS` sequences each, which hold what they are sent."""
    held = Held()
    engines = [FakeEngine(script=held, hello={"max_num_seqs": SEQS}) for _ in range(count)]
    async with rig(engines, fields=fields, policy="least-load") as r:
        yield r, held
        held.let()
        await r.until(lambda: r.metric(f'admitted_requests{{model="{MODEL}"}}') == 0)


def queued(r: Rig) -> float:
    return r.metric(f'queued_requests{{model="{MODEL}"}}')


async def ask(r: Rig, path: str, body: dict[str, Any]) -> int:
    return (await r.http.post(f"/v1/{path}", json={"model": MODEL, **body})).status_code


def asking(r: Rig, n: int = 1) -> asyncio.Task[int]:
    return asyncio.create_task(ask(r, "chat/completions", {**CHAT, "n": n}))


def room(r: Rig) -> int:
    (service,) = r.router.fleet.services.values()
    return service.candidates.free_sequences(r.router.requests.now())


@pytest.mark.parametrize("kind", CALLS)
async def test_each_sequence_counts(kind: str) -> None:
    path, body, sequences = CALLS[kind]
    async with fleet() as (r, held):
        tasks = [asyncio.create_task(ask(r, path, body))]
        await r.until(lambda: held.asked == 1)
        assert room(r) == SEATS - sequences
        for count in range(SEATS - sequences):
            tasks.append(asking(r))
            await r.until(lambda count=count: held.asked == count + 2)
        tasks += [asking(r) for _ in range(3)]
        await r.until(lambda: queued(r) == 3)
        assert held.asked == 1 + SEATS - sequences
        held.let()
        assert await asyncio.gather(*tasks) == [200] * len(tasks)
        assert room(r) == SEATS


@pytest.mark.parametrize("fields", [{}, {"limits": ServiceLimits(max_inflight_per_replica=SEATS)}])
async def test_a_call_larger_than_a_replica_is_sent_alone(fields: dict[str, Any]) -> None:
    async with fleet(**fields) as (r, held):
        small = asking(r)
        await r.until(lambda: held.asked == 1)
        large = asking(r, 100)
        await r.until(lambda: queued(r) == 1)
        late = asking(r)
        await r.until(lambda: queued(r) == 2)
        held.let(1)
        await small
        await r.until(lambda: held.asked == 2)
        assert queued(r) == 1, "nobody shares a replica with it"
        held.let()
        assert (await large, await late) == (200, 200)


async def test_a_call_that_overfills_one_replica_leaves_the_batches_of_the_others() -> None:
    async with fleet(2) as (r, held):
        tasks = [asking(r, 100)]
        await r.until(lambda: held.asked == 1)
        assert room(r) == SEQS
        tasks += [asking(r) for _ in range(SEQS)]
        await r.until(lambda: held.asked == 1 + SEQS)
        assert sorted(len(engine.requests) for engine in r.engines) == [1, SEQS]
        held.let()
        assert await asyncio.gather(*tasks) == [200] * len(tasks)
        assert room(r) == 2 * SEATS


async def test_a_limit_per_replica_is_kept_where_one_has_room_for_the_whole_call() -> None:
    limits = ServiceLimits(max_inflight_per_replica=4)
    async with fleet(2, limits=limits) as (r, held):
        tasks = [asking(r, 2)]
        await r.until(lambda: held.asked == 1)
        tasks.append(asking(r, 3))
        await r.until(lambda: held.asked == 2)
        assert [len(engine.requests) for engine in r.engines] == [1, 1]
        tasks.append(asking(r, 3))
        await r.until(lambda: queued(r) == 1)
        held.let()
        assert await asyncio.gather(*tasks) == [200] * 3


async def test_reported_sequences_are_not_counted_twice() -> None:
    async with fleet() as (r, held):
        task = asking(r, 5)
        await r.until(lambda: held.asked == 1)
        heard = r.replica(0).heard_at
        r.engines[0].announce(Load(core_step_age_s=0.0, num_running=SEQS, num_waiting=1))
        await r.until(lambda: r.replica(0).heard_at != heard)
        assert room(r) == SEATS - 5
        held.let()
        await task
        assert room(r) == SEATS, "its end takes off what the report had of it"


async def test_a_client_that_leaves_gives_all_its_seats_back() -> None:
    async with fleet() as (r, held):
        async with raw(r.router) as (_, writer):
            writer.write(request_bytes(n=5))
            await r.until(lambda: held.asked == 1)
            assert room(r) == 1
        await r.until(lambda: room(r) == SEATS)


@contextlib.asynccontextmanager
async def fleet_with_keys(tmp_path: Path) -> AsyncIterator[tuple[Rig, Held]]:
    """A replica that holds what it is sent, for the keys `sk-large` and `sk-small`."""
    keys = tmp_path / "keys"
    keys.write_text("sk-large name=large\nsk-small name=small\n")
    held = Held()
    engine = FakeEngine(script=held, hello={"max_num_seqs": SEQS})
    async with rig([engine], policy="least-load", api_keys_file=keys) as r:
        yield r, held
        held.let()
        await r.until(lambda: r.metric(f'admitted_requests{{model="{MODEL}"}}') == 0)


def asking_as(r: Rig, key: str, n: int = 1) -> asyncio.Task[httpx.Response]:
    headers = {"authorization": f"Bearer sk-{key}"}
    body = {"model": MODEL, **CHAT, "n": n}
    return asyncio.create_task(r.http.post("/v1/chat/completions", json=body, headers=headers))


SHARE = SEATS - SEQS // 2
"""Seats of a key beside other keys' calls that fill the replica."""


async def test_large_calls_leave_capacity_to_other_keys(tmp_path: Path) -> None:
    async with fleet_with_keys(tmp_path) as (r, held):
        tasks = [asking_as(r, "large", 100)]
        await r.until(lambda: held.asked == 1)
        tasks.append(asking_as(r, "large"))
        await r.until(lambda: queued(r) == 1)
        tasks.append(asking_as(r, "small", 2))
        await r.until(lambda: held.asked == 2)
        for count in range(SHARE - 2):
            tasks.append(asking_as(r, "small"))
            await r.until(lambda count=count: held.asked == count + 3)
        tasks.append(asking_as(r, "small"))
        await r.until(lambda: queued(r) == 2)
        assert held.asked == SHARE, "no more than that"
        held.let()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        assert r.replica(0).load.yielding == 0


async def test_large_calls_of_other_routers_leave_capacity_too(tmp_path: Path) -> None:
    async with fleet_with_keys(tmp_path) as (r, held):
        heard = r.replica(0).heard_at
        r.engines[0].announce(Load(core_step_age_s=0.0, num_running=SEQS, num_waiting=96, num_yielding=100))
        await r.until(lambda: r.replica(0).heard_at != heard)
        tasks = []
        for count in range(SHARE):
            tasks.append(asking_as(r, "small"))
            await r.until(lambda count=count: held.asked == count + 1)
        tasks.append(asking_as(r, "small"))
        await r.until(lambda: queued(r) == 1)
        heard = r.replica(0).heard_at
        r.engines[0].announce(Load(core_step_age_s=0.0, num_running=SEQS, num_waiting=0))
        await r.until(lambda: r.replica(0).heard_at != heard and held.asked == SHARE + 1)
        held.let()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


# the queue of a service alone


class Replicas:
    """So many seats in all."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.taken = 0

    def room(self, now: float, name: str, account: Account | None = None) -> int:
        return self.seats - self.taken

    def takes(self, now: float, name: str, sequences: int, account: Account | None = None) -> bool:
        return self.taken + min(sequences, self.seats) <= self.seats


class Asked:
    """Takes its seats when it is admitted."""

    def __init__(
        self, replicas: Replicas, sequences: int, account: Account | None = None, cost: float = 1.0
    ) -> None:
        account = account or Account(KeyTerms(name="a"), 0.0)
        self.request = QueuedRequest(account, 0, cost, 1, MODEL_ITSELF, sequences, self.admit, self.refuse)
        self.told: list[str | ApiError] = []
        self._replicas = replicas

    def admit(self) -> None:
        self.told.append("admit")
        self._replicas.taken += self.request.sequences

    def refuse(self, error: ApiError) -> None:
        self.told.append(error)


def service_queue_with(
    replicas: Replicas, taken: int, *waiting: int, queue_s: float = 60.0
) -> tuple[ServiceQueue, list[Asked]]:
    """A queue with this many running requests of one sequence, and one queued request for each of `waiting`."""
    queue = ServiceQueue("tiny", replicas.room, lambda: Bounds(100, 1000, queue_s, 0.0), 0.0, replicas.takes)
    for _ in range(taken):
        assert queue.try_admit(0.0)
        replicas.taken += 1
    waiters = [Asked(replicas, sequences) for sequences in waiting]
    for waiter in waiters:
        assert not queue.try_admit(0.0, MODEL_ITSELF, waiter.request.sequences)
        queue.enqueue(waiter.request, 0.0)
    queue.tick(0.0)
    return queue, waiters


def one_ends(queue: ServiceQueue, replicas: Replicas, now: float) -> None:
    replicas.taken -= 1
    queue.ended(now)
    queue.tick(now)


def test_a_large_call_holds_back_those_behind_it_until_it_fits() -> None:
    replicas = Replicas(4)
    queue, (large, small) = service_queue_with(replicas, 3, 3, 1)
    one_ends(queue, replicas, 1.0)
    assert (large.told, small.told) == ([], []), "room for the small one, whose turn it is not"
    assert not queue.try_admit(1.0), "nor may a newcomer take it"
    one_ends(queue, replicas, 2.0)
    assert (large.told, small.told) == (["admit"], [])
    replicas.taken -= 3
    queue.ended(3.0, 3)
    queue.tick(3.0)
    assert small.told == ["admit"]
    assert (queue.active, queue.sequences) == (2, 2)


@pytest.mark.parametrize(("queue_s", "patience_s"), [(60.0, HOLD_BACK_S), (4.0, 2.0)])
def test_a_large_call_does_not_hold_back_others_for_ever(queue_s: float, patience_s: float) -> None:
    """The running requests may be other routers', which replace each one that ends."""
    replicas = Replicas(4)
    queue, (large, small) = service_queue_with(replicas, 3, 4, 1, queue_s=queue_s)
    queue.tick(patience_s - 0.1)
    assert (large.told, small.told) == ([], [])
    queue.tick(patience_s)
    assert (large.told, small.told) == (["admit"], []), "and now it is full"


def test_an_account_s_large_calls_hold_back_others_for_a_small_share_of_the_time() -> None:
    """Calls of a replica's whole capacity that take a moment, one after another, beside a key of small requests and
    another router's stream, which keeps the replica from being idle."""
    seats, step_s, total_s = 8, 0.1, 300.0
    replicas = Replicas(seats)
    replicas.taken = 1
    queue = ServiceQueue("tiny", replicas.room, lambda: Bounds(100, 1000, 60.0, 0.0), 0.0, replicas.takes)
    accounts = {name: Account(KeyTerms(name=name), 0.0) for name in ("large", "small")}
    asked: dict[Asked, float] = {}
    ends: dict[Asked, float] = {}
    waits: list[float] = []
    larges = 0

    def ask(name: str, now: float) -> None:
        request = Asked(
            replicas, seats if name == "large" else 1, accounts[name], 1.0 if name == "large" else 9.0
        )
        asked[request] = now
        if queue.try_admit(now, MODEL_ITSELF, request.request.sequences):
            request.admit()
        else:
            queue.enqueue(request.request, now)

    for name in ("large", "small", "small"):
        ask(name, 0.0)
    for step in range(int(total_s / step_s)):
        now = step * step_s
        for request, end in list(ends.items()):
            if end <= now:
                del ends[request]
                replicas.taken -= request.request.sequences
                queue.ended(now, request.request.sequences)
                ask("large" if request.request.sequences > 1 else "small", now)
        queue.tick(now)
        for request, since in list(asked.items()):
            if request.told == ["admit"]:
                del asked[request]
                ends[request] = now + (0.2 if request.request.sequences > 1 else 0.5)
                larges += request.request.sequences > 1
                if request.request.sequences == 1:
                    waits.append(now - since)
    assert len(waits) > 1000
    assert sum(wait > 1.0 for wait in waits) <= 2, "the small ones wait long once, each of two"
    assert larges > total_s / (HOLD_BACK_S + 2.0) - 1, "nor do the large ones starve"


def test_large_calls_of_many_accounts_hold_back_others_no_longer_than_those_of_one() -> None:
    """Each account sends one large call after another to replicas that other routers keep almost full."""
    replicas = Replicas(8)
    replicas.taken = 7
    queue = ServiceQueue("tiny", replicas.room, lambda: Bounds(100, 1000, 600.0, 0.0), 0.0, replicas.takes)
    larges, small = [Asked(replicas, 8) for _ in range(20)], Asked(replicas, 1)
    for each in (*larges, small):
        assert not queue.try_admit(0.0, MODEL_ITSELF, each.request.sequences)
        queue.enqueue(each.request, 0.0)
    held_steps, longest, num_large, num_small, step_s, steps = 0, 0, 0, 0, 0.1, 1200
    run = 0
    for step in range(1, steps + 1):
        now = step * step_s
        queue.tick(now)
        is_held_back = not small.told and replicas.taken < replicas.seats
        held_steps += is_held_back
        run = run + 1 if is_held_back else 0
        longest = max(longest, run)
        for each in [each for each in (*larges, small) if each.told]:
            replicas.taken -= each.request.sequences
            queue.ended(now, each.request.sequences)
            again = Asked(replicas, each.request.sequences, each.request.account)
            queue.enqueue(again.request, now)
            if each is small:
                small, num_small = again, num_small + 1
            else:
                larges[larges.index(each)] = again
                num_large += 1
    assert longest * step_s < HOLD_BACK_S + 0.5
    assert held_steps * step_s < HOLD_BACK_S + 0.15 * steps * step_s
    assert num_small > 20 < num_large, "all have their turns"


def test_a_large_call_that_leaves_delays_no_other() -> None:
    replicas = Replicas(4)
    queue, (large, small) = service_queue_with(replicas, 3, 4, 1)
    queue.remove(large.request, 0.1)
    queue.tick(0.1)
    assert (large.told, small.told) == ([], ["admit"])


def test_without_room_a_large_call_waits_however_long() -> None:
    replicas = Replicas(4)
    queue, (large,) = service_queue_with(replicas, 4, 2)
    queue.tick(59.0)
    assert large.told == []


def test_retracted_sequences_are_freed() -> None:
    replicas = Replicas(4)
    queue, _ = service_queue_with(replicas, 0)
    assert queue.try_admit(0.0, MODEL_ITSELF, 4)
    queue.retract(0.0, 4)
    assert (queue.active, queue.sequences) == (0, 0)
    assert queue.try_admit(0.0, MODEL_ITSELF, 4)
