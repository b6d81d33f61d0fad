"""Embeddings through the router."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.pooling import EmbeddingRequest, encode_vector

from .fake_engine import MODEL, Connection, FakeEngine, Received
from .harness import Rig, rig

TEXT = "The quick brown fox jumps over the lazy dog. " * 60
VECTOR = [0.5, -0.25]


async def embed(connection: Connection, request: Received) -> None:
    """The engine's answer, as it would be on the wire."""
    inputs = request.json["input"]
    count = 1 if isinstance(inputs, str) else len(inputs)
    vector = encode_vector(VECTOR, request.json.get("encoding_format", "float"))
    data = [{"object": "embedding", "index": index, "embedding": vector} for index in range(count)]
    usage = {"prompt_tokens": 7 * count, "total_tokens": 7 * count}
    answer = {"object": "list", "model": MODEL, "data": data, "usage": usage}
    connection.answer(200, json.dumps(answer).encode())


async def post(r: Rig, **fields: Any) -> Any:
    return await r.http.post("/v1/embeddings", json={"model": MODEL, **fields})


async def test_openai_sdk() -> None:
    async with (
        rig([FakeEngine(script=embed)], fields={"aliases": ("small",)}) as r,
        openai.AsyncOpenAI(base_url=r.router.url + "/v1", api_key="none") as client,
    ):
        one = await client.embeddings.create(model=MODEL, input="hello")  # the SDK asks for base64
        assert one.data[0].embedding == VECTOR
        many = await client.embeddings.create(model="small", input=["a", "b", "c"], encoding_format="float")
        assert [item.index for item in many.data] == [0, 1, 2]
        assert many.usage.prompt_tokens == 21
        assert {received.path for received in r.engines[0].requests} == {"/v1/embeddings"}
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="absent", input="hello")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model=MODEL, input=["a", [1, 2]])  # type: ignore[list-item]
        assert refused.value.param == "input"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"] * 2000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_invalid_requests_are_refused_by_the_router(fields: dict[str, Any], param: str | None) -> None:
    async with rig([FakeEngine(script=embed)]) as r:
        answer = await post(r, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        if "encoding_format" in fields:
            assert answer.json()["error"]["message"].endswith("give one of float, base64")
        assert not r.engines[0].requests


async def test_the_methods_of_the_route() -> None:
    async with rig([FakeEngine(script=embed)]) as r:
        assert (await r.http.get("/v1/embeddings")).status_code == 405


async def test_a_cached_text_attracts() -> None:
    """The engine keeps inputs under the keys of a completion with the same prompt."""
    view = prompt_segments(EmbeddingRequest(input=TEXT).as_completion())
    hashes = chunk_hashes(view[0], chain_seed(MODEL))
    resident = {chunk: 60 * (position + 1) for position, chunk in enumerate(hashes)}
    async with rig([FakeEngine(script=embed) for _ in range(3)]) as r:
        r.engines[1].store(resident)
        await r.until(lambda: r.metric("index_chunks") == len(resident))
        for sent in (TEXT, ["x", TEXT]):
            answer = await post(r, input=sent)
            assert answer.headers["x-argosy-replica"] == "r1"
            assert answer.headers["x-argosy-route"] == "cached"
            assert int(answer.headers["x-argosy-predicted-tokens"]) == max(resident.values())
        other_salt = await post(r, input=TEXT, cache_salt="tenant-2")
        assert other_salt.headers["x-argosy-predicted-tokens"] == "0"


async def test_a_dead_replica_is_replaced() -> None:
    async def die(connection: Connection, _: Received) -> None:
        connection.die()

    async with rig([FakeEngine(script=die), FakeEngine(script=embed)], policy="round-robin") as r:
        for _ in range(4):
            assert (await post(r, input="a")).status_code == 200


async def test_large_batches_arrive_whole() -> None:
    async def large(connection: Connection, request: Received) -> None:
        data = [{"object": "embedding", "index": index, "embedding": [0.1] * 4096} for index in range(100)]
        usage = {"prompt_tokens": 100, "total_tokens": 100}
        connection.answer(200, json.dumps({"object": "list", "data": data, "usage": usage}).encode())

    async with rig([FakeEngine(script=large)]) as r:
        answer = await post(r, input=["a"] * 100)
        assert len(answer.content) > 1024 * 1024
        assert len(answer.json()["data"]) == 100
        assert r.metric('prompt_tokens_total{model="tiny",replica="r0"}') == 100
