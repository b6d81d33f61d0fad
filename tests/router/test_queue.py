"""Requests that wait for capacity: their order, their end, and refusals with a hint when to retry."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import openai
import pytest

from argosy_protocol.fleet import Endpoint, FleetDocument, ServiceLimits
from argosy_protocol.telemetry import Load
from argosy_router.config import FlowControlLimits, ServerLimits
from argosy_router.fleet.candidates import BATCHES_PER_REPLICA

from .fake_engine import FakeEngine
from .harness import StoppedClock, chat, raw, read_all, rig, service
from .queueing import ONE_AT_A_TIME, Turnstile, check_hint, full, is_settled, queued, send

# waiting


async def test_a_request_waits_until_one_has_ended() -> None:
    async with full() as (r, turnstile, first):
        second = await send(r, "second", 1)
        assert turnstile.order == ["first"]
        turnstile.let(2)
        assert (await first).status_code == (await second).status_code == 200
        assert turnstile.order == ["first", "second"]
        assert r.metric('queue_seconds_count{model="tiny",outcome="sent"}') == 1


async def test_capacity_may_vanish_and_return() -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.chat()).status_code == 200
        r.replica(0).is_draining = True
        r.router.fleet.changed()
        assert (await r.chat()).status_code == 503
        r.replica(0).is_draining = False
        r.router.fleet.changed()
        assert (await r.chat()).status_code == 200
        await r.until(lambda: is_settled(r))


async def test_queueing_time_does_not_count_as_the_replica_s_latency() -> None:
    async with full(clock=StoppedClock()) as (r, turnstile, _):
        second = await send(r, "second", 1, stream=True)
        await r.pass_time(5.0)
        turnstile.let(2)
        await second
        ttft = r.metric('ttft_seconds_sum{model="tiny"}')
        assert ttft >= 5.0
        assert r.metric('actual_ttft_seconds_total{model="tiny",replica="r0"}') <= ttft - 5.0


async def test_queued_requests_of_one_key_leave_connections_to_others(tmp_path: Path) -> None:
    connections = 16
    keys = tmp_path / "keys"
    keys.write_text("sk-hog name=hog\nsk-other name=other\n")
    turnstile = Turnstile()
    config = {"api_keys_file": keys, "server": ServerLimits(max_connections=connections)}
    async with rig([FakeEngine(script=turnstile)], fields=ONE_AT_A_TIME, **config) as r:
        r.http.headers["authorization"] = "Bearer sk-hog"
        tasks = [asyncio.create_task(r.chat(f"{number}")) for number in range(connections)]
        await r.until(lambda: queued(r) + sum(task.done() for task in tasks) == connections - 1)
        refused = [task.result() for task in tasks if task.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert "few connections are free" in refused[0].json()["error"]["message"]
        assert connections // 2 < queued(r) <= connections * 3 // 4 + 1
        waiting = queued(r)
        headers = {"authorization": "Bearer sk-other"}
        async with httpx.AsyncClient(base_url=r.router.url, headers=headers, trust_env=False) as other:
            assert (await other.get("/v1/models")).status_code == 200
            asked = asyncio.create_task(other.post("/v1/chat/completions", json=chat()))
            await r.until(lambda: queued(r) == waiting + 1)
            turnstile.let(1000)
            assert (await asked).status_code == 200
        await asyncio.gather(*tasks)


async def test_replicas_that_report_themselves_full_are_full() -> None:
    engines = [FakeEngine(hello={"max_num_seqs": 2}), FakeEngine(hello={"max_num_seqs": 2})]
    async with rig(engines) as r:
        seats = int(2 * BATCHES_PER_REPLICA)
        for engine in engines:
            engine.announce(Load(core_step_age_s=0.0, num_running=seats))
        await r.until(lambda: all(replica.load.requests == seats for replica in r.router.fleet.replicas()))
        waiting = await send(r, "hi", 1)
        engines[1].announce(Load(core_step_age_s=0.0, num_running=seats - 1))
        assert (await waiting).status_code == 200


async def test_priorities_go_first_whenever_they_come() -> None:
    async with full() as (r, turnstile, _):
        tasks = [
            await send(r, name, count + 1, priority=priority)
            for count, (name, priority) in enumerate([("late", 5), ("plain", 0), ("urgent", -5)])
        ]
        turnstile.let(4)
        await asyncio.gather(*tasks)
        assert turnstile.order == ["first", "urgent", "plain", "late"]


async def test_keys_take_turns(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k-hog name=hog\nk-modest name=modest\n")
    turnstile = Turnstile()
    async with rig([FakeEngine(script=turnstile)], fields=ONE_AT_A_TIME, api_keys_file=keys) as r:

        async def ask(name: str, key: str, waiting: int) -> asyncio.Task[httpx.Response]:
            r.http.headers["authorization"] = f"Bearer {key}"
            return await send(r, name, waiting)

        tasks = [await ask(f"hog{number}", "k-hog", max(0, number)) for number in range(5)]
        tasks += [await ask(f"modest{number}", "k-modest", 5 + number) for number in range(2)]
        turnstile.let(7)
        assert {(await task).status_code for task in tasks} == {200}
        assert set(turnstile.order[1:5]) == {"hog1", "hog2", "modest0", "modest1"}


# leaving


async def test_a_request_that_leaves_the_queue_is_never_sent() -> None:
    async with full() as (r, turnstile, _):
        async with raw(r.router) as (_, writer):
            request = r.http.build_request("POST", "/v1/chat/completions", json=chat("gone", stream=True))
            head = b"".join(b"%b: %b\r\n" % header for header in request.headers.raw)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + head + b"\r\n" + request.content)
            await r.until(lambda: queued(r) == 1)
        await r.until(lambda: queued(r) == 0)
        assert r.metric('queue_seconds_count{model="tiny",outcome="abandoned"}') == 1
        assert r.metric('requests_total{code="499",model="tiny"}') == 1
        turnstile.let(2)
        assert (await r.chat("next")).status_code == 200
        assert turnstile.order == ["first", "next"]


async def test_removing_a_service_refuses_its_queued_requests() -> None:
    async with full() as (r, _, _first):
        waiting = await send(r, "second", 1)
        r.discovery.set(FleetDocument())
        answer = await waiting
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "service_unavailable"


# refusals


async def test_a_full_queue_answers_429_with_a_hint() -> None:
    async with full(limits=FlowControlLimits(max_queued_requests=1)) as (r, turnstile, _):
        waiting = await send(r, "second", 1)
        refused = await r.chat("third")
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        check_hint(refused)
        displaced = await send(r, "urgent", 1, priority=-1)
        assert (await waiting).status_code == 429
        turnstile.let(2)
        assert (await displaced).status_code == 200
        assert turnstile.order == ["first", "urgent"]


async def test_the_openai_sdk_retries_after_the_hint() -> None:
    async with (
        full(limits=FlowControlLimits(max_queued_requests=0)) as (r, turnstile, first),
        openai.AsyncOpenAI(base_url=f"{r.router.url}/v1", api_key="any", max_retries=1) as sdk,
    ):
        asked = asyncio.create_task(sdk.chat.completions.create(**chat("second")))
        await r.until(lambda: r.metric('requests_total{code="429",model="tiny"}') == 1)
        turnstile.let(2)
        await first
        assert (await asked).choices[0].message.content == "hello"


async def test_a_full_queue_is_full_by_bytes_too() -> None:
    async with full(limits=FlowControlLimits(max_queued_bytes=1000)) as (r, _, _first):
        assert (await r.chat("x" * 1000)).status_code == 429
        await send(r, "small", 1)


async def test_queue_timeout() -> None:
    async with full(limits=FlowControlLimits(queue_timeout_s=0.05)) as (r, turnstile, _):
        expired = await r.chat("second")
        assert expired.status_code == 429
        check_hint(expired)
        assert turnstile.order == ["first"]


async def test_the_service_s_own_limits_win() -> None:
    limits = ServiceLimits(max_inflight_per_replica=1, max_queued_requests=1)
    turnstile = Turnstile()
    async with rig([FakeEngine(script=turnstile)], fields={"limits": limits}) as r:
        first = asyncio.create_task(r.chat("first"))
        await r.until(lambda: turnstile.order == ["first"])
        second = await send(r, "second", 1)
        assert (await r.chat("third")).status_code == 429
        turnstile.let(2)
        assert (await first).status_code == (await second).status_code == 200


async def test_requests_on_one_connection_wait_in_turn() -> None:
    async with full() as (r, turnstile, _):
        async with raw(r.router) as (reader, writer):
            for name in ("a", "b"):
                request = r.http.build_request("POST", "/v1/chat/completions", json=chat(name))
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                )
                writer.write(b"content-length: %d\r\n" % len(request.content))
                writer.write((b"connection: close\r\n" if name == "b" else b"") + b"\r\n" + request.content)
            await r.until(lambda: queued(r) == 1)
            turnstile.let(3)
            assert (await read_all(reader)).count(b"HTTP/1.1 200 OK") == 2
        assert turnstile.order == ["first", "a", "b"]


@pytest.mark.parametrize("count", [40])
async def test_every_account_is_empty_after_any_kind_of_end(count: int) -> None:
    """Requests that are served, refused, expired and abandoned at once: every account is empty afterwards."""
    limits = FlowControlLimits(max_queued_requests=10, queue_timeout_s=0.2)
    engines = [FakeEngine(), FakeEngine()]
    async with rig(engines, fields=ONE_AT_A_TIME, flow_control=limits) as r:

        async def impatient(number: int) -> int:
            task = asyncio.create_task(r.chat(f"q{number}", stream=number % 2 == 0))
            if number % 5 == 0:
                await asyncio.sleep(0.002)
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                return (await task).status_code
            return 0

        statuses = await asyncio.gather(*(impatient(number) for number in range(count)))
        assert set(statuses) <= {0, 200, 429}
        assert statuses.count(200) >= 2
        await r.until(lambda: is_settled(r))
        assert (await r.chat("after")).status_code == 200


async def test_one_endpoint_serves_two_services() -> None:
    """Each service has its own queue: a full one does not keep the other's requests waiting."""
    turnstile = Turnstile()
    async with FakeEngine(script=turnstile) as slow, FakeEngine(model="other") as quick:
        endpoint = Endpoint(name="q", url=quick.url)
        document = FleetDocument(
            services=(
                service([slow], **ONE_AT_A_TIME),
                service([], name="other", uid="2", model="other", endpoints=(endpoint,)),
            )
        )
        async with rig([], document=document) as r:
            await r.until(lambda: all(replica.is_routable for replica in r.router.fleet.replicas()))
            first = asyncio.create_task(r.chat("first"))
            await r.until(lambda: turnstile.order == ["first"])
            second = await send(r, "second", 1)
            assert (await r.chat(model="other")).status_code == 200
            turnstile.let(2)
            assert (await first).status_code == (await second).status_code == 200
