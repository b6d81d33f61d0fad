"""Hedging: two attempts at one request, one of which answers, and what each path leaves behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_router.config import UpstreamLimits
from argosy_router.proxy import resilience

from .fake_engine import Connection, Received, Script, answer_normally
from .harness import DEADLINE_S, is_settled, raw, read_all, service
from .hedging_rig import (
    STREAM,
    Slow,
    asking,
    chat_hedged,
    decisions,
    die,
    fail,
    failures,
    hedged,
    is_whole,
    nonsense,
    outcomes,
    overdue,
    refuse,
    sent,
    until_hedged,
)
from .raw_requests import request_bytes
from .resumable_stream import ResumableStream, events, fold

# who answers


async def test_a_slow_replica_s_stream_is_answered_by_another() -> None:
    slow = Slow()
    async with hedged(slow, answer_normally, admin_port=0) as r:
        answer = await chat_hedged(r)
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == "r1"
        await asyncio.wait_for(slow.was_reset.wait(), DEADLINE_S)
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
        await until_hedged(r)
        slow.go_on.set()
        answer = await task
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == "r0"
        await asyncio.wait_for(other.was_reset.wait(), DEADLINE_S)
        assert is_settled(r)
        assert outcomes(r) == {"lost": 1}
        assert [record.hedge for record in decisions(r)] == ["lost", ""]
        assert r.metric('ttft_error_seconds_count{model="tiny",replica="r0"}') == 1


@pytest.mark.parametrize("failing", [die, refuse, fail, nonsense], ids=lambda script: script.__name__)
async def test_when_the_first_fails_its_hedge_answers(failing: Script) -> None:
    slow, other = Slow(failing), Slow()
    async with hedged(slow, other) as r:
        task = await asking(r)
        await until_hedged(r)
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
async def test_the_first_attempt_continues_when_the_hedge_fails(failing: Script) -> None:
    slow = Slow()
    async with hedged(slow, failing) as r:
        task = await asking(r)
        await overdue(r)
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
        await overdue(r)
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
        assert (await chat_hedged(r)).status_code == 400
        await asyncio.wait_for(slow.was_reset.wait(), DEADLINE_S)
        assert (is_settled(r), outcomes(r)) == (True, {"won": 1})


async def test_only_the_winner_is_billed() -> None:
    script = ResumableStream()
    slow, other = Slow(script), Slow(script)
    async with hedged(slow, other) as r:
        task = asyncio.create_task(r.http.post("/v1/chat/completions", json=STREAM))
        await until_hedged(r)
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
            await until_hedged(r)
        for slow in both:
            await asyncio.wait_for(slow.was_reset.wait(), DEADLINE_S)
        assert (is_settled(r), outcomes(r)) == (True, {"abandoned": 1})
        assert r.metric("client_disconnects_total") == 1
        assert failures(r) == {}


async def test_a_connection_made_after_the_race_is_dropped(black_hole: int) -> None:
    async with hedged(answer_normally, answer_normally, upstream=UpstreamLimits(connect_timeout_s=30.0)) as r:
        r.replica(0).pool.port = black_hole
        asked = asyncio.create_task(r.chat(stream=True))
        await r.until(lambda: bool(r.replica(0).inflight_attempts))
        await overdue(r)
        answer = await asked
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == "r1"
        assert (is_settled(r), sent(r), outcomes(r)) == (True, 1, {"won": 1})


@pytest.mark.parametrize("leaving", [0, 1])
async def test_a_replica_that_is_removed_may_still_win(leaving: int) -> None:
    both = Slow(), Slow()
    async with hedged(*both) as r:
        task = await asking(r)
        await until_hedged(r)
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
        await until_hedged(r)
        await r.engines[dying].stop()
        await r.until(lambda: outcomes(r) == {("promoted", "failed")[dying]: 1})
        both[1 - dying].go_on.set()
        answer = await task
        assert is_whole(answer)
        assert answer.headers["x-argosy-replica"] == f"r{1 - dying}"
        await r.until(lambda: is_settled(r))


async def test_a_router_drains_during_a_race() -> None:
    slow, other = Slow(), Slow()
    async with hedged(slow, other) as r:
        task = await asking(r)
        await until_hedged(r)
        drain = asyncio.create_task(r.router.drain())
        await r.until(lambda: r.router.application.is_draining)
        other.go_on.set()
        assert is_whole(await task)
        await asyncio.wait_for(drain, DEADLINE_S)
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
        await overdue(r)
        assert sent(r) == 4
        slow.go_on.set()
        await r.until(lambda: sent(r) >= 5)
        await r.until(lambda: outcomes(r) == {"promoted": 1})
        assert r.metric('retries_total{model="tiny",reason="stale"}') == 1
        other.go_on.set()
        assert is_whole(await task)
        assert is_settled(r)
        assert [len(engine.requests) for engine in r.engines] == [3, 2]


async def test_a_stream_that_was_hedged_can_still_move_on() -> None:
    script = ResumableStream()

    async def resume_only(connection: Connection, request: Received) -> None:
        if "resume" in request.json:
            await script(connection, request)
        else:
            await connection.gone()

    async def begin(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(events(request)[1])
        await connection.writer.drain()
        connection.die()

    async with hedged(resume_only, begin) as r:
        asked = asyncio.create_task(r.http.post("/v1/chat/completions", json=STREAM))
        await until_hedged(r)
        said = fold((await asked).content)
        assert said["choices"][0]["finish"] == ["stop"]
        assert (is_settled(r), outcomes(r)) == (True, {"won": 1})
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') == 1
        assert sent(r) == 3


async def test_each_client_gets_one_answer_whatever_two_attempts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resilience, "HEDGED_SHARE", 1.0)
    monkeypatch.setattr(resilience, "MIN_FIRST_TOKEN_S", 0.001)
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

    async with hedged(moody, moody, moody, policy="random", clock=None) as r:
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
        assert is_whole(await chat_hedged(r))
        assert outcomes(r) == {"won": 1}
        assert health.is_ejected
        assert health.admits(now)


async def test_a_client_that_cannot_keep_up_holds_both_back() -> None:
    both = Slow(), Slow()
    async with hedged(*both) as r:
        task = await asking(r)
        await until_hedged(r)
        (connection,) = (c for c in r.router.server.connections if c.listener is not None)
        assert connection.listener is not None
        connection.listener.on_client_paused()
        for slow in both:
            slow.go_on.set()
        assert is_whole(await r.chat("other", stream=True))
        assert not task.done()
        assert [r.replica(number).load.inflight for number in range(2)] == [1, 1]
        connection.listener.on_client_resumed()
        assert is_whole(await task)
        assert is_settled(r)


async def test_a_client_that_speaks_raw_http_sees_one_answer() -> None:
    both = Slow(), Slow()
    async with hedged(*both) as r, raw(r.router) as (reader, writer):
        writer.write(request_bytes(stream=True).replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        await until_hedged(r)
        for slow in both:
            slow.go_on.set()
        data = await read_all(reader)
        assert data.count(b"HTTP/1.1") == data.count(b"[DONE]") == 1
        assert data.endswith(b"\r\n0\r\n\r\n")
