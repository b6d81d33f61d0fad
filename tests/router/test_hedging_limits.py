"""Which requests are hedged and how many, and the settings that decide it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from argosy_protocol.fleet import FleetDocument, ServiceLimits
from argosy_router import flow_control
from argosy_router.config import ConfigError
from argosy_router.main import build_parser, config_of
from argosy_router.proxy import resilience

from .fake_engine import Connection, FakeEngine, Received, answer_normally
from .harness import Rig, StoppedClock, is_settled, rig, service
from .hedging_rig import (
    STREAM,
    Slow,
    asking,
    chat_hedged,
    die,
    hedged,
    is_whole,
    outcomes,
    overdue,
    sent,
    until_hedged,
)
from .resumable_stream import events, fold

# how often


async def test_a_slow_fleet_gets_few_hedges() -> None:
    slow = Slow()
    async with hedged(slow, slow) as r:
        tasks = [asyncio.create_task(r.chat(str(number), stream=True)) for number in range(60)]
        await r.until(lambda: sent(r) >= 60)
        await overdue(r)
        assert 61 <= sent(r) <= 60 * (1 + resilience.HEDGED_SHARE) + 1
        slow.go_on.set()
        assert all(is_whole(answer) for answer in await asyncio.gather(*tasks))
        assert is_settled(r)


async def test_credit_does_not_pile_up() -> None:
    slow = Slow()
    slow.go_on.set()
    async with hedged(slow, slow) as r:
        credit = r.router.requests.shared.dispatcher.hedging.credit
        for number in range(3):
            await r.chat(str(number), stream=True)
        (earning,) = credit
        assert credit[earning] == pytest.approx(1.0 + 3 * resilience.HEDGED_SHARE)
        credit[earning] = resilience.MAX_HEDGE_CREDIT
        await r.chat(stream=True)
        assert credit[earning] == resilience.MAX_HEDGE_CREDIT
        r.discovery.set(FleetDocument(services=(service(r.engines, name="other", uid="uid-2"),)))
        await r.until(lambda: all(replica.is_routable for replica in r.router.fleet.replicas()))
        await r.chat(stream=True)
        assert earning not in credit
        assert len(credit) == 1


NOT_HEDGED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("by default", {"hedge_after": 0.0}, {}),
    ("a unary answer", {}, {"stream": False}),
    ("a token expected late", {"hedge_after": 20.0}, {"content": "long " * 4000}),
]


@pytest.mark.parametrize(
    ("config", "fields"), [case[1:] for case in NOT_HEDGED], ids=[c[0] for c in NOT_HEDGED]
)
async def test_requests_that_are_not_hedged(config: dict[str, Any], fields: dict[str, Any]) -> None:
    slow = Slow()
    async with hedged(slow, slow, **config) as r:
        task = await asking(r, **fields)
        await overdue(r)
        assert sent(r) == 1
        slow.go_on.set()
        assert (await task).status_code == 200
        assert outcomes(r) == {}


async def test_an_answer_that_has_begun_is_not_hedged() -> None:
    go_on = asyncio.Event()

    async def pause(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(events(request)[0])
        await go_on.wait()
        for event in events(request)[1:]:
            connection.chunk(event)
        connection.end_stream()

    async with hedged(pause, pause) as r:
        task = asyncio.create_task(r.http.post("/v1/chat/completions", json=STREAM))
        await r.until(lambda: sent(r) >= 1)
        await overdue(r)
        go_on.set()
        assert fold((await task).content)["choices"][0]["finish"] == ["stop"]
        assert sent(r) == 1


async def occupied(r: Rig) -> Sequence[asyncio.Task[httpx.Response]]:
    """Both replicas have a unary request."""
    return [await asking(r, "busy", stream=False) for _ in range(2)]


async def test_a_service_without_room_is_not_hedged() -> None:
    slow = Slow()
    fields = {"limits": ServiceLimits(max_inflight_per_replica=2)}
    async with hedged(slow, slow, fields=fields) as r:
        tasks = [*await occupied(r), await asking(r), await asking(r)]
        await overdue(r)
        assert sent(r) == 4
        slow.go_on.set()
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*tasks))
        assert outcomes(r) == {}


async def test_engines_whose_batches_are_full_get_no_hedges() -> None:
    slow = Slow()
    engines = [FakeEngine(script=slow, hello={"max_num_seqs": 1}) for _ in range(2)]
    async with rig(engines, policy="round-robin", hedge_after=1.0, clock=StoppedClock()) as r:
        tasks = [await asking(r), await asking(r)]
        await overdue(r)
        assert sent(r) == 2
        slow.go_on.set()
        assert all(map(is_whole, await asyncio.gather(*tasks)))


async def test_queued_requests_take_precedence_over_hedges() -> None:
    slow = Slow()
    fields = {"limits": ServiceLimits(max_inflight_per_replica=1)}
    async with hedged(slow, slow, fields=fields) as r:
        tasks = [*await occupied(r), asyncio.create_task(r.chat("third"))]
        await r.until(lambda: r.metric('queued_requests{model="tiny"}') == 1)
        (served,) = r.router.fleet.services.values()
        more = service(r.engines, limits=ServiceLimits(max_inflight_per_replica=4))
        r.discovery.set(FleetDocument(services=(more,)))
        now = r.router.requests.now()
        assert served.candidates.free_sequences(now) > 0
        assert not r.router.flow_control.has_capacity(served, now)
        await r.pass_time(flow_control.TICK_S)
        await r.until(lambda: sent(r) >= 3)
        assert r.router.flow_control.has_capacity(served, now)
        slow.go_on.set()
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*tasks))


async def test_a_replica_with_capacity_gets_the_hedge() -> None:
    slow = Slow()
    fields = {"limits": ServiceLimits(max_inflight_per_replica=2)}
    async with hedged(slow, slow, fields=fields) as r:
        tasks = [*await occupied(r), await asking(r)]
        await overdue(r)
        assert sent(r) == 4
        slow.go_on.set()
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*tasks))
        assert is_settled(r)


@pytest.mark.parametrize("state", ["suspect", "ejected", "resting"])
async def test_an_unhealthy_replica_gets_no_hedge(state: str) -> None:
    slow = Slow()
    async with hedged(slow, answer_normally) as r:
        task = await asking(r)
        health = r.replica(1).health
        if state == "suspect":
            health.silent(0.0, may_eject=False)
        elif state == "resting":
            health.cool_down(r.router.requests.now(), 60.0, until_capacity=False)
        else:
            health.failed(r.router.requests.now() + 3600.0, may_eject=True, refused=True)
        r.router.fleet.changed()
        await overdue(r)
        assert sent(r) == 1
        slow.go_on.set()
        assert is_whole(await task)


async def test_a_client_that_cannot_keep_up_gets_no_hedge() -> None:
    slow = Slow()
    async with hedged(slow, answer_normally) as r:
        task = await asking(r)
        (connection,) = (c for c in r.router.server.connections if c.listener is not None)
        assert connection.listener is not None
        connection.listener.on_client_paused()
        await overdue(r)
        assert sent(r) == 1
        connection.listener.on_client_resumed()
        slow.go_on.set()
        assert is_whole(await task)


async def test_a_single_replica_gets_no_hedge() -> None:
    slow = Slow()
    async with hedged(slow) as r:
        task = await asking(r)
        await overdue(r)
        slow.go_on.set()
        assert is_whole(await task)
        assert (sent(r), outcomes(r)) == (1, {})


async def test_a_request_is_hedged_once() -> None:
    both = Slow(die), Slow()
    async with hedged(*both, both[1]) as r:
        task = await asking(r)
        await until_hedged(r)
        await overdue(r)
        both[0].go_on.set()
        await r.until(lambda: outcomes(r) == {"promoted": 1})
        await overdue(r)
        assert sent(r) == 2
        both[1].go_on.set()
        assert is_whole(await task)


# settings


async def test_a_service_s_own_factor_wins() -> None:
    slow = Slow()
    async with hedged(slow, answer_normally, hedge_after=0.0, fields={"hedge_after": 2.0}) as r:
        assert (await chat_hedged(r)).headers["x-argosy-replica"] == "r1"
    slow, late = Slow(), {"hedge_after": 100.0}
    async with hedged(slow, answer_normally, fields=late) as r:
        task = await asking(r, "x" * 4000)
        await overdue(r)
        assert sent(r) == 1
        slow.go_on.set()
        assert is_whole(await task)


async def test_a_service_can_turn_hedging_off() -> None:
    slow = Slow()
    async with hedged(slow, answer_normally, fields={"hedge_after": 0.0}) as r:
        task = await asking(r)
        await overdue(r)
        assert sent(r) == 1
        slow.go_on.set()
        assert is_whole(await task)


@pytest.mark.parametrize("factor", ["0", "1", "1.5", "100"])
def test_accepted_factors(factor: str) -> None:
    flags = ["--replica", "http://a:1", "--hedge-after", factor]
    assert config_of(build_parser().parse_args(flags), {}).hedge_after == float(factor)


@pytest.mark.parametrize("factor", ["0.5", "101", "-1", "nan", "inf"])
def test_refused_factors(factor: str) -> None:
    flags = ["--replica", "http://a:1", f"--hedge-after={factor}"]
    with pytest.raises(ConfigError, match="--hedge-after"):
        config_of(build_parser().parse_args(flags), {})
