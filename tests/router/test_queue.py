"""The gate from outside: waiting, leaving, being refused, being held; keys with models and limits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from argosy_protocol.fleet import Endpoint, FleetDocument, ServiceLimits
from argosy_protocol.telemetry import Load
from argosy_router.config import FlowControlLimits
from argosy_router.fleet.candidates import BATCHES_PER_REPLICA

from .fake_engine import DONE, MODEL, Connection, FakeEngine, Received, answer_normally, completion, event
from .harness import Rig, chat, raw, read_all, rig, service

ONE_AT_A_TIME = {"limits": ServiceLimits(max_inflight_per_replica=1)}


class Turnstile:
    """A script that holds every request until a test lets it go, and remembers the order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self._permits = asyncio.Semaphore(0)

    async def __call__(self, connection: Connection, request: Received) -> None:
        self.order.append(request.json["messages"][0]["content"])
        self.bodies.append(request.json)
        await self._permits.acquire()
        await answer_normally(connection, request)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()


def queued(r: Rig) -> float:
    return r.metric(f'queued_requests{{model="{MODEL}"}}')


def is_settled(r: Rig) -> bool:
    loads = [replica.load for replica in r.router.fleet.replicas()]
    return (
        r.router.requests.inflight == 0
        and queued(r) == 0
        and all((load.inflight, load.queued_tokens) == (0, 0) for load in loads)
        and r.router.flow_control.num_admitted == 0
    )


@contextlib.asynccontextmanager
async def full(
    *, limits: FlowControlLimits | None = None, **config: Any
) -> AsyncIterator[tuple[Rig, Turnstile, asyncio.Task[httpx.Response]]]:
    """A service whose only seat is taken by a request called "first"."""
    turnstile = Turnstile()
    engines = [FakeEngine(script=turnstile)]
    async with rig(engines, fields=ONE_AT_A_TIME, flow_control=limits or FlowControlLimits(), **config) as r:
        first = asyncio.create_task(r.chat("first"))
        await r.until(lambda: turnstile.order == ["first"])
        yield r, turnstile, first
        turnstile.let(1000)
        await asyncio.gather(first, return_exceptions=True)
        await r.until(lambda: is_settled(r))


async def send(r: Rig, name: str, waiting: int, **fields: Any) -> asyncio.Task[httpx.Response]:
    """A request that has to wait; returns once it does."""
    task = asyncio.create_task(r.chat(name, **fields))
    await r.until(lambda: queued(r) == waiting)
    return task


# waiting


async def test_a_request_waits_until_one_has_ended() -> None:
    async with full() as (r, turnstile, first):
        second = await send(r, "second", 1)
        assert turnstile.order == ["first"]
        turnstile.let(2)
        assert (await first).status_code == (await second).status_code == 200
        assert turnstile.order == ["first", "second"]
        assert r.metric('queue_seconds_count{model="tiny",outcome="sent"}') == 1


async def test_the_room_may_go_between_two_looks() -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.chat()).status_code == 200
        r.replica(0).is_draining = True
        r.router.fleet.changed()
        assert (await r.chat()).status_code == 503
        r.replica(0).is_draining = False
        r.router.fleet.changed()
        assert (await r.chat()).status_code == 200
        await r.until(lambda: is_settled(r))


async def test_waiting_is_not_held_against_the_replica() -> None:
    async with full() as (r, turnstile, _):
        second = await send(r, "second", 1, stream=True)
        await asyncio.sleep(0.3)
        turnstile.let(2)
        await second
        ttft = r.metric('ttft_seconds_sum{model="tiny"}')
        assert ttft >= 0.3
        assert r.metric('actual_ttft_seconds_total{model="tiny",replica="r0"}') <= ttft - 0.3


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


async def test_who_leaves_the_queue_is_never_sent() -> None:
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


