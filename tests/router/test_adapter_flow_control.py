"""Flow control of requests that only some replicas can answer, because of adapters or aliases."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from argosy_protocol.fleet import Endpoint, FleetDocument, ServiceLimits, encode_fleet
from argosy_router.auth.accounts import Account
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.config import FlowControlLimits
from argosy_router.discovery.sources import snapshot_of
from argosy_router.fair_queue import Entry, FairQueue
from argosy_router.fleet.fleet import FleetSnapshot
from argosy_router.fleet.replica import Member
from argosy_router.fleet.service import Service
from argosy_router.prefixes import MODEL_ITSELF, ServedName

from .fake_engine import MODEL, Connection, FakeEngine, Received, answer_normally
from .harness import Rig, rig, service

ONE_EACH = ServiceLimits(max_inflight_per_replica=1)
SQL = ServedName("sql")


class Held:
    """A script that keeps each request until the test lets it go."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._permits = asyncio.Semaphore(0)

    async def __call__(self, connection: Connection, request: Received) -> None:
        self.asked.append(request.json["messages"][0]["content"])
        await self._permits.acquire()
        await answer_normally(connection, request)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()


def snapshot(
    engines: list[FakeEngine], names: list[dict[str, tuple[str, ...]]], **fields: Any
) -> FleetSnapshot:
    """A service of which each replica has the adapters and aliases that `names` gives it."""
    adapters = tuple(sorted({name for given in names for name in given.get("adapters", ())}))
    aliases = tuple(sorted({name for given in names for name in given.get("aliases", ())}))
    spec = service(
        engines,
        endpoints=tuple(Endpoint(name=f"r{number}", url=engine.url) for number, engine in enumerate(engines)),
        adapters=adapters,
        aliases=aliases,
        **fields,
    )
    document = FleetDocument(services=(spec,))
    members = tuple(
        Member(f"r{number}", "", engine.url, **given)
        for number, (engine, given) in enumerate(zip(engines, names, strict=True))
    )
    return replace(snapshot_of(document, encode_fleet(document)), members={spec.qualified_name: members})


@contextlib.asynccontextmanager
async def partly(
    *names: dict[str, tuple[str, ...]], limits: FlowControlLimits | None = None, **fields: Any
) -> AsyncIterator[tuple[Rig, list[Held]]]:
    """A router over one engine for each of `names`, with one seat each unless `fields` says otherwise."""
    scripts = [Held() for _ in names]
    engines = [FakeEngine(script=script) for script in scripts]
    given = {"limits": ONE_EACH, **fields}
    async with rig(engines, fields=given, flow_control=limits or FlowControlLimits()) as r:
        r.router.fleet.apply(snapshot(engines, list(names), **given))
        yield r, scripts
        for script in scripts:
            script.let(1000)


def admitted(r: Rig) -> float:
    return r.metric(f'admitted_requests{{model="{MODEL}"}}')


def queued(r: Rig) -> float:
    return r.metric(f'queued_requests{{model="{MODEL}"}}')


NOTHING: dict[str, tuple[str, ...]] = {}
ADAPTER = {"adapters": ("sql",)}
ALIAS = {"aliases": ("small",)}


@pytest.mark.parametrize(("have", "name"), [(ADAPTER, "tiny:sql"), (ALIAS, "small")])
async def test_a_request_waits_for_the_replica_that_has_its_name(
    have: dict[str, tuple[str, ...]], name: str
) -> None:
    async with partly(NOTHING, have) as (r, (base, special)):
        first = asyncio.create_task(r.chat("first", model=name))
        await r.until(lambda: special.asked == ["first"])
        second = asyncio.create_task(r.chat("second", model=name))
        await r.until(lambda: queued(r) == 1)
        other = asyncio.create_task(r.chat("other"))
        await r.until(lambda: base.asked == ["other"])
        assert queued(r) == 1, "one that any replica can answer is not held up"
        base.let()
        assert (await other).status_code == 200
        assert special.asked == ["first"]
        special.let(2)
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        assert special.asked == ["first", "second"]
        await r.until(lambda: admitted(r) == 0 and queued(r) == 0)


@pytest.mark.parametrize(("have", "name"), [(ADAPTER, "tiny:sql"), (ALIAS, "small")])
async def test_waiting_for_a_name_ends_like_any_waiting(have: dict[str, tuple[str, ...]], name: str) -> None:
    limits = FlowControlLimits(queue_timeout_s=0.2)
    async with partly(NOTHING, have, limits=limits) as (r, (_, special)):
        first = asyncio.create_task(r.chat("first", model=name))
        await r.until(lambda: special.asked == ["first"])
        assert (await r.chat("second", model=name)).status_code == 429
        special.let()
        assert (await first).status_code == 200
        await r.until(lambda: admitted(r) == 0)


