"""Hedging: two attempts at one request, of which one answers, and what each path leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from argosy_protocol.fleet import FleetDocument, ServiceLimits
from argosy_router.config import ClientLimits, ConfigError
from argosy_router.http.deadlines import Deadline
from argosy_router.main import build_parser, config_of
from argosy_router.proxy.resilience import hedging
from argosy_router.proxy.upstream.attempt_log import AttemptRecord

from .fake_engine import Connection, FakeEngine, Received, Script, answer_normally
from .harness import Rig, chat, raw, read_all, rig, service
from .storyteller import Storyteller, events, fold
from .test_charges import is_settled
from .test_life import request_bytes

STREAM = {**chat(stream=True), "stream_options": {"include_usage": True}}


class Slow:
    """A replica that answers only when it is told to, and knows when its request is gone."""

    def __init__(self, then: Script = answer_normally) -> None:
        self.go_on = asyncio.Event()
        self.was_reset = asyncio.Event()
        self.then = then

    async def __call__(self, connection: Connection, request: Received) -> None:
        told = asyncio.create_task(self.go_on.wait())
        gone = asyncio.create_task(connection.gone())
        await asyncio.wait((told, gone), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if gone.done():
            self.was_reset.set()
            return
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        await self.then(connection, request)


async def die(connection: Connection, request: Received) -> None:
    connection.die()


async def refuse(connection: Connection, request: Received) -> None:
    connection.answer(503, b'{"error":{"message":"full"}}')


async def fail(connection: Connection, request: Received) -> None:
    connection.answer(500, b'{"error":{"message":"bug"}}')


async def nonsense(connection: Connection, request: Received) -> None:
    connection.send(b"nonsense\r\n\r\n")


@contextlib.asynccontextmanager
async def hedged(*scripts: Script, **config: Any) -> AsyncIterator[Rig]:
    """A rig of these replicas; the first request goes to the first one, and its hedge to the second."""
    engines = [FakeEngine(script=script) for script in scripts]
    async with rig(engines, **{"policy": "round-robin", "hedge_after": 1.0, **config}) as r:
        yield r


async def asking(r: Rig, content: str = "hi", **fields: Any) -> asyncio.Task[httpx.Response]:
    """Sends a stream's request; returns when a replica has it."""
    before = sent(r)
    task = asyncio.create_task(r.chat(content, **{"stream": True, **fields}))
    await r.until(lambda: sent(r) > before)
    return task


def sent(r: Rig) -> int:
    """Attempts that replicas have seen."""
    return sum(len(engine.requests) for engine in r.engines)


async def overdue(r: Rig) -> None:
    """Returns when every stream sent so far is, by the clock that hedging goes by."""
    passed = asyncio.Event()
    Deadline(r.router.wheel, passed.set).set(2 * hedging.FLOOR_S)
    await passed.wait()


def outcomes(r: Rig) -> dict[str, float]:
    return {labels[1]: count for labels, count in r.router.metrics.hedges.sums()}


def failures(r: Rig) -> dict[str, float]:
    return {labels[1]: count for labels, count in r.router.metrics.failures.sums()}


def decisions(r: Rig) -> list[AttemptRecord]:
    """Newest first."""
    return list(r.router.accounting.attempt_log.latest(1000))


def is_whole(answer: httpx.Response) -> bool:
    """Whether it is exactly one answer."""
    text = answer.text
    return answer.status_code == 200 and [text.count(part) for part in ('"hel"', '"lo"', "[DONE]")] == [
        1,
        1,
        1,
    ]


# who answers


async def test_a_slow_replica_s_stream_is_answered_by_another() -> None:
    slow = Slow()
    async with hedged(slow, answer_normally, admin_port=0) as r:
        answer = await r.chat(stream=True)
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == "r1"
        await asyncio.wait_for(slow.was_reset.wait(), 5)
        assert is_settled(r)
        assert outcomes(r) == {"won": 1}
        assert r.metric("retries_total") == 0
        assert failures(r) == {}
        assert r.replica(0).health.consecutive_failures == 0
        second, first = (await r.http.get(r.router.admin_url + "/decisions")).json()
        assert (first["replica"], first["attempt"], first["hedge"]) == ("r0", 1, "")
        assert (second["replica"], second["attempt"], second["hedge"]) == ("r1", 2, "won")
        assert (first["request_id"], second["status"]) == (second["request_id"], 200)