async def test_a_service_that_is_removed_lets_nobody_wait() -> None:
    async with full() as (r, _, _first):
        waiting = await send(r, "second", 1)
        r.discovery.set(FleetDocument())
        answer = await waiting
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "service_unavailable"


# refusals


def check_hint(answer: httpx.Response) -> None:
    """As OpenAI's SDKs read it: milliseconds first, and never longer than a minute."""
    assert 0 < float(answer.headers["retry-after-ms"]) <= 60_000
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.headers["x-should-retry"] == "true"


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


async def test_openai_s_sdk_comes_back_when_told_to() -> None:
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


async def test_nobody_waits_longer_than_allowed() -> None:
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


# no replica


async def test_without_a_replica_requests_are_refused_at_once() -> None:
    async with rig([]) as r:
        refused = await r.chat()
        assert refused.status_code == 503
        check_hint(refused)


async def test_requests_are_held_until_the_first_replica_comes() -> None:
    async with rig([], flow_control=FlowControlLimits(hold_timeout_s=60.0)) as r:
        held = await send(r, "held", 1)
        async with FakeEngine() as engine:
            r.discovery.set(FleetDocument(services=(service([engine]),)))
            assert (await held).status_code == 200
            await r.until(lambda: is_settled(r))


async def test_a_steady_flow_of_newcomers_does_not_put_off_the_held() -> None:
    async with rig([], flow_control=FlowControlLimits(hold_timeout_s=60.0)) as r:
        held = await send(r, "held", 1)

        async def flow() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.03):
                        await r.chat("impatient")

        flowing = asyncio.create_task(flow())
        async with FakeEngine() as engine:
            r.discovery.set(FleetDocument(services=(service([engine]),)))
            assert (await held).status_code == 200
            flowing.cancel()


async def test_holding_ends() -> None:
    async with rig([], flow_control=FlowControlLimits(hold_timeout_s=0.05)) as r:
        assert (await r.chat()).status_code == 503


# streams that wait


QUICK = FlowControlLimits(keep_alive_s=0.01, hold_timeout_s=60.0)


async def test_a_waiting_stream_gets_comments_and_then_its_events() -> None:
    async def say(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hello"))
        connection.chunk(DONE)
        connection.end_stream()

    async with rig([], flow_control=QUICK) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-request-id"]
            lines = answer.aiter_lines()
            for _ in range(2):
                assert (await anext(lines)).startswith(": ")
                assert not await anext(lines)
            async with FakeEngine(script=say) as engine:
                r.discovery.set(FleetDocument(services=(service([engine]),)))
                rest = [line async for line in lines if line and not line.startswith(":")]
        assert "\n\n".join(rest) + "\n\n" == (event("hello") + DONE).decode()
        await r.until(lambda: is_settled(r))


async def test_a_begun_stream_is_told_of_a_refusal_by_an_event() -> None:
    limits = FlowControlLimits(keep_alive_s=0.01, hold_timeout_s=0.5)
    async with rig([], flow_control=limits) as r:
        answer = await r.chat(stream=True)
        assert answer.status_code == 200
        comment, *_, error = [text for text in answer.text.split("\n\n") if text]
        assert comment.startswith(": ")
        assert error.startswith("data: ")
        assert '"service_unavailable"' in error
        assert r.metric('requests_total{code="503",model="tiny"}') == 1


async def test_a_begun_stream_is_told_of_the_engine_s_error() -> None:
    async def reject(connection: Connection, _: Received) -> None:
        connection.answer(400, b'{"error":\n{"message":"no"}}')

    async with rig([], flow_control=QUICK) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            async with FakeEngine(script=reject) as engine:
                r.discovery.set(FleetDocument(services=(service([engine]),)))
                rest = [line async for line in lines if line and not line.startswith(":")]
        assert rest == ['data: {"error": {"message":"no"}}']


async def test_who_leaves_a_begun_stream_is_never_sent() -> None:
    async with rig([], flow_control=QUICK) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            await anext(answer.aiter_lines())
        await r.until(lambda: is_settled(r))
        async with FakeEngine() as engine:
            r.discovery.set(FleetDocument(services=(service([engine]),)))
            assert (await r.chat("next")).status_code == 200
            assert len(engine.requests) == 1


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


# keys


@contextlib.asynccontextmanager
async def keyed(
    tmp_path: Path, line: str, engines: list[FakeEngine] | None = None, **config: Any
) -> AsyncIterator[Rig]:
    """A router with one key, which the client sends."""
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-client").hexdigest()
    path.write_text(f"sha256:{digest} name=client {line}\n")
    async with rig(engines or [FakeEngine()], api_keys_file=path, **config) as r:
        r.http.headers["authorization"] = "Bearer sk-client"
        yield r
        await r.until(lambda: is_settled(r))


async def test_answers_tell_what_is_left_of_the_limits(tmp_path: Path) -> None:
    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, completion(prompt_tokens=300), "x-ratelimit-remaining-tokens: 7\r\n")

    async with keyed(
        tmp_path, "requests_per_minute=3 tokens_per_minute=1000", [FakeEngine(script=answer)]
    ) as r:
        first = await r.chat(max_tokens=100)
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert first.headers["x-ratelimit-reset-requests"] == "20s"
        assert first.headers.get_list("x-ratelimit-remaining-tokens") == [str(1000 - 100 - first_prompt(r))]
        second = await r.chat(max_tokens=100)
        # The first one used 301, whatever was reserved.
        assert (
            abs(int(second.headers["x-ratelimit-remaining-tokens"]) - (1000 - 301 - 100 - first_prompt(r)))
            <= 20
        )
        assert (await r.chat()).status_code == 200
        refused = await r.chat()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        check_hint(refused)
        assert r.metric('rate_limited_total{key="client"}') == 1
        assert len(r.engines[0].requests) == 3


