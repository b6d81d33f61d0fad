"""No table of the engine grows with the number of requests served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import httpx
import pytest

from argosy_engine.api.app import build_app
from argosy_engine.api.served_engine import Engine
from argosy_engine.config import EngineArgs
from argosy_engine.core import prefix_residency
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.messages import EngineCoreOutputs, EngineCoreRequest
from argosy_engine.params import SamplingParams
from container_census import census

ARGS = EngineArgs.of(
    model="builtin://tiny", device="cpu", dtype="float32", threads=1, num_gpu_blocks_override=48,
    structured_outputs_cache_bytes=0,
)  # fmt: skip
EACH = 4
"""Requests of a kind in a round."""
ROUNDS = 4
WARM_UP = 4
"""Rounds that fill the KV cache and every other bounded table."""


class InlineClient:
    """An `AsyncMPClient` whose core lives in this process, where its tables can be seen."""

    def __init__(self) -> None:
        self.inproc = InprocClient(ARGS)
        self.config = self.inproc.config
        self._has_work = asyncio.Event()

    async def add_request(self, request: EngineCoreRequest) -> None:
        self.inproc.add_request(request)
        self._has_work.set()

    async def abort_requests(self, request_ids: list[str]) -> None:
        self.inproc.abort_requests(request_ids)
        self._has_work.set()

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self.inproc.has_work:
                yield self.inproc.step()
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.inproc.close()


def calls(number: int) -> dict[str, tuple[str, dict[str, Any], int]]:
    """Kind -> path, body, status. Texts have the same lengths for every number, and differ from their first word on."""
    text = f"{number:06} words and more words, so that blocks of the cache are filled and evicted"
    schema = {
        "type": "object",
        "properties": {f"p{number:06}": {"type": "integer"}},
        "required": [f"p{number:06}"],
    }
    function = {"name": f"f{number:06}", "parameters": schema}

    def chat(**fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0, **fields}

    def completion(**fields: Any) -> dict[str, Any]:
        return {"prompt": text, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}

    chats, completions = "/v1/chat/completions", "/v1/completions"
    return {
        "completion": (completions, completion(), 200),
        "streamed": (chats, chat(stream=True), 200),
        "choices": (completions, completion(n=3), 200),
        "log probabilities": (completions, completion(logprobs=2, prompt_logprobs=2), 200),
        "sampling": (
            chats,
            chat(temperature=1, top_k=5, frequency_penalty=1, bad_words=["x"], stop=["y"]),
            200,
        ),
        "salt": (chats, chat(cache_salt=f"s{number:06}", request_id=f"r{number:06}", user=text), 200),
        "JSON object": (chats, chat(response_format={"type": "json_object"}), 200),
        "schema": (completions, completion(ignore_eos=False, structured_outputs={"json": schema}), 200),
        "tools": (chats, chat(tools=[{"type": "function", "function": function}]), 200),
        "embedding": ("/v1/embeddings", {"input": text}, 200),
        "wrong field": (completions, completion(n="many"), 400),
        "wrong model": (completions, completion(model=text), 404),
        "wrong pattern": (completions, completion(structured_outputs={"regex": f"({number:06}"}), 400),
        "wrong path": (f"/v1/{number:06}", {}, 404),
    }


async def leave_early(llm: AsyncLLM, number: int) -> None:
    """A client that hangs up after the first output."""
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    prompt = [10 + (number + place) % 200 for place in range(40)]
    outputs = llm.generate([EngineCoreRequest(f"{number:024x}", prompt, params, 0.0)])
    async with contextlib.aclosing(outputs):
        async for _ in outputs:
            return


async def grown() -> Counter[str]:
    """Entries that containers gained over the rounds after the warm-up."""
    client = InlineClient()
    llm = AsyncLLM(client, InputProcessor(client.config))  # type: ignore[arg-type]
    engine = Engine(("tiny",))
    engine.attach(llm)
    tokenizer = llm.renderer.tokenizer
    for token_id in range(
        tokenizer.vocab_size
    ):  # a temperature draws tokens that the warm-up need not have met
        tokenizer.whole_text(token_id)
    numbers = count()
    counts = []
    transport = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:

        async def send(path: str, body: dict[str, Any], status: int) -> None:
            answer = await http.post(path, json=body)
            assert answer.status_code == status, answer.text

        for _ in range(WARM_UP + ROUNDS):
            for _ in range(EACH):
                number = next(numbers)
                await asyncio.gather(
                    *(send(*call) for call in calls(number).values()), leave_early(llm, number)
                )
            await llm.drain()
            await http.get("/metrics")
            counts.append(census(engine, client.inproc))
    await engine.close()
    return counts[-1] - counts[WARM_UP - 1]


def test_no_container_grows_with_requests_served(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks that all prompts begin with are soon full.
    monkeypatch.setattr(prefix_residency, "MAX_CHUNKS_PER_BLOCK", 4)
    # One entry for each request of one kind is EACH * ROUNDS; caches that are full breathe by less.
    growth = asyncio.run(grown())
    assert {path: entries for path, entries in growth.items() if entries >= EACH * ROUNDS} == {}


def test_the_watchdog_forgets_requests_with_the_last_of_them() -> None:
    """It checks now and then; what it noted then must not stay until it checks again."""
    client = InprocClient(ARGS)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for number in range(20):
        client.add_request(EngineCoreRequest(str(number), [10 + number] * 8, params, 0.0))
    client.step()
    client.core.watchdog.check(client.core.scheduler.requests.values())
    noted = census(client)
    while client.has_work:
        client.step()
    assert noted["Progress.position"] >= 20
    assert census(client)["Progress.position"] == 0
    client.close()


def test_the_census_sees_what_is_kept() -> None:
    engine = Engine(("tiny",))
    before = census(engine)
    engine.names = ("tiny", *("x",) * 9)
    assert census(engine) - before == {"Engine.names": 9}