async def test_the_first_replica_may_still_be_the_quicker_one() -> None:
    slow, other = Slow(), Slow()
    async with hedged(slow, other) as r:
        task = await asking(r)
        await r.until(lambda: sent(r) == 2)
        slow.go_on.set()
        answer = await task
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == "r0"
        await asyncio.wait_for(other.was_reset.wait(), 5)
        assert is_settled(r)
        assert outcomes(r) == {"lost": 1}
        assert [record.hedge for record in decisions(r)] == ["lost", ""]
        assert r.metric('ttft_error_seconds_count{model="tiny",replica="r0"}') == 1


@pytest.mark.parametrize("failing", [die, refuse, fail, nonsense], ids=lambda script: script.__name__)
async def test_when_the_first_fails_its_hedge_answers(failing: Script) -> None:
    slow, other = Slow(failing), Slow()
    async with hedged(slow, other) as r:
        task = await asking(r)
        await r.until(lambda: sent(r) == 2)
        slow.go_on.set()
        await r.until(lambda: outcomes(r) == {"promoted": 1})
        assert r.replica(0).load.inflight == 0
        other.go_on.set()
        answer = await task
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == "r1"
        assert (is_settled(r), sent(r)) == (True, 2)
        assert outcomes(r) == {"promoted": 1}
        assert r.metric("retries_total") == 0
        assert failures(r) == {"r0": 1}


@pytest.mark.parametrize("failing", [die, refuse, fail, nonsense], ids=lambda script: script.__name__)
async def test_when_the_hedge_fails_the_first_goes_on(failing: Script) -> None:
    slow = Slow()
    async with hedged(slow, failing) as r:
        task = await asking(r)
        await r.until(lambda: outcomes(r) == {"failed": 1})
        assert r.replica(1).load.inflight == 0
        slow.go_on.set()
        answer = await task
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == "r0"
        assert (is_settled(r), sent(r)) == (True, 2)
        assert r.metric("retries_total") == 0
        assert failures(r) == {"r1": 1}


async def test_when_both_fail_another_replica_is_asked() -> None:
    slow = Slow(die)
    scripts = iter((slow, die, answer_normally))

    async def in_turn(connection: Connection, request: Received) -> None:
        await next(scripts)(connection, request)

    async with hedged(in_turn, in_turn, in_turn) as r:
        task = await asking(r)
        await r.until(lambda: outcomes(r) == {"failed": 1})
        slow.go_on.set()
        assert is_whole(await task)
        assert is_settled(r)
        assert [len(engine.requests) for engine in r.engines] == [1, 1, 1]
        assert r.metric('retries_total{model="tiny",reason="reset"}') == 1
        assert [record.hedge for record in decisions(r)] == ["", "failed", ""]


async def test_an_error_is_an_answer_too() -> None:
    async def reject(connection: Connection, request: Received) -> None:
        connection.answer(400, b'{"error":{"message":"no"}}')

    slow = Slow()
    async with hedged(slow, reject) as r:
        assert (await r.chat(stream=True)).status_code == 400
        await asyncio.wait_for(slow.was_reset.wait(), 5)
        assert (is_settled(r), outcomes(r)) == (True, {"won": 1})


async def test_only_the_winner_is_billed() -> None:
    teller = Storyteller()
    slow, other = Slow(teller), Slow(teller)
    async with hedged(slow, other) as r:
        task = asyncio.create_task(r.http.post("/v1/chat/completions", json=STREAM))
        await r.until(lambda: sent(r) == 2)
        slow.go_on.set()
        other.go_on.set()
        said = fold((await task).content)
        assert said["choices"][0]["finish"] == ["stop"]
        await r.until(lambda: is_settled(r))
        assert r.metric("usage_requests_total") == 1
        generated = [r.metric(f'completion_tokens_total{{model="tiny",replica="r{n}"}}') for n in range(2)]
        assert sorted(generated) == [0, said["usage"][0]["completion_tokens"]]


