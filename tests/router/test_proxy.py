"""Requests through the router and back: bytes, headers, model names, routes."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_protocol.headers import RESPONSE_ID, internal_key
from argosy_protocol.openai import decode_request
from argosy_router.fleet.fleet import FleetSnapshot
from case_tables import wrong_answers

from .fake_engine import DONE, NORMAL_STREAM, Connection, FakeEngine, Received, completion, event
from .harness import chat, raw, rig, service


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
        assert response.content == NORMAL_STREAM
        assert response.headers["content-type"] == "text/event-stream"


async def test_events_split_anywhere_arrive_whole_and_untouched() -> None:
    async def split(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        for start in range(0, len(NORMAL_STREAM), 11):
            connection.chunk(NORMAL_STREAM[start : start + 11])
            await connection.writer.drain()
        connection.end_stream()

    async with rig([FakeEngine(script=split)]) as r:
        assert (await r.chat(stream=True)).content == NORMAL_STREAM


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


@pytest.mark.parametrize(("asked", "sent"), [("id-1.a_b", None), ("other", "id-1.a_b")])
async def test_the_body_asks_for_an_id_if_no_header_does(asked: str, sent: str | None) -> None:
    async with rig([FakeEngine()]) as r:
        headers = {} if sent is None else {"x-request-id": sent}
        response = await r.http.post("/v1/chat/completions", json=chat(request_id=asked), headers=headers)
        assert response.headers["x-request-id"] == "id-1.a_b"
        assert r.engines[0].requests[0].headers[RESPONSE_ID] == "id-1.a_b"


async def test_an_unsafe_id_in_a_body_is_refused() -> None:
    async with rig([FakeEngine()]) as r:
        response = await r.http.post("/v1/chat/completions", json=chat(request_id="a b"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
        assert response.headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/models", "GET, HEAD"),
        ("DELETE", "/ping", "GET, HEAD, POST"),
    ],
)
async def test_a_path_names_the_methods_that_it_takes(method: str, path: str, allowed: str) -> None:
    async with rig([FakeEngine()]) as r:
        response = await r.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


async def test_sagemaker_may_post_its_ping() -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.http.post("/ping")).status_code == 200


async def test_a_model_that_is_not_known_yet_is_no_missing_one() -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.http.get("/v1/models/absent")).status_code == 404
        r.router.fleet.apply(FleetSnapshot(unheard=1))
        response = await r.http.get("/v1/models/absent")
        assert (response.status_code, response.headers["x-should-retry"]) == (503, "true")


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
        none = await r.http.get("/v1/models/none")
        assert none.status_code == 404
        assert none.json()["error"]["message"] == (
            "the model `none` does not exist; models: 'org/tiny', 'small', 'big'"
        )
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


BAD_REQUESTS: list[tuple[bytes, str, int]] = [
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
            b'"n":1.5',
            b'"n":"one"',
            b'"n":true',
            b'"n":"1.5"',
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
]


async def test_bad_requests_never_reach_an_engine() -> None:
    told = []
    async with rig([FakeEngine()]) as r:
        for content, kind, status in BAD_REQUESTS:
            headers = {"content-type": kind}
            response = await r.http.post("/v1/chat/completions", content=content, headers=headers)
            error = response.json().get("error", {})
            is_of_type = error.get("code") == "unsupported_media_type"
            came = (response.status_code, error.get("type"), is_of_type, "x-request-id" in response.headers)
            told.append((content, (status, "invalid_request_error", status == 415, True), came))
        assert not r.engines[0].requests
    assert wrong_answers(told) == {}


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


# routes


async def test_load_is_the_number_of_requests_in_flight() -> None:
    release = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        await release.wait()
        connection.answer(200, b"{}")

    async with rig([FakeEngine(script=script)]) as r:
        assert (await r.http.get("/load")).json() == {"server_load": 0}
        asking = asyncio.create_task(r.chat())
        await r.until(lambda: bool(r.engines[0].requests))
        assert (await r.http.get("/load")).json() == {"server_load": 1}
        release.set()
        await asking


@pytest.mark.parametrize(
    ("path", "without_key"),
    [
        ("/health", 200),
        ("/ready", 200),
        ("/version", 200),
        ("/ping", 200),
        ("/load", 401),
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
async def test_every_route_but_four_needs_a_key(path: str, without_key: int) -> None:
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


async def test_connections_are_reused() -> None:
    async with rig([FakeEngine()]) as r:
        before = r.engines[0].connections
        for _ in range(5):
            await r.chat()
            await r.chat(stream=True)
        assert r.engines[0].connections == before + 1


async def test_large_unary_answers_are_streamed() -> None:
    big = completion("x" * 3_000_000, prompt_tokens=1000, cached=7)

    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, big)

    async with rig([FakeEngine(script=answer)]) as r:
        assert (await r.chat()).content == big
        assert r.metric("actual_cached_tokens_total") == 7


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