@pytest.mark.parametrize(("have", "name"), [(ADAPTER, "tiny:sql"), (ALIAS, "small")])
async def test_a_name_without_replicas_is_refused_while_others_wait(
    have: dict[str, tuple[str, ...]], name: str
) -> None:
    async with partly(NOTHING, have) as (r, (base, special)):
        busy = [asyncio.create_task(r.chat(f"q{number}")) for number in range(3)]
        await r.until(lambda: len(base.asked) == len(special.asked) == 1 and queued(r) == 1)
        waiting = asyncio.create_task(r.chat("special", model=name))
        await r.until(lambda: queued(r) == 2)
        r.replica(1).has_announced_drain = True
        r.router.fleet.changed()
        refused = await waiting
        assert refused.status_code == 503
        assert repr(name) in refused.json()["error"]["message"]
        assert queued(r) == 1, "the others wait on"
        base.let(10)
        special.let(10)
        assert [(await task).status_code for task in busy] == [200] * 3
        await r.until(lambda: admitted(r) == 0)


async def test_capacity_of_a_named_replica_goes_to_the_longest_waiting_request() -> None:
    async with partly(ADAPTER) as (r, (only,)):
        tasks: list[asyncio.Task[httpx.Response]] = []
        names = [MODEL, "tiny:sql", MODEL, "tiny:sql", "tiny:sql", MODEL]
        for number, name in enumerate(names):
            tasks.append(asyncio.create_task(r.chat(str(number), model=name)))
            await r.until(lambda: len(only.asked) == 1 and queued(r) == len(tasks) - 1)
        only.let(len(names))
        assert [(await task).status_code for task in tasks] == [200] * len(names)
        assert only.asked == ["0", "1", "2", "3", "4", "5"]
        await r.until(lambda: admitted(r) == 0)


async def test_a_replaced_service_is_dropped_once_its_requests_have_ended() -> None:
    async with partly(NOTHING, ADAPTER, uid="to-be-replaced") as (r, (_, special)):
        first = asyncio.create_task(r.chat("first", model="tiny:sql"))
        await r.until(lambda: special.asked == ["first"])
        more = [asyncio.create_task(r.chat(f"q{number}", model="tiny:sql")) for number in range(5)]
        await r.until(lambda: queued(r) == 5)
        special.let(10)
        for task in (first, *more):
            assert (await task).status_code == 200
        engines = list(r.engines)
        r.router.fleet.apply(snapshot(engines, [NOTHING, ADAPTER], uid="another", limits=ONE_EACH))
        await r.until(lambda: all(replica.is_routable for replica in r.router.fleet.replicas()))
        assert (await r.chat("after", model="tiny:sql")).status_code == 200

        def is_dropped() -> bool:  # without weak references: compiled classes have none
            gc.collect()
            # By type alone: isinstance may run code of the objects that it meets.
            services = [thing for thing in gc.get_objects() if type(thing) is Service]
            return not any(each.spec.uid == "to-be-replaced" for each in services)

        await r.until(is_dropped)


async def test_the_candidates_are_kept_while_a_replica_is_ejected() -> None:
    """Nothing about them changes before the ejection is over."""
    async with partly(NOTHING, ADAPTER, NOTHING, limits=None) as (r, _):
        served = r.router.fleet.services["default/svc"]
        now = r.router.requests.now()
        health = r.replica(0).health
        assert health.failed(now, refused=True, may_eject=True)
        r.router.fleet.changed()
        for name, members in ((MODEL_ITSELF, ["r1", "r2"]), (SQL, ["r1"])):
            kept = served.candidates.below_limit(now, (), name)
            assert [replica.name for replica in kept.replicas] == members
            assert served.candidates.below_limit(now + 0.5, (), name) is kept
        over = served.candidates.below_limit(now + 1.0)
        assert [replica.name for replica in over.replicas] == ["r0", "r1", "r2"], "half-open"
        if health.dispatched(now + 1.0):
            served.invalidate()
        assert [replica.name for replica in served.candidates.below_limit(now + 1.0).replicas] == ["r1", "r2"]


def test_an_account_that_was_passed_over_has_no_claim_on_the_past() -> None:
    blocked, served = Account(KeyTerms(name="blocked"), 0.0), Account(KeyTerms(name="served"), 0.0)
    queue: FairQueue[Entry] = FairQueue()
    for _ in range(40):
        queue.push(Entry(blocked, 0, 1.0, 1, SQL), 1000, 1000)
        queue.push(Entry(served, 0, 1.0, 1), 1000, 1000)
    for _ in range(20):
        entry = queue.pop_named([MODEL_ITSELF])
        assert entry is not None
        assert entry.account is served
    turns = [queue.pop().account.name for _ in range(20)]
    assert 9 <= turns.count("served") <= 11
    assert queue.pop_named([ServedName("other")]) is None
    assert len(queue) == 40


def test_priorities_hold_among_the_names_that_have_room() -> None:
    one = Account(KeyTerms(name="one"), 0.0)
    queue: FairQueue[Entry] = FairQueue()
    urgent, usual, late = (
        Entry(one, priority, 1.0, 1, name)
        for priority, name in ((-1, SQL), (0, MODEL_ITSELF), (5, MODEL_ITSELF))
    )
    for entry in (late, usual, urgent):
        queue.push(entry, 10, 10)
    assert [queue.pop_named([MODEL_ITSELF]), queue.pop_named([MODEL_ITSELF, SQL]), queue.pop()] == [
        usual,
        urgent,
        late,
    ]