# when one leaves


async def test_a_client_that_leaves_aborts_both() -> None:
    both = Slow(), Slow()
    async with hedged(*both) as r:
        async with raw(r.router) as (_, writer):
            writer.write(request_bytes(stream=True))
            await r.until(lambda: sent(r) == 2)
        for slow in both:
            await asyncio.wait_for(slow.was_reset.wait(), 5)
        assert (is_settled(r), outcomes(r)) == (True, {"abandoned": 1})
        assert r.metric("client_disconnects_total") == 1
        assert failures(r) == {}


async def test_a_connection_that_comes_after_the_race_is_nobody_s(black_hole: int) -> None:
    async with hedged(answer_normally, answer_normally, client=ClientLimits(connect_timeout_s=30.0)) as r:
        r.replica(0).pool.port = black_hole
        answer = await r.chat(stream=True)
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == "r1"
        assert (is_settled(r), sent(r), outcomes(r)) == (True, 1, {"won": 1})


@pytest.mark.parametrize("leaving", [0, 1])
async def test_a_replica_that_is_removed_may_still_win(leaving: int) -> None:
    both = Slow(), Slow()
    async with hedged(*both) as r:
        task = await asking(r)
        await r.until(lambda: sent(r) == 2)
        gone = r.replica(leaving)
        stays = service(r.engines).endpoints[1 - leaving]
        r.discovery.set(FleetDocument(services=(service(r.engines, endpoints=(stays,)),)))
        both[leaving].go_on.set()
        answer = await task
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == gone.name
        assert (gone.load.inflight, gone.load.inflight_tokens) == (0, 0)
        assert is_settled(r)


@pytest.mark.parametrize("dying", [0, 1])
async def test_a_replica_that_dies_leaves_the_request_to_the_other(dying: int) -> None:
    both = Slow(), Slow()
    async with hedged(*both) as r:
        task = await asking(r)
        await r.until(lambda: sent(r) == 2)
        await r.engines[dying].stop()
        await r.until(lambda: outcomes(r) == {("promoted", "failed")[dying]: 1})
        both[1 - dying].go_on.set()
        answer = await task
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == f"r{1 - dying}"
        await r.until(lambda: is_settled(r))


async def test_a_router_drains_with_two_attempts_under_way() -> None:
    slow, other = Slow(), Slow()
    async with hedged(slow, other) as r:
        task = await asking(r)
        await r.until(lambda: sent(r) == 2)
        drain = asyncio.create_task(r.router.drain())
        await r.until(lambda: r.router.application.is_draining)
        other.go_on.set()
        assert is_whole(await task)
        await asyncio.wait_for(drain, 5)
        assert is_settled(r)


async def test_a_kept_connection_that_dies_is_replaced_during_a_race() -> None:
    slow, other = Slow(die), Slow()
    async with hedged(slow, other) as r:
        slow.go_on.set()
        slow.then = answer_normally
        other.go_on.set()
        for number in range(2):
            assert is_whole(await r.chat(f"warm {number}", stream=True))
        slow.go_on.clear()
        slow.then = die
        other.go_on.clear()
        task = await asking(r)
        await r.until(lambda: sent(r) == 4)
        slow.go_on.set()
        await r.until(lambda: sent(r) == 5)
        await r.until(lambda: outcomes(r) == {"promoted": 1})
        assert r.metric('retries_total{model="tiny",reason="stale"}') == 1
        other.go_on.set()
        assert is_whole(await task)
        assert is_settled(r)
        assert [len(engine.requests) for engine in r.engines] == [3, 2]


