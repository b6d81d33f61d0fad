"""/classify, /pooling, /score and /rerank through the router."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.pooling import EmbeddingRequest, PromptFields

from .fake_engine import MODEL, Connection, FakeEngine, Received
from .harness import Rig, rig

TEXT = "The quick brown fox jumps over the lazy dog. " * 60
PAIR = {"queries": "hello", "documents": ["a", "b"]}
RANKED = {"query": "hello", "documents": ["a", "b"]}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
REQUESTS = [
    ("/classify", {"input": ["hello", "b"]}),
    ("/classify", CHAT),
    ("/pooling", {"input": [1, 2, 3], "task": "token_embed", "encoding_format": "bytes"}),
    ("/pooling", CHAT),
    ("/v1/embeddings", {**CHAT, "truncate_prompt_tokens": -1, "embed_dtype": "float16", "dimensions": 3}),
    ("/score", PAIR),
    ("/v1/score", {"text_1": ["a"], "text_2": "b"}),
    ("/v1/score", {"data_1": "a", "data_2": {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}}),
    ("/rerank", RANKED),
    ("/v1/rerank", {**RANKED, "top_n": 1, "max_tokens_per_doc": 4}),
    ("/v2/rerank", {**RANKED, "instruction": "i", "chat_template_kwargs": {"k": 1}, "use_activation": False}),
]


async def answer(connection: Connection, request: Received) -> None:
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    connection.answer(
        200, json.dumps({"object": "list", "model": MODEL, "data": [], "usage": usage}).encode()
    )


async def post(r: Rig, path: str, **fields: Any) -> Any:
    return await r.http.post(path, json={"model": MODEL, **fields})


@pytest.mark.parametrize(
    ("path", "fields"), REQUESTS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_a_request_arrives_as_it_was_sent(path: str, fields: dict[str, Any]) -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        sent = await post(r, path, **fields)
        assert sent.status_code == 200, sent.text
        (received,) = r.engines[0].requests
        assert received.path == path
        assert received.json == {"model": MODEL, **fields}
        assert r.metric('prompt_tokens_total{model="tiny",replica="r0"}') == 7


@pytest.mark.parametrize(
    ("path", "fields"), REQUESTS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_engines_of_other_makes_get_the_same_fields(path: str, fields: dict[str, Any]) -> None:
    async with rig([FakeEngine(script=answer, has_telemetry=False)]) as r:
        assert (await post(r, path, **fields, invented=1)).status_code == 200
        assert r.engines[0].requests[-1].json == {"model": MODEL, **fields}


@pytest.mark.parametrize("has_telemetry", [True, False])
async def test_v1_classify_is_sent_as_classify(has_telemetry: bool) -> None:
    """vLLM's engines have no /v1/classify."""
    async with rig([FakeEngine(script=answer, has_telemetry=has_telemetry)]) as r:
        sent = await post(r, "/v1/classify", input=["hello", "b"])
        assert sent.status_code == 200, sent.text
        (received,) = r.engines[0].requests
        assert (received.path, received.json) == ("/classify", {"model": MODEL, "input": ["hello", "b"]})
        refused = await post(r, "/v1/classify")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/classify", {}, "input"),
        ("/classify", {"input": "a", **CHAT}, "messages"),
        ("/pooling", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
        ("/score", {"queries": "a", "documents": ["b"] * 2000}, "documents"),
        ("/rerank", {"documents": ["b"]}, "query"),
        ("/rerank", {"query": "a" * 100_000, "documents": ["b"] * 1000}, "documents"),
        ("/v2/rerank", {**RANKED, "top_n": -1}, "top_n"),
        ("/rerank", {**RANKED, "data_parallel_rank": 1}, "data_parallel_rank"),
        ("/rerank", {**RANKED, "kv_transfer_params": {}}, "kv_transfer_params"),
    ],
    ids=str,
)
async def test_invalid_requests_are_refused_by_the_router(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with rig([FakeEngine(script=answer)]) as r:
        refused = await post(r, path, **fields)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
        assert not r.engines[0].requests


async def test_other_names_of_the_model() -> None:
    async with rig([FakeEngine(script=answer)], fields={"aliases": ("small",)}) as r:
        for path, fields in REQUESTS:
            found = await r.http.post(path, json={"model": "small", **fields})
            assert found.status_code == 200
            assert (await r.http.post(path, json={"model": "absent", **fields})).status_code == 404
            assert (await r.http.get(path)).status_code == 405


async def test_a_cached_query_attracts() -> None:
    """A classifier's prompts begin with the query, so that all of its pairs find it in one cache."""
    (segments,) = prompt_segments(EmbeddingRequest(input=TEXT).as_generation())
    hashes = chunk_hashes(segments, chain_seed(MODEL))
    resident = {chunk: 60 * (position + 1) for position, chunk in enumerate(hashes)}
    async with rig([FakeEngine(script=answer) for _ in range(3)]) as r:
        r.engines[1].store(resident)
        await r.until(lambda: r.metric("index_chunks") == len(resident))
        for path, fields in (
            ("/rerank", {"query": TEXT, "documents": ["a", "b"]}),
            ("/score", {"text_1": TEXT, "text_2": "a"}),
            ("/classify", {"input": TEXT}),
        ):
            found = await post(r, path, **fields)
            assert found.headers["x-argosy-replica"] == "r1"
            assert found.headers["x-argosy-route"] == "cached"


def test_every_prompt_of_the_endpoints_costs_no_output() -> None:
    chat = PromptFields(messages=[], input=None)
    assert chat.as_generation().max_tokens == 0
    assert PromptFields(input="a").as_generation().max_tokens == 0
