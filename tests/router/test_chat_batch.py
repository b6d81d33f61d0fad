"""/v1/chat/completions/batch through the router."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.openai import decode_batch_request
from argosy_router.proxy.request_body import TokenEstimate, outputs_of

from .fake_engine import MODEL, Connection, FakeEngine, Received
from .harness import is_settled, rig

PATH = "/v1/chat/completions/batch"
TEXT = "The quick brown fox jumps over the lazy dog. " * 60
CHATS = [[{"role": "user", "content": f"{text} {TEXT}"}] for text in ("one", "two")]


async def answer(connection: Connection, _: Received) -> None:
    usage = {"prompt_tokens": 24, "completion_tokens": 6, "total_tokens": 30}
    connection.answer(200, json.dumps({"choices": [], "model": MODEL, "usage": usage}).encode())


@pytest.mark.parametrize("has_telemetry", [True, False])
async def test_a_batch_reaches_engines_as_it_is(has_telemetry: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": CHATS, "max_tokens": 5, "top_k": 3}
    async with rig([FakeEngine(script=answer, has_telemetry=has_telemetry)]) as r:
        told = await r.http.post(PATH, json=body)
        assert (told.status_code, told.json()["usage"]["completion_tokens"]) == (200, 6)
        (received,) = r.engines[0].requests
        assert (received.path, received.json) == (PATH, body)
        await r.until(lambda: is_settled(r))
        assert r.metric('completion_tokens_total{model="tiny",replica="r0"}') == 6
        refused = await r.http.post(PATH, json={**body, "stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


async def test_the_cached_prompts_of_its_chats_attract_a_batch() -> None:
    body = {"model": MODEL, "messages": CHATS}
    segments = prompt_segments(decode_batch_request(json.dumps(body).encode()))
    hashes = [chunk for chat in segments for chunk in chunk_hashes(chat, chain_seed(MODEL))]
    resident = dict.fromkeys(hashes, 60)
    async with rig([FakeEngine(script=answer) for _ in range(3)]) as r:
        r.engines[1].store(resident)
        await r.until(lambda: r.metric("index_chunks") == len(resident))
        told = await r.http.post(PATH, json=body)
        assert told.headers["x-argosy-replica"] == "r1"
        assert told.headers["x-argosy-route"] == "cached"


def test_every_chat_is_a_sequence() -> None:
    batch = decode_batch_request(json.dumps({"messages": CHATS * 3, "max_completion_tokens": 7}).encode())
    estimate = TokenEstimate(outputs_of(batch), 100, 50.0)
    assert (estimate.sequences, estimate.total) == (6, 142)
