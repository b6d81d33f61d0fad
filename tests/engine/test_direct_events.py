"""Events that are written without a turn of the stream's reader: the same stream, in the same order."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from argosy_engine import LLM
from argosy_engine.api.endpoints.chat import chat_stream
from argosy_engine.api.endpoints.completions import completion_stream
from argosy_engine.api.served_engine import OpenAIServing
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.output_processor import GenerationOutput, OutputCollector
from argosy_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from argosy_protocol.openai import ChatCompletionRequest, CompletionRequest

STEPS = 40
EXACT = {"dtype": "float32", "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin://tiny", **EXACT, num_gpu_blocks_override=256)


class FakeCore:
    """A core's client that says what the test says."""

    def __init__(self, llm: LLM) -> None:
        self.config = llm.config
        self.aborted: list[str] = []
        self.requests: asyncio.Queue[EngineCoreRequest] = asyncio.Queue()
        self._messages: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def add_request(self, request: EngineCoreRequest) -> None:
        self.requests.put_nowait(request)

    async def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        while True:
            yield await self._messages.get()

    async def close(self) -> None: ...

    def say(self, output: EngineCoreOutput) -> None:
        self._messages.put_nowait(EngineCoreOutputs(outputs=[output]))


class Connection:
    """Where a stream is sent: by its reader, which takes some turns for it, or directly while that is possible."""

    def __init__(self, rng: random.Random | None) -> None:
        self._rng = rng
        self.has_started = False
        self.is_sending = False
        self.num_direct = 0
        self.data = b""

    @property
    def is_ready(self) -> bool:
        return self.has_started and (self._rng is None or self._rng.random() < 0.6)

    def write(self, piece: bytes) -> None:
        assert piece
        assert not self.is_sending, "the reader is sending an earlier piece"
        self.num_direct += 1
        self.data += piece

    async def send(self, piece: bytes) -> None:
        self.has_started = self.is_sending = True
        for _ in range(self._rng.randrange(4) if self._rng else 0):
            await asyncio.sleep(0)
        self.data += piece
        self.is_sending = False


async def streamed(
    llm: LLM, connection: Connection, rng: random.Random, *, is_direct: bool, is_chat: bool, **fields: Any
) -> list[Any]:
    """Stream an answer of STEPS tokens, which arrive in bursts; return its events."""
    core = FakeCore(llm)
    engine = AsyncLLM(core, llm.input_processor)  # type: ignore[arg-type]
    serving = OpenAIServing(engine, ["tiny"])
    given = {"model": "tiny", "stream": True, "max_tokens": STEPS, **fields}
    options = {"direct": connection if is_direct else None}
    if is_chat:
        chat = msgspec.convert(
            {**given, "messages": [{"role": "user", "content": "Hi"}]}, ChatCompletionRequest
        )
        events = chat_stream(serving, chat, "id", 100, **options)  # type: ignore[arg-type]
    else:
        events = completion_stream(
            serving,
            msgspec.convert({**given, "prompt": "Once"}, CompletionRequest),
            "id",
            100,
            **options,  # type: ignore[arg-type]
        )

    async def read() -> None:
        async with aclosing(events) as pieces:
            async for piece in pieces:
                await connection.send(piece)

    reading = asyncio.create_task(read())
    request = await core.requests.get()
    tokens = random.Random(7)
    for step in range(STEPS):
        end = FinishReason.LENGTH if step == STEPS - 1 else None
        core.say(EngineCoreOutput(request.request_id, [tokens.randrange(300, 900)], end))
        for _ in range(rng.choice((0, 0, 1, 8))):
            await asyncio.sleep(0)
    await reading
    await engine.close()
    assert not core.aborted
    return [json.loads(event.removeprefix(b"data: ")) for event in connection.data.split(b"\n\n")[:-1]]


def whole(events: list[Any]) -> tuple[str, list[int], list[str | None], Any]:
    """Text, token ids, finish reason and usage of a stream."""
    choices = [choice for event in events for choice in event["choices"]]
    texts = [
        choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices
    ]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return "".join(texts), ids, reasons, events[-1].get("usage")


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "usage", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
async def test_the_stream_is_the_same(llm: LLM, is_chat: bool, seed: int, usage: dict[str, bool]) -> None:
    fields = {"is_chat": is_chat, "return_token_ids": True, "stream_options": usage}
    rng = random.Random(seed)
    plain = await streamed(llm, Connection(None), rng, is_direct=False, **fields)
    connection = Connection(rng)
    direct = await streamed(llm, connection, rng, is_direct=True, **fields)
    assert whole(direct) == whole(plain)
    assert len(whole(direct)[1]) == STEPS
    assert connection.num_direct


@pytest.mark.parametrize("is_chat", [False, True])
async def test_steps_that_arrive_together_are_events_of_their_own(llm: LLM, is_chat: bool) -> None:

    connection = Connection(None)
    # Those that arrive while the reader sends the first one are merged.
    events = await streamed(
        llm, connection, random.Random(1), is_direct=True, is_chat=is_chat, return_token_ids=True
    )
    paced = [len(choice.get("token_ids") or ()) for event in events for choice in event["choices"]]
    assert sum(paced) == STEPS
    assert connection.num_direct >= STEPS - 2 - paced[int(is_chat)]
    assert paced[int(is_chat) + 1 :] == [1] * (len(paced) - int(is_chat) - 2) + [0]  # the end has none


async def test_only_a_waiting_reader_is_passed_by() -> None:
    taken: list[str] = []

    def take(output: GenerationOutput) -> bool:
        taken.append(output.text)
        return output.text != "refused"

    def delta(text: str, **fields: Any) -> GenerationOutput:
        return GenerationOutput(0, text, [1], num_output_tokens=9, **fields)

    collector = OutputCollector(take)
    assert collector.put(delta("nobody waits"))
    assert [output.text for output in await collector.take()] == ["nobody waits"]
    reading = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    assert not collector.put(delta("a"))
    assert not collector.put(delta("b"))
    assert collector.put(delta("refused"))
    assert collector.put(delta(" and after it"))
    assert [output.text for output in await reading] == ["refused and after it"]
    reading = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    assert collector.put(delta("end", finish_reason="stop"))
    assert [output.text for output in await reading] == ["end"]
    assert taken == ["a", "b", "refused"]


async def test_a_first_output_goes_to_the_reader() -> None:
    collector = OutputCollector(lambda _: True)
    reading = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    assert collector.put(GenerationOutput(1, "first", [5, 6], num_output_tokens=2))
    assert [output.text for output in await reading] == ["first"]


async def test_an_output_that_cannot_be_formatted_fails_its_reader() -> None:
    def fail(_: GenerationOutput) -> bool:
        raise LookupError("format")

    collector = OutputCollector(fail)
    reading = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    assert collector.put(GenerationOutput(0, "x", [1], num_output_tokens=2))
    assert collector.put(GenerationOutput(0, "what would leave a gap", [2], num_output_tokens=3))
    with pytest.raises(LookupError, match="format"):
        await reading