async def test_streams_count_though_their_client_wants_no_usage(tmp_path: Path) -> None:
    async def answer(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        if request.json["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": 300, "total_tokens": 400, "completion_tokens": 100}
            connection.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        connection.chunk(DONE)
        connection.end_stream()

    async with keyed(tmp_path, "tokens_per_minute=1000", [FakeEngine(script=answer)]) as r:
        for _ in range(2):
            await r.chat(stream=True, max_tokens=1)
        third = await r.chat(stream=True, max_tokens=1)
        assert int(third.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(200, abs=30)
        assert r.metric('usage_tokens_total{key="client",kind="completion",model="tiny"}') == 300


def first_prompt(r: Rig) -> int:
    """Tokens the router takes the prompt of `chat()` for."""
    from argosy_protocol.openai import decode_request
    from argosy_router.proxy.request.call_decoding import prompt_of

    tiny = r.router.fleet.service_of(MODEL)
    assert tiny is not None
    prompt = prompt_of(
        tiny, decode_request("chat/completions", httpx.Request("POST", "http://x", json=chat()).content), b""
    )
    return tiny.lengths.tokens(prompt)


async def test_a_request_that_was_never_sent_counts_for_nothing(tmp_path: Path) -> None:
    no_queue = FlowControlLimits(max_queued_requests=0)
    async with keyed(tmp_path, "requests_per_minute=2", fields=ONE_AT_A_TIME, flow_control=no_queue) as r:
        replica = r.replica(0)
        charge = replica.load.charge(1)
        for _ in range(5):
            refused = await r.chat()
            assert refused.status_code == 429
            assert "rate limit" not in refused.json()["error"]["message"]
        charge.release()
        await r.until(lambda: replica.load.requests == 0)
        assert (await r.chat()).status_code == 200


async def test_a_key_opens_its_models_only(tmp_path: Path) -> None:
    async with keyed(tmp_path, "models=small,team/large") as r:
        engine = r.engines[0]
        r.discovery.set(
            FleetDocument(
                services=(
                    service([engine], aliases=("small", "fast")),
                    service([engine], namespace="team", name="large", uid="2", model="big"),
                )
            )
        )
        assert [card["id"] for card in (await r.http.get("/v1/models")).json()["data"]] == ["small", "big"]
        await r.until(lambda: all(replica.is_routable for replica in r.router.fleet.replicas()))
        statuses = {
            name: (await r.chat(model=name)).status_code
            for name in (MODEL, "small", "fast", "big", "team/large", "no")
        }
        assert statuses == {MODEL: 404, "small": 200, "fast": 404, "big": 200, "team/large": 200, "no": 404}
        assert (await r.http.get("/v1/models/fast")).json() == (await r.chat(model="fast")).json()


async def test_the_key_s_class_reaches_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine(hello={"schedules_by_priority": True})
    async with keyed(tmp_path, "priority=10", [engine]) as r:
        await r.chat()
        await r.chat(priority=-1000, top_p=0.5)
        assert [request.json.get("priority") for request in r.engines[0].requests] == [10, 10]
        assert r.engines[0].requests[1].json["top_p"] == 0.5


async def test_engines_that_would_refuse_a_priority_get_none() -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.chat(priority=5, top_p=0.5)).status_code == 200
        await r.chat(top_p=0.5)
        assert [request.json.get("priority", 0) for request in r.engines[0].requests] == [0, 0]
        assert (
            r.engines[0].requests[1].body == r.http.build_request("POST", "/", json=chat(top_p=0.5)).content
        )


async def test_reloading_keys_interrupts_nobody(tmp_path: Path) -> None:
    turnstile = Turnstile()
    async with keyed(tmp_path, "requests_per_minute=5", [FakeEngine(script=turnstile)]) as r:
        under_way = asyncio.create_task(r.chat("first"))
        await r.until(lambda: turnstile.order == ["first"])
        (tmp_path / "keys").write_text("another\n")
        while (await r.http.get("/v1/models")).status_code != 401:
            pass
        turnstile.let()
        assert (await under_way).status_code == 200


async def test_nothing_answers_without_a_key_while_the_file_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("")
    async with rig([FakeEngine()], api_keys_file=path) as r:
        assert (await r.chat()).status_code == 401
        assert (await r.http.get("/v1/models")).status_code == 401
        assert (await r.http.get("/health")).status_code == 200


async def test_keys_are_never_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    async with keyed(
        tmp_path, "tokens_per_minute=1000\nsk-typo tokens=5", access_log=True, admin_port=0
    ) as r:
        answers = [await r.chat(), await r.http.get("/v1/models")]
        r.http.headers["authorization"] = "Bearer sk-guess"
        answers.append(await r.chat())
        shown = (
            r.router.metrics.render().decode() + (await r.http.get(r.router.admin_url + "/decisions")).text
        )
        shown += "".join(answer.text + str(answer.headers) for answer in answers)
    assert "API key file: line 2" in caplog.text
    shown += caplog.text + "".join(capfd.readouterr())
    assert "key=client" in shown
    assert not [secret for secret in ("sk-client", "sk-typo", "sk-guess") if secret in shown]
    assert not any("sk-client" in str(request.headers) for request in r.engines[0].requests)


async def test_credentials_stay_at_the_edge() -> None:
    async with rig([FakeEngine()]) as r:
        secrets = {"x-api-key": "sk-1", "api-key": "sk-2", "proxy-authorization": "sk-3", "cookie": "sk-4"}
        r.http.headers.update(secrets)
        assert (await r.chat()).status_code == 200
        assert not secrets.keys() & r.engines[0].requests[0].headers.keys()


async def test_resume_is_refused_at_the_edge() -> None:
    async with rig([FakeEngine()]) as r:
        answer = await r.chat(stream=True, resume={"created": 1, "choices": [{"token_ids": [1]}]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "resume"
        assert not r.engines[0].requests


@pytest.mark.parametrize("count", [40])
async def test_whatever_the_ends_nothing_is_left(count: int) -> None:
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
