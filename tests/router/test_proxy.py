"""A request's way through the router and back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from argosy_protocol.bearer_keys import internal_key
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    InternalError,
    TooManyRequests,
    Unavailable,
)
from argosy_protocol.fleet import FleetDocument
from argosy_protocol.headers import RESPONSE_ID
from argosy_protocol.openai import decode_request
from argosy_router.config import ClientLimits, ServerLimits
from argosy_router.proxy.downstream.error_headers import error_headers
from argosy_router.proxy.resilience import retry_budget
from argosy_router.proxy.upstream.relay import MAX_BUFFERED_BYTES

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import chat, raw, read_all, rig, service
from .test_life import request_bytes

STREAM = event("hel") + event("lo") + event("", "stop") + DONE


async def test_unary_answer_arrives_whole() -> None:
    async with rig([FakeEngine()]) as r:
        response = await r.chat()
        assert response.status_code == 200
        assert response.json()["choices"][0]["message"]["content"] == "hello"
        assert response.headers["content-type"] == "application/json"
        assert r.metric('requests_total{code="200",model="tiny"}') == 1


async def test_streamed_bytes_are_untouched() -> None:
    async with rig([FakeEngine()]) as r:
        response = await r.chat(stream=True)
        assert response.content == STREAM
        assert response.headers["content-type"] == "text/event-stream"


async def test_events_split_anywhere_arrive_whole_and_untouched() -> None:
    async def split(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        for start in range(0, len(STREAM), 11):
            connection.chunk(STREAM[start : start + 11])
            await connection.writer.drain()
        connection.end_stream()

    async with rig([FakeEngine(script=split)]) as r:
        assert (await r.chat(stream=True)).content == STREAM


async def test_openai_sdk() -> None:
    async with (
        rig([FakeEngine()]) as r,
        openai.AsyncOpenAI(base_url=r.router.url + "/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.create(**chat())
        assert answer.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(**chat(stream=True))
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**chat(model="absent"))
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**chat(temperature="hot"))


# headers


async def test_headers_towards_the_engine() -> None:
    key = internal_key(b"0123456789abcdef", "uid-1")
    async with rig([FakeEngine(key=key)], fleet_key=b"0123456789abcdef", api_keys=("client",)) as r:
        sent = {
            "authorization": "Bearer client",
            "x-request-id": "id-1.a_b",
            "x-argosy-internal-resume": "1",
            "x-argosy-replica": "r9",
            "x-forwarded-for": "1.2.3.4",
            "connection": "x-secret",
            "x-secret": "hop",
            "cookie": "c",
            "accept-encoding": "gzip",
            "traceparent": "00-1-2-3",
        }
        response = await r.http.post("/v1/chat/completions", json=chat(), headers=sent)
        assert response.status_code == 200
        headers = r.engines[0].requests[0].headers
        assert headers["authorization"] == f"Bearer {key}"
        assert response.headers["x-request-id"] == "id-1.a_b"
        assert headers["traceparent"] == "00-1-2-3"
        assert headers["host"] == f"127.0.0.1:{r.engines[0].port}"
        gone = sent.keys() - {"authorization", "x-request-id", "traceparent"}
        assert not gone & headers.keys()


@pytest.mark.parametrize("sent", ["a b", "ü", "x" * 129, ""])
async def test_unsafe_request_ids_are_replaced(sent: str) -> None:
    async with rig([FakeEngine()]) as r:
        headers = {"x-request-id": sent.encode()}
        response = await r.http.post("/v1/chat/completions", json=chat(), headers=headers)
        assert response.headers["x-request-id"] != sent
        assert r.engines[0].requests[0].headers[RESPONSE_ID] == response.headers["x-request-id"]


async def test_headers_towards_the_client() -> None:
    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(
            200,
            completion(),
            "content-type: application/json\r\nserver: x\r\nx-argosy-replica: forged\r\nconnection: x-hop\r\n"
            "x-hop: 1\r\nx-request-id: other\r\ndate: today\r\n",
        )

    async with rig([FakeEngine(script=answer)]) as r:
        headers = (await r.chat()).headers
        assert headers["x-argosy-replica"] == "r0"
        assert headers["x-argosy-route"] == "only"
        assert headers["x-argosy-predicted-tokens"] == "0"
        assert headers["date"] == "today"
        assert "server" not in headers
        assert "x-hop" not in headers
        assert len(headers.get_list("x-request-id")) == 1


# names


async def test_model_names() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        await engine.start()
    document = FleetDocument(
        services=(
            service(
                engines[:1], name="a", model="org/tiny", aliases=("small",), created="2026-01-01T00:00:00Z"
            ),
            service(
                engines[1:],
                name="b",
                uid="u2",
                model="small",
                aliases=("big",),
                created="2026-01-02T00:00:00Z",
            ),
        )
    )
    async with rig(engines, document=document) as r:
        listed = (await r.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["org/tiny", "small", "big"]
        assert listed[0]["max_model_len"] == 4096
        assert (await r.http.get("/v1/models/org/tiny")).json()["id"] == "org/tiny"
        assert (await r.http.get("/v1/models/default%2Fb")).json()["root"] == "small"
        assert (await r.http.get("/v1/models/none")).status_code == 404
        for name, engine, forwarded in (
            ("org/tiny", 0, "org/tiny"),
            ("small", 0, "small"),  # the older service owns the contested name
            ("big", 1, "big"),
            ("default/a", 0, "org/tiny"),  # the engine does not know its own resource's name
            ("default/b", 1, "small"),
        ):
            assert (await r.chat(model=name)).status_code == 200, name
            assert engines[engine].requests[-1].json["model"] == forwarded, name
    for engine in engines:
        await engine.stop()


async def test_rewriting_the_model_keeps_every_other_byte() -> None:
    body = (
        b'{"model":"default/svc","messages":[{"role":"user","content":"a\\u00e9 default/svc"}], '
        b'"seed":12345678901234567,"temperature":0.10,"x":{"model":"default/svc"}}'
    )
    async with rig([FakeEngine()]) as r:
        await r.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        got = r.engines[0].requests[0].body
        assert json.loads(got) == {**json.loads(body), "model": "tiny"}
        for kept in (
            b'"content":"a\\u00e9 default/svc"',
            b"12345678901234567",
            b"0.10",
            b'{"model":"default/svc"}',
        ):
            assert kept in got


async def test_known_names_forward_the_body_untouched() -> None:
    body = b' { "messages" : [ {"content":"x", "role":"user"} ] , "model":"tiny", "unknown": 1e2 } '
    async with rig([FakeEngine()]) as r:
        await r.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert r.engines[0].requests[0].body == body


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"messages":[]}', "application/json", 400),
        (b'{"model":"","messages":[{"role":"user","content":"a"}]}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"\xff\xfe{\x00", "application/json", 400),
        *[
            (
                b'{"model":"tiny","messages":[{"role":"user","content":"a"}],%b}' % field,
                "application/json",
                400,
            )
            for field in (
                b'"n":1e9',
                b'"n":1.0',
                b'"n":"1"',
                b'"n":true',
                b'"n":%d' % 2**70,
                b'"temperature":NaN',
                b'"temperature":Infinity',
                b'"temperature":1e400',
                b'"stop":"\xed\xa0\x80"',
                b'"tools":' + b"[" * 50_000 + b"]" * 50_000,
            )
        ],
        (b'\xef\xbb\xbf{"model":"tiny","messages":[{"role":"user","content":"a"}]}', "application/json", 400),
        ('{"model":"tiny","messages":[]}'.encode("utf-16"), "application/json", 400),
        (b'{"model":"tiny","messages":[{"role":"user","content":"a"}]}', "text/plain", 415),
    ],
)
async def test_bad_requests_never_reach_an_engine(content: bytes, kind: str, status: int) -> None:
    async with rig([FakeEngine()]) as r:
        response = await r.http.post("/v1/chat/completions", content=content, headers={"content-type": kind})
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert "x-request-id" in response.headers
        assert not r.engines[0].requests


async def test_of_a_key_given_twice_the_last_value_counts_on_both_hops() -> None:
    sent = b'{"model":"absent","messages":[{"role":"user","content":"a"}],"mod\\u0065l":"tiny"}'
    async with rig([FakeEngine()]) as r:
        answer = await r.http.post(
            "/v1/chat/completions", content=sent, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200
        received = r.engines[0].requests[0]
        assert received.body == sent
        assert decode_request("chat/completions", received.body).model == received.json["model"] == "tiny"


# keys


@pytest.mark.parametrize(
    ("path", "without_key"),
    [
        ("/health", 200),
        ("/ready", 200),
        ("/version", 200),
        ("/metrics", 401),
        ("/v1/models", 401),
        ("/v1/models/tiny", 401),
        ("/v1/chat/completions", 401),
        ("/", 401),
        ("//v1/models", 401),
        ("/v1/../health", 401),
        ("/%68ealth", 401),
        ("/health/", 401),
        ("/internal/telemetry", 401),
        ("/docs", 401),
    ],
)
async def test_every_route_but_three_needs_a_key(path: str, without_key: int) -> None:
    async with rig([FakeEngine()], api_keys=("k1", "k2")) as r:
        for credentials in (
            "",
            "Authorization: Bearer wrong\r\n",
            "Authorization: Basic k1\r\n",
            "Authorization: k1\r\n",
        ):
            async with raw(r.router) as (reader, writer):
                writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n{credentials}\r\n".encode())
                assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % without_key)
        response = await r.http.get("/v1/models", headers={"authorization": "bearer k2"})
        assert response.status_code == 200


async def test_methods_and_unknown_routes() -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.http.get("/v1/chat/completions")).status_code == 405
        assert (await r.http.post("/v1/models")).status_code == 405
        assert (await r.http.get("/nothing")).status_code == 404


# failing replicas


async def reset(connection: Connection, _: Received) -> None:
    connection.die()


async def die_in_body(connection: Connection, _: Received) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    await connection.writer.drain()
    connection.die()


async def die_before_event(connection: Connection, _: Received) -> None:
    connection.begin_stream()
    connection.chunk(event("half")[:20])
    await connection.writer.drain()
    connection.die()


async def unavailable(connection: Connection, _: Received) -> None:
    connection.answer(
        503, b'{"error":{"message":"busy"}}', "content-type: application/json\r\nretry-after: 7\r\n"
    )


async def unauthorized(connection: Connection, _: Received) -> None:
    connection.answer(401, b'{"error":{"message":"wrong internal key"}}')


async def garbage(connection: Connection, _: Received) -> None:
    connection.send(b"SSH-2.0-OpenSSH\r\n\r\n")


async def endless_header(connection: Connection, _: Received) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n")


async def silent(connection: Connection, _: Received) -> None:
    await connection.gone()


FAILURES: dict[str, Any] = {
    "reset": reset,
    "death in the body": die_in_body,
    "death before an event": die_before_event,
    "503": unavailable,
    "401": unauthorized,
    "garbage": garbage,
    "endless header": endless_header,
    "silence": silent,
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_before_the_first_byte_is_hidden(name: str) -> None:
    engines = [FakeEngine(script=FAILURES[name]), FakeEngine()]
    async with rig(engines, first_byte_timeout_s=0.2, request_timeout_s=0.2, policy="round-robin") as r:
        for stream in (False, True):
            before = len(engines[0].requests)
            for _ in range(2):  # one of two turns meets the failing replica
                response = await r.chat(stream=stream)
                assert response.status_code == 200
                assert response.headers["x-argosy-replica"] == "r1"
                assert response.content == (STREAM if stream else completion())
            assert len(engines[0].requests) == before + 1
            r.replica(0).health.cooldown_until = 0.0  # a busy one would not be asked again so soon
            r.router.fleet.changed()
        assert r.metric("retries_total") == 2
        assert all(replica.load.inflight == 0 for replica in r.router.fleet.replicas())
        assert all(replica.load.inflight_tokens == 0 for replica in r.router.fleet.replicas())


LAST_WORDS = {"reset": 502, "death in the body": 502, "503": 429, "401": 502, "silence": 504}


@pytest.mark.parametrize("name", LAST_WORDS)
async def test_the_last_failure_is_told(name: str) -> None:
    async with rig([FakeEngine(script=FAILURES[name])], first_byte_timeout_s=0.1, request_timeout_s=0.1) as r:
        response = await r.chat()
        assert response.status_code == LAST_WORDS[name]
        assert "error" in response.json()
        if name == "503":
            assert response.headers["retry-after"] == "7"
        assert "internal key" not in response.text
        assert r.replica(0).load.inflight == 0


async def test_nobody_there() -> None:
    async with rig([], document=FleetDocument(services=(service([]),))) as r:
        response = await r.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers["x-should-retry"] == "true"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (InternalError("a bug"), b"x-should-retry: false"),
        (Unavailable("not yet"), b"x-should-retry: true"),
        (TooManyRequests("too much"), b"x-should-retry: true"),
        (BadRequest("nonsense"), None),  # nobody repeats it anyway
    ],
)
def test_sdks_are_told_whether_to_try_again(error: ApiError, advice: bytes | None) -> None:
    lines = error_headers(error).splitlines()
    assert [line for line in lines if b"retry:" in line] == ([advice] if advice else [])


async def test_refused_connections_go_elsewhere_and_eject() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with rig(engines, policy="round-robin") as r:
        await engines[0].stop()
        for _ in range(4):
            response = await r.chat()
            assert (response.status_code, response.headers["x-argosy-replica"]) == (200, "r1")
        await r.until_state(0, "connecting")
        engines[0].script = engines[1].script
        await engines[0].start()
        await r.until_state(0, "synced")
        names = {(await r.chat()).headers["x-argosy-replica"] for _ in range(2)}
        assert names == {"r0", "r1"}


async def test_each_attempt_goes_to_another_replica() -> None:
    engines = [FakeEngine(script=reset) for _ in range(5)]
    async with rig(engines) as r:
        assert (await r.chat()).status_code == 502
        assert sorted(len(engine.requests) for engine in engines) == [0, 0, 1, 1, 1]


async def test_the_retry_budget_ends_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_budget, "FLOOR_PER_S", 0.0)
    monkeypatch.setattr(retry_budget, "MAX_CREDIT", 3.0)
    engines = [FakeEngine(script=unavailable) for _ in range(2)]
    async with rig(engines) as r:
        for _ in range(20):
            assert (await r.chat()).status_code == 429
        assert r.metric("retries_total") <= 3 + 20 * 0.2


async def test_stale_connections_are_replaced_without_blame() -> None:
    async with rig([FakeEngine()]) as r:
        engine = r.engines[0]
        assert (await r.chat()).status_code == 200
        answer = engine.script

        async def close_after_use(connection: Connection, request: Received) -> None:
            if engine.requests.count(request) and len(engine.requests) == 2:
                connection.die()  # as if the keep-alive timeout had passed while the request was on its way
            else:
                await answer(connection, request)

        engine.script = close_after_use
        assert (await r.chat()).status_code == 200
        assert len(engine.requests) == 3
        assert r.metric('retries_total{model="tiny",reason="stale"}') == 1
        assert r.metric("upstream_failures_total") == 0


async def test_connections_are_reused() -> None:
    async with rig([FakeEngine()]) as r:
        before = r.engines[0].connections
        for _ in range(5):
            await r.chat()
            await r.chat(stream=True)
        assert r.engines[0].connections == before + 1


async def test_a_dead_stream_ends_with_an_error_event() -> None:
    async def die_mid_stream(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        connection.chunk(event("lost in the middle")[:30])
        await connection.writer.drain()
        connection.die()

    async with rig([FakeEngine(script=die_mid_stream), FakeEngine(script=die_mid_stream)]) as r:
        response = await r.chat(stream=True)
        first, rest = response.content[: len(event("hel"))], response.content[len(event("hel")) :]
        assert first == event("hel")
        assert rest.startswith(b'data: {"error":')
        assert rest.endswith(b"\n\n")
        assert json.loads(rest[6:])["error"]["type"] == "upstream_error"
        assert b"lost" not in response.content
        assert sum(len(engine.requests) for engine in r.engines) == 1, "a stream that began is not repeated"
        async with openai.AsyncOpenAI(base_url=r.router.url + "/v1", api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(**chat(stream=True))
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass


async def test_a_stalled_stream_ends_with_an_error_event() -> None:
    async def stall(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await connection.gone()

    async with rig([FakeEngine(script=stall)], client=ClientLimits(idle_timeout_s=0.1)) as r:
        content = (await r.chat(stream=True)).content
        assert content.startswith(event("hel") + b'data: {"error":')


async def test_large_unary_answers_are_streamed() -> None:
    big = completion("x" * 3_000_000, prompt_tokens=1000, cached=7)

    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, big)

    async with rig([FakeEngine(script=answer)]) as r:
        assert (await r.chat()).content == big
        assert r.metric("actual_cached_tokens_total") == 7


@pytest.mark.parametrize("framing", ["content-length: 3000000", "transfer-encoding: chunked"])
async def test_a_large_answer_whose_replica_dies_never_looks_whole(framing: str) -> None:
    has_begun = asyncio.Event()

    async def die_midway(connection: Connection, _: Received) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%b\r\n\r\n" % framing.encode())
        part = b"x" * 2_000_000
        connection.chunk(part) if "chunked" in framing else connection.send(part)
        await has_begun.wait()
        connection.die()

    async with rig([FakeEngine(script=die_midway)]) as r, raw(r.router) as (reader, writer):
        writer.write(request_bytes().replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(MAX_BUFFERED_BYTES)
        has_begun.set()
        rest = await read_all(reader)
        assert not rest.endswith(b"0\r\n\r\n"), "the last chunk would say that this was all"
        await r.until(lambda: r.router.requests.inflight == 0)
        assert r.metric("interrupted_streams_total") == 1


# clients that leave or lag


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["reset", "half-close"])
async def test_a_client_that_leaves_aborts_the_engine(stream: bool, how: str) -> None:
    aborted = asyncio.Event()
    working = asyncio.Event()

    async def work(connection: Connection, _: Received) -> None:
        if stream:
            connection.begin_stream()
            connection.chunk(event("hel"))
        working.set()
        await connection.gone()
        aborted.set()

    async with rig([FakeEngine(script=work)]) as r, raw(r.router) as (_, writer):
        body = json.dumps(chat(stream=stream)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await asyncio.wait_for(working.wait(), 20)
        if how == "reset":
            writer.transport.abort()
        else:
            writer.write_eof()
        await r.until(lambda: r.router.requests.inflight == 0)
        for _ in range(1000):  # turns of the loop, some milliseconds: no timer stands between
            if not aborted.is_set():
                await asyncio.sleep(0)
        assert aborted.is_set()
        assert r.replica(0).load.inflight == 0
        assert r.metric("client_disconnects_total") == 1


async def test_a_slow_reader_pauses_the_engine_and_is_cut_off() -> None:
    sent = 0
    aborted = asyncio.Event()

    async def pour(connection: Connection, _: Received) -> None:
        nonlocal sent
        connection.begin_stream()
        connection.writer.transport.set_write_buffer_limits(high=1)
        try:
            while sent < 500_000_000:
                connection.chunk(event("x" * 65536))
                await connection.writer.drain()
                sent += 65536
        except ConnectionError:
            aborted.set()

    limits = ServerLimits(write_stall_s=0.2)
    async with rig([FakeEngine(script=pour)], server=limits) as r, raw(r.router) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps(chat(stream=True)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await asyncio.wait_for(aborted.wait(), 20)
        assert sent < 50_000_000, "the engine was paused when the sockets' buffers were full"
        await r.until(lambda: r.router.requests.inflight == 0)


# measuring


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_measured(stream: bool) -> None:
    usage = json.loads(completion(prompt_tokens=120, cached=96))["usage"]

    async def answer(connection: Connection, _: Received) -> None:
        if stream:
            connection.begin_stream()
            connection.chunk(event("a"))
            connection.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            connection.chunk(DONE)
            connection.end_stream()
        else:
            connection.answer(200, completion(prompt_tokens=120, cached=96))

    async with rig([FakeEngine(script=answer)]) as r:
        await r.chat("word " * 100, stream=stream)
        assert r.metric("prompt_tokens_total") == 120
        assert r.metric("actual_cached_tokens_total") == 96
        assert r.metric("predicted_cached_tokens_total") == 0