async def test_a_stream_that_was_hedged_can_still_move_on() -> None:
    teller = Storyteller()

    async def resume_only(connection: Connection, request: Received) -> None:
        if "resume" in request.json:
            await teller(connection, request)
        else:
            await connection.gone()

    async def begin(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(events(request)[1])
        await connection.writer.drain()
        connection.die()

    async with hedged(resume_only, begin) as r:
        said = fold((await r.http.post("/v1/chat/completions", json=STREAM)).content)
        assert said["choices"][0]["finish"] == ["stop"]
        assert (is_settled(r), outcomes(r)) == (True, {"won": 1})
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') == 1
        assert sent(r) == 3


async def test_whatever_two_attempts_do_each_client_gets_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedging, "SHARE", 1.0)
    monkeypatch.setattr(hedging, "FLOOR_S", 0.001)
    mood = random.Random(7)
    arrivals: Counter[str] = Counter()
    all_hedged = asyncio.Event()

    async def moody(connection: Connection, request: Received) -> None:
        arrivals[request.json["messages"][0]["content"]] += 1
        # The first ten wait for their hedges: later on all replicas may be ejected, and none be left to hedge at.
        if sum(count > 1 for count in arrivals.values()) >= 10:
            all_hedged.set()
        await all_hedged.wait()
        await asyncio.sleep(mood.random() * 0.05)  # the others' hedges are due in the midst of it
        await mood.choice((answer_normally, answer_normally, die, refuse, nonsense))(connection, request)

    async with hedged(moody, moody, moody, policy="random") as r:
        first = [asyncio.create_task(r.chat(str(number), stream=True)) for number in range(10)]
        await all_hedged.wait()
        answers = await asyncio.gather(
            *first, *(r.chat(str(number), stream=True) for number in range(10, 100))
        )
        assert all(is_whole(answer) or answer.status_code >= 429 for answer in answers)
        assert sum(map(is_whole, answers)) > 50
        await r.until(lambda: is_settled(r))
        assert sum(outcomes(r).values()) == sum(record.hedge != "" for record in decisions(r)) >= 10


async def test_a_replica_that_was_on_trial_gets_another_one() -> None:
    slow = Slow()
    async with hedged(slow, answer_normally) as r:
        health, now = r.replica(0).health, r.router.requests.now()
        health.failed(now - 3600.0, may_eject=True, refused=True)
        r.router.fleet.changed()
        assert is_whole(await r.chat(stream=True))
        assert outcomes(r) == {"won": 1}
        assert health.is_ejected
        assert health.admits(now)


async def test_a_client_that_cannot_keep_up_holds_both_back() -> None:
    both = Slow(), Slow()
    async with hedged(*both) as r:
        task = await asking(r)
        await r.until(lambda: sent(r) == 2)
        (connection,) = (c for c in r.router.server.connections if c.exchange is not None)
        assert connection.exchange is not None
        connection.exchange.on_client_paused()
        for slow in both:
            slow.go_on.set()
        assert is_whole(await r.chat("other", stream=True))
        assert not task.done()
        assert [r.replica(number).load.inflight for number in range(2)] == [1, 1]
        connection.exchange.on_client_resumed()
        assert is_whole(await task)
        assert is_settled(r)


# how often


async def test_a_fleet_that_is_slow_as_a_whole_gets_hardly_more() -> None:
    slow = Slow()
    async with hedged(slow, slow) as r:
        tasks = [asyncio.create_task(r.chat(str(number), stream=True)) for number in range(60)]
        await r.until(lambda: sent(r) >= 60)
        await overdue(r)
        assert 61 <= sent(r) <= 60 * (1 + hedging.SHARE) + 1
        slow.go_on.set()
        assert all(is_whole(answer) for answer in await asyncio.gather(*tasks))
        assert is_settled(r)


async def test_credit_does_not_pile_up() -> None:
    slow = Slow()
    slow.go_on.set()
    async with hedged(slow, slow) as r:
        credit = r.router.dispatcher.hedging.credit
        for number in range(3):
            await r.chat(str(number), stream=True)
        (earning,) = credit
        assert credit[earning] == pytest.approx(1.0 + 3 * hedging.SHARE)
        credit[earning] = hedging.MAX_CREDIT
        await r.chat(stream=True)
        assert credit[earning] == hedging.MAX_CREDIT
        r.discovery.set(FleetDocument(services=(service(r.engines, name="other", uid="uid-2"),)))
        await r.until(lambda: all(replica.is_routable for replica in r.router.fleet.replicas()))
        await r.chat(stream=True)
        assert earning not in credit
        assert len(credit) == 1


