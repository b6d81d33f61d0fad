"""Conversations of OpenAI's SDK through a router that keeps their state, with real engines behind it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from argosy_batch.config import BatchConfig

from .engine_processes import TOOL, EnginePool, document
from .harness import rig

pytestmark = pytest.mark.timeout(300)

WEATHER: Any = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]


AGENT_HISTORY: Any = [
    {
        "type": "additional_tools",
        "role": "developer",
        "tools": [
            {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]},
            {"type": "web_search"},
        ],
    },
    {"role": "user", "content": "Find the largest file. " * 20},
    {
        "type": "web_search_call",
        "id": "ws",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    },
    {"type": "custom_tool_call", "call_id": "c", "name": "exec", "namespace": "functions", "input": "ls -S"},
    {
        "type": "custom_tool_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": "a b c " * 40}, {"type": "input_image", "image_url": "u"}],
    },
    {"type": "shiny_call", "content": {"x": 1}},
]


@pytest.mark.parametrize("path", ["stored", "sent"])
async def test_a_conversation_of_an_agent_is_continued_where_it_is_cached(
    engine_pool: EnginePool, tmp_path: Path, path: str
) -> None:
    files = BatchConfig(storage=str(tmp_path / "storage"))
    async with rig(document=document(engine_pool.take(1), 0), wait=False, storage=files) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        asked = {"model": "tiny", "temperature": 0, "max_output_tokens": 8}
        opening = {"role": "user", "content": f"By way of {path}."}
        history = [AGENT_HISTORY[0], opening, *AGENT_HISTORY[1:]]
        first = await r.http.post("/v1/responses", json={**asked, "input": history})
        assert first.status_code == 200, first.text
        assert first.headers["x-argosy-dropped-tools"] == "web_search"
        more = {"role": "user", "content": "And the smallest?"}
        given: dict[str, Any] = {"input": [*history, *first.json()["output"], more]}
        if path == "stored":
            given = {"input": [more], "previous_response_id": first.json()["id"]}
        await r.until(lambda: r.metric("index_chunks") > 0)
        then = await r.http.post("/v1/responses", json={**asked, **given})
        assert then.status_code == 200, then.text
        cached = then.json()["usage"]["input_tokens_details"]["cached_tokens"]
        predicted = int(then.headers["x-argosy-predicted-tokens"])
        assert 0 < predicted <= cached + 32


async def test_a_conversation_with_a_tool(engine_pool: EnginePool, tmp_path: Path) -> None:
    files = BatchConfig(storage=str(tmp_path / "storage"))
    async with rig(document=document(engine_pool.take(1), 0), wait=False, storage=files) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        async with openai.AsyncOpenAI(base_url=f"{r.router.url}/v1", api_key="none", max_retries=0) as client:
            async with client.responses.stream(
                model="tiny", input="What is the weather in Paris?", tools=[WEATHER], temperature=0
            ) as events:
                calling = await events.get_final_response()
            call = calling.output[-1]
            assert isinstance(call, ResponseFunctionToolCall)
            assert json.loads(call.arguments) == {"city": "Paris"}
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
            answer = await client.responses.create(
                model="tiny", input=[result], previous_response_id=calling.id, tools=[WEATHER], temperature=0
            )
            assert answer.output_text
            assert answer.usage is not None
            assert answer.usage.input_tokens_details.cached_tokens
            assert (await client.responses.retrieve(answer.id)).to_dict() == answer.to_dict()
            listed = await client.responses.input_items.list(answer.id, order="asc")
            assert [item.type for item in listed.data][-2:] == ["function_call", "function_call_output"]
            queued = await client.responses.create(
                model="tiny", input="And in Rome?", previous_response_id=answer.id, background=True
            )
            async with asyncio.timeout(120):
                while (done := await client.responses.retrieve(queued.id)).status == "queued":
                    pass
            assert (done.status, done.previous_response_id) == ("completed", answer.id)
            events = await client.responses.create(
                model="tiny", input="And in Oslo?", background=True, stream=True
            )
            told = [event async for event in events]
            assert [event.type for event in told[:3]] == [
                "response.created",
                "response.queued",
                "response.in_progress",
            ]
            assert [event.sequence_number for event in told] == list(range(len(told)))
