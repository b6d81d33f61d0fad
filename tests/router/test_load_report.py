"""The load report: what the operator scales by."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import (
    ADMIN_KEY_UID,
    LOAD_PATH,
    TTFT_BOUNDS_S,
    TTFT_WINDOW_S,
    LoadReport,
    ServiceLoadReport,
)
from argosy_router.config import FlowControlLimits
from argosy_router.fleet.replica import CACHE_VALUE_WINDOW_S, CacheValue, hit_value
from argosy_router.fleet.service import Demand

from .fake_engine import Connection, FakeEngine, Received, event
from .harness import Rig, chat, rig, service
from .queueing import ONE_AT_A_TIME, Turnstile, queued, send

FLEET_KEY = b"0123456789abcdef"
HOLDING = FlowControlLimits(hold_timeout_s=60.0)


async def report(r: Rig, after: int = -1, wait: float = 0) -> LoadReport:
    response = await r.http.get(
        f"{r.router.admin_url}{LOAD_PATH}?after={after}&wait={wait}",
        headers={"authorization": f"Bearer {internal_key(FLEET_KEY, ADMIN_KEY_UID)}"},
    )
    assert response.status_code == 200
    return msgspec.json.decode(response.content, type=LoadReport)


async def only_service(r: Rig) -> ServiceLoadReport:
    (found,) = (await report(r)).services
    return found


async def test_the_report_shows_what_runs_and_what_waits() -> None:
    turnstile = Turnstile()
    engines = [FakeEngine(script=turnstile, key=internal_key(FLEET_KEY, "uid-1"))]
    async with rig(engines, fields=ONE_AT_A_TIME, fleet_key=FLEET_KEY, admin_port=0) as r:
        idle = await only_service(r)
        assert (idle.service, idle.queued, idle.held) == ("default/svc", 0, 0)
        assert idle.idle_s >= 0
        uptime_s = (await report(r)).uptime_s
        assert uptime_s is not None
        while (
            (await report(r)).uptime_s or 0.0
        ) <= uptime_s:  # it grows, but two reports may be of one millisecond
            pass
        while (await only_service(r)).idle_s <= idle.idle_s:
            pass
        first = asyncio.create_task(r.chat("first"))
        await r.until(lambda: turnstile.order == ["first"])
        second = await send(r, "second", 1)
        busy = await only_service(r)
        assert (busy.queued, busy.held, busy.idle_s) == (1, 0, 0.0)
        assert busy.queued_tokens > 0
        (replica,) = busy.replicas
        assert (replica.name, replica.routable, replica.inflight) == ("r0", True, 1)
        assert replica.requests >= 1
        turnstile.let(2)
        await asyncio.gather(first, second)
        await r.until(lambda: queued(r) == 0)
        assert (await only_service(r)).queued_tokens == 0


async def test_a_held_request_ends_the_long_poll() -> None:
    async with rig([], flow_control=HOLDING, fleet_key=FLEET_KEY, admin_port=0) as r:
        first = await report(r)
        assert (await report(r, first.revision, 0.01)).revision == first.revision
        waiting = asyncio.create_task(report(r, first.revision, 30))
        held = await send(r, "held", 1)
        woken = await waiting
        assert woken.revision > first.revision
        assert [(each.held, each.idle_s) for each in woken.services] == [(1, 0.0)]
        another = await send(r, "another", 2)
        assert (await report(r)).revision == woken.revision, "the operator knows already"
        async with FakeEngine(key=internal_key(FLEET_KEY, "uid-1")) as engine:
            r.discovery.set(FleetDocument(services=(service([engine]),)))
            assert [each.status_code for each in await asyncio.gather(held, another)] == [200, 200]
            assert (await only_service(r)).held == 0


@pytest.mark.parametrize(("cold_start_s", "hint"), [(0.0, "1"), (45.0, "45"), (900.0, "60")])
async def test_clients_whose_hold_ended_are_told_how_long_a_start_takes(
    cold_start_s: float, hint: str
) -> None:
    limits = FlowControlLimits(hold_timeout_s=0.01)
    async with rig([], fields={"cold_start_s": cold_start_s}, flow_control=limits) as r:
        refused = await r.chat()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == hint


# times to first token


def bucket(seconds: float) -> int:
    return next(number for number, bound in enumerate((*TTFT_BOUNDS_S, float("inf"))) if seconds <= bound)


def test_times_to_first_token_leave_the_window() -> None:
    demand = Demand()
    assert demand.ttft_counts(1000.0) == ()
    for seconds in (0.04, 0.04, 500.0):
        demand.observe_ttft(seconds, 1000.0, 1000.0)
    counts = demand.ttft_counts(1000.0)
    assert (counts[bucket(0.04)], counts[-1], sum(counts)) == (2, 1, 3)
    demand.observe_ttft(0.04, 1030.0, 1030.0)
    assert sum(demand.ttft_counts(1030.0)) == 4
    assert sum(demand.ttft_counts(1000.0 + TTFT_WINDOW_S)) == 1
    assert demand.ttft_counts(1030.0 + TTFT_WINDOW_S) == ()


async def test_an_answer_counts_once_it_begins() -> None:
    may_end = asyncio.Event()

    async def pause_after_an_event(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("a"))
        await may_end.wait()
        connection.chunk(event("b", "stop") + b"data: [DONE]\n\n")
        connection.end_stream()

    engines = [FakeEngine(script=pause_after_an_event, key=internal_key(FLEET_KEY, "uid-1"))]
    async with rig(engines, fleet_key=FLEET_KEY, admin_port=0) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
            pieces = response.aiter_bytes()
            assert b'"a"' in await anext(pieces)
            assert sum((await only_service(r)).ttft_counts) == 1
            may_end.set()
            rest = b"".join([piece async for piece in pieces])
        assert rest.endswith(b"data: [DONE]\n\n")
        await r.until(lambda: r.router.requests.inflight == 0)
        assert sum((await only_service(r)).ttft_counts) == 1


def test_held_requests_say_nothing_of_the_load() -> None:
    demand = Demand()
    demand.held_until = 1000.0
    demand.observe_ttft(90.0, 910.0, 1000.0)
    assert demand.ttft_counts(1000.0) == ()
    demand.observe_ttft(0.1, 1000.5, 1000.6)
    assert sum(demand.ttft_counts(1001.0)) == 1


# the value of a cache


@pytest.mark.parametrize(
    ("hits", "position", "value"),
    [
        ({}, 0, 0),
        ({1: 500}, 0, 0),
        ({0: 500}, 0, 500),
        ({0: 500, 1: 500}, 0, 250),
        ({0: 4000, 1: 1000, 2: 1000, 3: 1000}, 0, 3250),
        ({0: 1000, 1: 4000}, 0, 500),
    ],
)
def test_a_hit_counts_for_what_no_other_replica_holds(
    hits: dict[int, int], position: int, value: float
) -> None:
    assert hit_value(hits, position) == value


def test_old_hits_lose_their_value() -> None:
    cache = CacheValue()
    cache.add(600.0, 0.0)
    assert cache.rate(0.0) == pytest.approx(600.0 / CACHE_VALUE_WINDOW_S)
    cache.add(600.0, 0.0)
    fresh = cache.rate(0.0)
    assert cache.rate(CACHE_VALUE_WINDOW_S) == pytest.approx(fresh / 2.718281828)