NOT_HEDGED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("by default", {"hedge_after": 0.0}, {}),
    ("a unary answer", {}, {"stream": False}),
    ("a token expected late", {}, {"content": "long " * 4000}),
]


@pytest.mark.parametrize(
    ("config", "fields"), [case[1:] for case in NOT_HEDGED], ids=[c[0] for c in NOT_HEDGED]
)
async def test_what_is_not_hedged(config: dict[str, Any], fields: dict[str, Any]) -> None:
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
        await r.until(lambda: sent(r) == 1)
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
    async with rig(engines, policy="round-robin", hedge_after=1.0) as r:
        tasks = [await asking(r), await asking(r)]
        await overdue(r)
        assert sent(r) == 2
        slow.go_on.set()
        assert all(map(is_whole, await asyncio.gather(*tasks)))


async def test_who_waits_goes_before_a_hedge() -> None:
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
        await r.until(lambda: sent(r) == 3)
        assert r.router.flow_control.has_capacity(served, now)
        slow.go_on.set()
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*tasks))


async def test_with_room_elsewhere_it_is() -> None:
    slow = Slow()
    fields = {"limits": ServiceLimits(max_inflight_per_replica=2)}
    async with hedged(slow, slow, fields=fields) as r:
        tasks = [*await occupied(r), await asking(r)]
        await r.until(lambda: sent(r) == 4)
        slow.go_on.set()
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*tasks))
        assert is_settled(r)


@pytest.mark.parametrize("state", ["suspect", "ejected", "resting"])
async def test_who_is_not_well_gets_no_hedge(state: str) -> None:
    slow = Slow()
    async with hedged(slow, answer_normally) as r:
        task = await asking(r)
        health = r.replica(1).health
        if state == "suspect":
            health.is_suspect = True
        elif state == "resting":
            health.cool_down(r.router.requests.now(), 60.0, until_room=False)
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
        (connection,) = (c for c in r.router.server.connections if c.exchange is not None)
        assert connection.exchange is not None
        connection.exchange.on_client_paused()
        await overdue(r)
        assert sent(r) == 1
        connection.exchange.on_client_resumed()
        slow.go_on.set()
        assert is_whole(await task)


async def test_a_lonely_replica_is_waited_for() -> None:
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
        await r.until(lambda: sent(r) == 2)
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
        assert (await r.chat(stream=True)).headers["x-argosy-replica"] == "r1"
    slow, late = Slow(), {"hedge_after": 100.0}
    async with hedged(slow, answer_normally, fields=late) as r:
        task = await asking(r, "x" * 4000)
        await overdue(r)
        assert sent(r) == 1
        slow.go_on.set()
        assert is_whole(await task)


async def test_a_service_can_do_without() -> None:
    slow = Slow()
    async with hedged(slow, answer_normally, fields={"hedge_after": 0.0}) as r:
        task = await asking(r)
        await overdue(r)
        assert sent(r) == 1
        slow.go_on.set()
        assert is_whole(await task)


@pytest.mark.parametrize("factor", ["0", "1", "1.5", "100"])
def test_factors_that_are_taken(factor: str) -> None:
    flags = ["--replica", "http://a:1", "--hedge-after", factor]
    assert config_of(build_parser().parse_args(flags), {}).hedge_after == float(factor)


@pytest.mark.parametrize("factor", ["0.5", "101", "-1", "nan", "inf"])
def test_factors_that_are_refused(factor: str) -> None:
    flags = ["--replica", "http://a:1", f"--hedge-after={factor}"]
    with pytest.raises(ConfigError, match="--hedge-after"):
        config_of(build_parser().parse_args(flags), {})


async def test_a_client_that_speaks_raw_http_sees_one_answer() -> None:
    both = Slow(), Slow()
    async with hedged(*both) as r, raw(r.router) as (reader, writer):
        writer.write(request_bytes(stream=True).replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        await r.until(lambda: sent(r) == 2)
        for slow in both:
            slow.go_on.set()
        data = await read_all(reader)
        assert data.count(b"HTTP/1.1") == data.count(b"[DONE]") == 1
        assert data.endswith(b"\r\n0\r\n\r\n")
