"""Anthropic's Messages API through the router."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from argosy_protocol.anthropic import as_chat, decode_messages_request
from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.proxy.relay import StreamRelay
from message_events import message, parsed

from .fake_engine import MODEL, Connection, FakeEngine, Received
from .harness import Rig, is_settled, raw, rig
from .keyed_rig import stop_clock

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TEXT = "The quick brown fox jumps over the lazy dog. " * 60
USAGE = {
    "input_tokens": 7,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 5,
    "output_tokens": 3,
    "output_tokens_details": {"thinking_tokens": 0},
}


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 16,
        "messages": [{"role": "user", "content": "hi"}],
        **fields,
    }


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def whole(model: str = MODEL, **fields: Any) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
        **fields,
    }


def stream(model: str = MODEL) -> bytes:
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    return b"".join(
        (
            event("message_start", message=whole(model, content=[], stop_reason=None)),
            event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            event("ping"),
            event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hello"}),
            event("content_block_stop", index=0),
            event("message_delta", delta=end, usage=USAGE),
            event("message_stop"),
        )
    )


async def answer(connection: Connection, request: Received) -> None:
    if request.path == COUNT:
        connection.answer(200, b'{"input_tokens":12}')
    elif request.json.get("stream"):
        connection.begin_stream()
        connection.chunk(stream(request.json["model"]))
        connection.end_stream()
    else:
        connection.answer(200, json.dumps(whole(request.json["model"])).encode())


@asynccontextmanager
async def sdk(r: Rig, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=r.router.url, api_key=key, max_retries=0) as client:
        yield client


@asynccontextmanager
async def keyed(tmp_path: Path, line: str = "") -> AsyncIterator[Rig]:
    """A router with one key."""
    path = tmp_path / "keys"
    path.write_text(f"sha256:{hashlib.sha256(b'sk-client').hexdigest()} name=client {line}\n")
    async with rig([FakeEngine(script=answer)], api_keys_file=path) as r:
        yield r


def check_error(response: httpx.Response, status: int, kind: str, message: str = "") -> None:
    assert (response.status_code, response.json()["type"]) == (status, "error")
    error = response.json()["error"]
    assert error["type"] == kind
    assert message in error["message"]
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_anthropics_sdk(tmp_path: Path) -> None:
    """It sends its key as `x-api-key`."""
    async with keyed(tmp_path) as r, sdk(r, "sk-client") as client:
        response = await client.messages.with_raw_response.create(**body())
        one = await response.parse()
        assert (one.content[0].type, one.stop_reason) == ("text", "end_turn")
        assert response.request_id
        async with client.messages.stream(**body()) as events:
            final = await events.get_final_message()
        assert [getattr(block, "text", None) for block in final.content] == ["hello"]
        assert final.usage.output_tokens == 3
        counted = await client.messages.count_tokens(model=MODEL, messages=body()["messages"])
        assert counted.input_tokens == 12
        assert [received.path for received in r.engines[0].requests] == [PATH, PATH, COUNT]
        for received in r.engines[0].requests:
            assert received.headers["anthropic-version"] == client.default_headers["anthropic-version"]
            assert "sk-client" not in str(received.headers)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**body(model="absent"))
        await r.until(lambda: is_settled(r))
        assert r.metric('prompt_tokens_total{model="tiny",replica="r0"}') == 24
        assert r.metric('completion_tokens_total{model="tiny",replica="r0"}') == 6


async def test_a_key_may_come_in_either_header(tmp_path: Path) -> None:
    async with keyed(tmp_path) as r:
        for path in (PATH, "/v1/models"):
            for headers, status in (
                ({"x-api-key": "sk-client"}, 200),
                ({"authorization": "Bearer sk-client"}, 200),
                ({"authorization": "Bearer wrong", "x-api-key": "sk-client"}, 401),
                ({"x-api-key": "wrong"}, 401),
                ({"x-api-key": ""}, 401),
                ({}, 401),
            ):
                method = "GET" if path == "/v1/models" else "POST"
                content = {} if method == "GET" else {"json": body()}
                told = await r.http.request(method, path, headers=headers, **content)
                assert told.status_code == status, headers
        check_error(await r.http.post(PATH, json=body()), 401, "authentication_error", "x-api-key")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (PATH, {"max_tokens": 0}, "max_tokens"),
        (PATH, {"messages": []}, "messages"),
        (PATH, {"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        (PATH, {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        (PATH, {"stream": True, "resume": {"token_ids": [5]}}, "resume is internal to engines and refused"),
        (PATH, {"kv_transfer_params": {}}, "kv_transfer_params"),
        (COUNT, {"messages": []}, "messages"),
    ],
)
async def test_bad_requests_are_refused_by_the_router(
    path: str, fields: dict[str, Any], message: str
) -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        check_error(await r.http.post(path, json=body(**fields)), 400, "invalid_request_error", message)
        assert not r.engines[0].requests


async def test_the_routers_other_errors_have_anthropics_shape(tmp_path: Path) -> None:
    async with keyed(tmp_path, "requests_per_minute=3") as r:  # two are refused for their content
        stop_clock(r)
        r.http.headers["x-api-key"] = "sk-client"
        check_error(await r.http.get(PATH), 405, "invalid_request_error")
        check_error(await r.http.post(PATH + "/batches", json={}), 404, "not_found_error")
        check_error(await r.http.post(PATH, json=body(model="absent")), 404, "not_found_error", "absent")
        async with raw(r.router) as (reader, writer):
            head = f"POST {PATH} HTTP/1.1\r\nhost: r\r\nx-api-key: sk-client\r\ncontent-length: {1 << 30}\r\n\r\n"
            writer.write(head.encode())
            refused = await reader.readuntil(b'"}}')
            assert refused.startswith(b"HTTP/1.1 413 ")
            assert b'{"type":"error","error":{"type":"request_too_large"' in refused
        assert (await r.http.post(PATH, json=body())).status_code == 200
        check_error(await r.http.post(PATH, json=body()), 429, "rate_limit_error")


async def test_without_a_replica_that_answers_clients_are_told_so_in_their_shape() -> None:
    async def busy(connection: Connection, request: Received) -> None:
        if request.json.get("stream"):
            connection.die()
        else:
            connection.answer(503, b'{"type":"error","error":{"type":"overloaded_error","message":"full"}}')

    async with rig([FakeEngine(script=busy)]) as r:
        check_error(await r.http.post(PATH, json=body()), 429, "rate_limit_error")
        check_error(await r.http.post(PATH, json=body(stream=True)), 502, "api_error")


async def test_an_answer_of_the_engine_passes_as_it_is() -> None:
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long"}}

    async def refuse(connection: Connection, _: Received) -> None:
        connection.answer(400, json.dumps(error).encode())

    async with rig([FakeEngine(script=refuse)]) as r:
        told = await r.http.post(PATH, json=body())
        assert (told.status_code, told.json()) == (400, error)


async def test_a_cached_chat_attracts_its_message() -> None:
    asked = body(system="Be kind.", messages=[{"role": "user", "content": [{"type": "text", "text": TEXT}]}])
    segments = prompt_segments(as_chat(decode_messages_request(json.dumps(asked).encode())))
    hashes = chunk_hashes(segments[0], chain_seed(MODEL))
    resident = {chunk: 60 * (position + 1) for position, chunk in enumerate(hashes)}
    same = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": TEXT}]
    async with rig([FakeEngine(script=answer) for _ in range(3)]) as r:
        r.engines[1].store(resident)
        await r.until(lambda: r.metric("index_chunks") == len(resident))
        for told in (
            await r.http.post(PATH, json=asked),
            await r.http.post("/v1/chat/completions", json={"model": MODEL, "messages": same}),
        ):
            assert told.headers["x-argosy-replica"] == "r1"
            assert told.headers["x-argosy-route"] == "cached"
            assert int(told.headers["x-argosy-predicted-tokens"]) == max(resident.values())
        salted = await r.http.post(PATH, json={**asked, "cache_salt": "tenant-2"})
        assert salted.headers["x-argosy-predicted-tokens"] == "0"


async def test_other_engines_get_the_fields_of_the_api() -> None:
    fields = {
        "system": "Be kind.",
        "stop_sequences": ["END"],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "metadata": {"user_id": "u"},
        "top_k": 3,
    }
    async with rig([FakeEngine(script=answer, has_telemetry=False)]) as r:
        told = await r.http.post(PATH, json=body(**fields, stream=True, rid="x"))
        assert message(parsed(told.content))["content"] == [{"type": "text", "text": "hello"}]
        assert r.engines[0].requests[0].json == body(**fields, stream=True)


async def test_other_engines_get_no_fields_that_were_not_decoded() -> None:
    """Neither those of chats, whose bounds were not checked, nor those inside of `vllm_xargs`."""
    unchecked = {
        "vllm_xargs": {"kv_transfer_params": "x"},
        "n": 64,
        "ignore_eos": True,
        "max_completion_tokens": 9,
    }
    async with rig([FakeEngine(script=answer, has_telemetry=False)]) as r:
        for path, known in (
            (PATH, body()),
            (COUNT, {name: body()[name] for name in ("model", "messages")}),
            ("/tokenize", {"model": MODEL, "prompt": "hi"}),
            ("/detokenize", {"model": MODEL, "tokens": [1]}),
            ("/v1/embeddings", {"model": MODEL, "input": "hi"}),
        ):
            await r.http.post(path, json={**known, **unchecked, "container": None, "priority": 0})
            got = r.engines[0].requests[-1]
            assert (got.path, {**got.json, "priority": 0}) == (path, {**known, "priority": 0})


def documented(message_usage: dict[str, int], delta_usage: dict[str, int], num_deltas: int) -> bytes:
    """A stream with the usage that an engine of another make reports."""
    begun = whole(content=[], stop_reason=None, usage=message_usage)
    delta = event(
        "content_block_delta", index=0, delta={"type": "text_delta", "text": "event: message_delta"}
    )
    return b"".join(
        (
            event("message_start", message=begun),
            event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            delta * num_deltas,
            event("content_block_stop", index=0),
            event("message_delta", delta={"stop_reason": "end_turn"}, usage=delta_usage),
            event("message_stop"),
        )
    )


@pytest.mark.parametrize(
    ("begun", "ended", "prompt_tokens"),
    [
        ({"input_tokens": 25, "output_tokens": 1}, {"output_tokens": 40}, 25),
        ({"input_tokens": 20, "cache_read_input_tokens": 5, "output_tokens": 1}, {"output_tokens": 40}, 25),
        ({"input_tokens": 25, "output_tokens": 1}, {"input_tokens": 0, "output_tokens": 40}, 25),
        ({"input_tokens": 0, "output_tokens": 0}, {"input_tokens": 25, "output_tokens": 40}, 25),
    ],
)
@pytest.mark.parametrize("num_deltas", [1, 40])
async def test_other_engines_streams_are_counted_by_their_last_usage(
    begun: dict[str, int], ended: dict[str, int], prompt_tokens: int, num_deltas: int
) -> None:
    async def told(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        for part in documented(begun, ended, num_deltas).splitlines(keepends=True):
            connection.chunk(part)
        connection.end_stream()

    async with rig([FakeEngine(script=told, has_telemetry=False)]) as r:
        assert (await r.http.post(PATH, json=body(stream=True))).status_code == 200
        await r.until(lambda: is_settled(r))
        assert r.metric('prompt_tokens_total{model="tiny",replica="r0"}') == prompt_tokens
        assert r.metric('completion_tokens_total{model="tiny",replica="r0"}') == 40


def test_the_usage_at_the_beginning_of_a_stream_is_not_its_whole() -> None:
    """A stream that ends before it reports its output tokens is counted by what its events show."""
    whole_stream = documented({"input_tokens": 25, "output_tokens": 0}, {"output_tokens": 9}, 12)
    relay = StreamRelay(None, BodyReservation(BodyMemory(0), None, 0))
    relay.feed(whole_stream[: whole_stream.index(b"event: content_block_stop")])
    assert relay.usage is None
    assert relay.tokens(bytes_per_token=4.0) >= 12


async def test_only_the_messages_own_model_is_renamed() -> None:
    """The input of a tool may have a field of that name."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"model": "engine-name"}}

    async def named(connection: Connection, request: Received) -> None:
        if request.json.get("stream"):
            await answer(connection, request)
        else:
            connection.answer(200, json.dumps(whole("engine-name", content=[call])).encode())

    engine = FakeEngine(model="engine-name", script=named)
    async with rig([engine], fields={"engine_model": "engine-name"}) as r:
        told = (await r.http.post(PATH, json=body())).json()
        assert (told["model"], told["content"]) == (MODEL, [call])
        streamed = message(parsed((await r.http.post(PATH, json=body(stream=True))).content))
        assert streamed["model"] == MODEL
        assert {received.json["model"] for received in engine.requests} == {"engine-name"}
