"""OpenAI's Responses API through the router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.responses import decode_responses_request
from argosy_protocol.responses_chat import responses_as_chat
from response_stream import final_response, parsed_events

from .fake_engine import MODEL, Connection, FakeEngine, Received
from .harness import Rig, is_settled, rig
from .response_bodies import ITEM, PATH, body, stream, whole

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


async def answer(connection: Connection, request: Received) -> None:
    if request.path != PATH:
        connection.answer(200, b"{}")
    elif request.json.get("stream"):
        connection.begin_stream()
        connection.chunk(stream(request.json["model"]))
        connection.end_stream()
    else:
        connection.answer(200, json.dumps(whole(request.json["model"])).encode())


@asynccontextmanager
async def sdk(r: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{r.router.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openais_sdk() -> None:
    async with rig([FakeEngine(script=answer)]) as r, sdk(r) as client:
        told = await client.responses.create(**body())
        assert told.output_text == "hello"
        async with client.responses.stream(**body()) as events:
            final = await events.get_final_response()
        assert final.output_text == "hello"
        for received in r.engines[0].requests:
            assert received.headers["x-argosy-internal-resolved"]
            assert received.json["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**body(model="absent"))
        await r.until(lambda: is_settled(r))
        assert r.metric('prompt_tokens_total{model="tiny",replica="r0"}') == 24
        assert r.metric('completion_tokens_total{model="tiny",replica="r0"}') == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs"),
    ],
)
async def test_bad_requests_are_refused_by_the_router(fields: dict[str, Any], param: str) -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        told = await r.http.post(PATH, json=body(**fields))
        assert (told.status_code, told.json()["error"]["param"]) == (400, param)
        assert not r.engines[0].requests


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole conversation as input"),
        ({"background": True}, "wait for the answer, or stream it"),
    ],
)
async def test_a_router_without_storage_tells_what_to_do(fields: dict[str, Any], remedy: str) -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        told = (await r.http.post(PATH, json=body(**fields))).json()["error"]["message"]
        assert "--batch-url" in told
        assert told.endswith(remedy)


async def test_a_cached_chat_attracts_its_response() -> None:
    asked = body(instructions="Be kind.", input=[{"role": "user", "content": TEXT}])
    segments = prompt_segments(responses_as_chat(decode_responses_request(json.dumps(asked).encode())))
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


AGENT_TOOLS = [
    {"type": "namespace", "name": "agents", "tools": [{"type": "custom", "name": "exec"}]},
    {"type": "web_search"},
]
AGENT_HISTORY: list[dict[str, Any]] = [
    {"type": "additional_tools", "role": "developer", "tools": AGENT_TOOLS},
    {"role": "user", "content": TEXT},
    {"type": "shiny_call", "content": {"x": 1}, "arguments": {}},
    {"type": "custom_tool_call", "call_id": "c", "name": "exec", "namespace": "agents", "input": TEXT},
    {
        "type": "custom_tool_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": "u"}],
    },
]


async def test_what_agents_replay_is_routed_by_the_chat_that_engines_make_of_it() -> None:
    asked = body(input=AGENT_HISTORY)
    segments = prompt_segments(responses_as_chat(decode_responses_request(json.dumps(asked).encode())))
    hashes = chunk_hashes(segments[0], chain_seed(MODEL))
    resident = {chunk: 60 * (position + 1) for position, chunk in enumerate(hashes)}
    async with rig([FakeEngine(script=answer) for _ in range(3)]) as r:
        r.engines[1].store(resident)
        await r.until(lambda: r.metric("index_chunks") == len(resident))
        told = await r.http.post(PATH, json=asked)
        assert (told.status_code, told.headers["x-argosy-replica"]) == (200, "r1")
        assert int(told.headers["x-argosy-predicted-tokens"]) == max(resident.values())
        assert r.engines[1].requests[-1].json["input"] == AGENT_HISTORY


@pytest.mark.parametrize("is_stream", [False, True])
async def test_clients_are_told_which_tools_an_engine_has_dropped(is_stream: bool) -> None:
    dropped = "x-argosy-dropped-tools: web_search\r\n"

    async def dropping(connection: Connection, request: Received) -> None:
        if request.json.get("stream"):
            connection.begin_stream(dropped)
            connection.chunk(stream(MODEL))
            connection.end_stream()
        else:
            connection.answer(200, json.dumps(whole(MODEL)).encode(), dropped)

    async with rig([FakeEngine(script=dropping)]) as r:
        told = await r.http.post(PATH, json=body(tools=[{"type": "web_search"}], stream=is_stream))
        assert (told.status_code, told.headers["x-argosy-dropped-tools"]) == (200, "web_search")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            PATH,
            {
                "input": "Hi",
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "custom", "name": "exec"}],
                },
                "tools": [{"type": "custom", "name": "exec"}, {"type": "function", "name": "f"}],
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [{"role": "user", "content": "What are allowed_tools?"}],
                "tool_choice": {"type": "auto"},
                "tools": [{"name": "f", "input_schema": {}}],
            },
        ),
    ],
)
async def test_tools_reach_an_engine_in_the_form_of_their_api(path: str, fields: dict[str, Any]) -> None:
    """Only of chats the router resolves `allowed_tools`, for engines that do not know them."""
    async with rig([FakeEngine(script=answer)]) as r:
        told = await r.http.post(path, json={"model": MODEL, **fields})
        assert told.status_code == 200, told.text
        received = r.engines[0].requests[-1].json
        assert {name: received[name] for name in ("tools", "tool_choice")} == {
            name: fields[name] for name in ("tools", "tool_choice")
        }


async def test_models_are_listed_for_codex_and_for_anthropics_clients() -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        plain = (await r.http.get("/v1/models")).json()
        assert set(plain) == {"object", "data"}
        codex = (await r.http.get("/v1/models?client_version=0.171.0")).json()
        assert codex["data"] == plain["data"]
        assert [model["slug"] for model in codex["models"]] == [card["id"] for card in plain["data"]]
        version = {"anthropic-version": "2023-06-01"}
        listed = (await r.http.get("/v1/models", headers=version)).json()
        assert [(model["type"], model["id"]) for model in listed["data"]] == [("model", MODEL)]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
        one = (await r.http.get(f"/v1/models/{MODEL}", headers=version)).json()
        assert one == listed["data"][0]


async def test_other_engines_get_the_fields_of_the_api() -> None:
    fields = {
        "instructions": "Be kind.",
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "truncation": "auto",
        "top_k": 3,
    }
    async with rig([FakeEngine(script=answer, has_telemetry=False)]) as r:
        told = await r.http.post(PATH, json=body(**fields, stream=True, rid="x"))
        assert final_response(parsed_events(told.content))["output"] == [ITEM]
        assert r.engines[0].requests[0].json == body(**fields, stream=True, store=False)
        assert "x-argosy-internal-resolved" not in r.engines[0].requests[0].headers


async def test_only_the_responses_own_model_is_renamed() -> None:
    """The schema of a tool may have a field of that name."""
    tools = [{"type": "function", "name": "f", "parameters": {"model": "engine-name"}}]

    async def named(connection: Connection, request: Received) -> None:
        if request.json.get("stream"):
            await answer(connection, request)
        else:
            connection.answer(200, json.dumps(whole("engine-name", tools=tools)).encode())

    engine = FakeEngine(model="engine-name", script=named)
    async with rig([engine], fields={"engine_model": "engine-name"}) as r:
        told = (await r.http.post(PATH, json=body())).json()
        assert (told["model"], told["tools"]) == (MODEL, tools)
        streamed = final_response(parsed_events((await r.http.post(PATH, json=body(stream=True))).content))
        assert streamed["model"] == MODEL


async def test_an_answer_that_is_not_utf8_reaches_the_client_as_it_is() -> None:
    made = json.dumps(whole("engine-name")).encode().replace(b"{", b'{"\xff":1,', 1)

    async def garbled(connection: Connection, request: Received) -> None:
        connection.answer(200, made)

    engine = FakeEngine(model="engine-name", script=garbled)
    async with rig([engine], fields={"engine_model": "engine-name"}) as r:
        assert (await r.http.post(PATH, json=body())).content == made


async def test_another_replica_answers_for_one_that_fails() -> None:
    async def die(connection: Connection, _: Received) -> None:
        connection.die()

    engines = [FakeEngine(script=die), FakeEngine(script=answer)]
    async with rig(engines) as r:
        for stream_ in (False, True, False, True):
            told = await r.http.post(PATH, json=body(stream=stream_))
            assert (told.status_code, told.headers["x-argosy-replica"]) == (200, "r1")
        assert r.engines[0].requests


async def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    async def half(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(stream(request.json["model"])[:400].rpartition(b"\n\n")[0] + b"\n\n")
        await connection.writer.drain()
        connection.die()

    async with rig([FakeEngine(script=half)]) as r, sdk(r) as client:
        with pytest.raises(openai.APIError):
            async with client.responses.stream(**body()) as events:
                await events.until_done()


COUNT = f"{PATH}/input_tokens"


async def count(connection: Connection, request: Received) -> None:
    connection.answer(200, b'{"object":"response.input_tokens","input_tokens":12}')


async def test_input_tokens_are_counted_by_a_replica() -> None:
    async with rig([FakeEngine(script=count)]) as r, sdk(r) as client:
        assert (await client.responses.input_tokens.count(model=MODEL, input="hi")).input_tokens == 12
        (received,) = r.engines[0].requests
        assert (received.path, received.json) == (COUNT, {"model": MODEL, "input": "hi"})
        assert received.headers["x-argosy-internal-resolved"]
        told = await r.http.post(COUNT, json=body(previous_response_id="resp_1"))
        assert (told.status_code, told.json()["error"]["param"]) == (400, "previous_response_id")
        assert len(r.engines[0].requests) == 1
        await r.until(lambda: is_settled(r))


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "resp_1/input_items")],
)
async def test_a_router_without_storage_says_that_it_keeps_no_responses(method: str, path: str) -> None:
    async with rig([FakeEngine()]) as r:
        told = await r.http.request(method, f"{PATH}/{path}")
        assert (told.status_code, "--batch-url" in told.json()["error"]["message"]) == (404, True)
