"""Queue limits of the API server, on requests and on tokens: what counts against them, and the retry hint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from argosy_engine.api.endpoints.exchange import to_api_error
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import EngineBusy, InvalidRequest
from argosy_engine.frontend.admission import MAX_RETRY_S, QueueLimits
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.observer import Observer
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.messages import EngineCoreOutputs, EngineCoreRequest
from argosy_engine.params import SamplingParams
from argosy_engine.resolved_config import MediaConfig, ParserConfig, RequestDefaults, TokenizerConfig


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_in_flight_are_capped_and_leave_room_when_they_end() -> None:
    limits = QueueLimits(2, None)
    for name in "ab":
        limits.check(1)
        limits.enter(name, 10)
    limits.start("a")
    with pytest.raises(EngineBusy, match="2 requests are waiting or running, at most 2 may"):
        limits.check(1)
    limits.leave("a")
    limits.check(1)
    with pytest.raises(EngineBusy):
        limits.check(2)


def test_a_request_beyond_the_limits_is_the_client_s_fault() -> None:
    limits = QueueLimits(4, None)
    limits.check(4)
    for num_running in range(3):
        with pytest.raises(InvalidRequest, match="5 choices at once, this engine takes 4"):
            limits.check(5)
        limits.enter(str(num_running), 1)
    with pytest.raises(EngineBusy):
        limits.check(4)


def test_prompt_tokens_count_until_the_first_token() -> None:
    limits = QueueLimits(100, 50)
    limits.enter("a", 30)
    limits.check(1, 20)
    with pytest.raises(EngineBusy, match="30 prompt tokens are waiting, at most 50 may"):
        limits.check(1, 21)
    limits.start("a")
    limits.check(1, 50)
    limits.leave("a")
    assert limits.num_queued_tokens == limits.num_reqs == 0


def test_a_long_prompt_alone_is_not_refused() -> None:
    limits = QueueLimits(100, 50)
    limits.check(1, 5000)


def test_a_request_that_ends_before_its_first_token_gives_its_tokens_back() -> None:
    limits = QueueLimits(100, 50)
    limits.enter("a", 50)
    limits.leave("a")
    assert limits.num_queued_tokens == 0


@pytest.mark.parametrize(
    ("rate", "tokens", "expected"),
    [(10.0, 40, 2.0), (1000.0, 40, 1.0), (0.01, 40, MAX_RETRY_S), (0.0, 40, 1.0)],
)
def test_the_hint_follows_the_measured_prefill_rate(rate: float, tokens: int, expected: float) -> None:
    limits = QueueLimits(100, 50)
    limits.prefill_tokens_per_s = rate
    limits.enter("a", 30)
    with pytest.raises(EngineBusy) as refused:
        limits.check(1, tokens)
    assert refused.value.retry_after_s == expected


def test_the_hint_follows_the_rate_at_which_requests_end() -> None:
    clock = Clock()
    limits = QueueLimits(6, None, clock)
    for name in "abcdefghij":
        limits.enter(name, 1)
    for name in "abcd":
        clock.now += 2.0
        limits.leave(name)
    with pytest.raises(EngineBusy) as refused:
        limits.check(4)
    # Four ended within six seconds; room for four takes as long as four more.
    assert refused.value.retry_after_s == 6.0


def test_requests_that_choose_a_rank_leave_room_for_others() -> None:
    limits = QueueLimits(6, 90, num_ranks=3)
    for name in "ab":
        limits.check(1, 5, rank=1)
        limits.enter(name, 5, rank=1)
    with pytest.raises(
        EngineBusy, match="2 requests are waiting or running in data-parallel rank 1, at most 2"
    ):
        limits.check(1, rank=1)
    for name, rank in (("c", 0), ("d", None), ("e", 2)):
        limits.check(1, rank=rank)
        limits.enter(name, 10, rank=rank)
    limits.leave("a")
    limits.check(1, 25, rank=1)
    with pytest.raises(
        EngineBusy, match="5 prompt tokens are waiting in data-parallel rank 1, at most 30 may"
    ):
        limits.check(1, 26, rank=1)
    limits.start("b")
    limits.check(1, 60, rank=1)
    with pytest.raises(InvalidRequest, match="3 choices at once, data-parallel rank 1 takes 2"):
        limits.check(3, rank=1)
    for name in "bcde":
        limits.leave(name)
    assert limits.num_reqs == limits.num_queued_tokens == 0
    for rank in range(3):
        limits.check(2, 60, rank=rank)


def test_a_rank_s_share_counts_what_was_sent_there() -> None:
    limits = QueueLimits(4, None, num_ranks=2)
    for name in "ab":
        limits.enter(name, 10)
        limits.place(name, 0)
    with pytest.raises(EngineBusy, match="rank 0"):
        limits.check(1, rank=0)
    limits.check(2, rank=1)
    limits.leave("a")
    limits.place("a", 0)
    limits.check(1, rank=0)


class SilentClient:
    """A core that takes requests and never answers."""

    config = SimpleNamespace(
        max_num_queued_reqs=1, max_num_queued_tokens=None, block_size=16, data_parallel_size=1
    )

    def __init__(self) -> None:
        self.added: asyncio.Queue[str] = asyncio.Queue()
        self.aborted: list[str] = []

    async def add_request(self, request: EngineCoreRequest) -> None:
        self.added.put_nowait(request.request_id)

    async def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        await asyncio.Event().wait()
        yield EngineCoreOutputs()

    async def close(self) -> None: ...


class Rejections(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_rejected(self, reason: str, rank: int) -> None:
        self.seen.append((reason, rank))


async def test_a_full_engine_refuses_until_a_client_leaves() -> None:
    client = SilentClient()
    processor = SimpleNamespace(
        renderer=SimpleNamespace(tokenizer=Tokenizer(resolve_model("builtin://tiny"))),
        close=lambda: None,
    )
    llm = AsyncLLM(client, processor)  # type: ignore[arg-type]

    def ask(name: str) -> asyncio.Task[object]:
        request = EngineCoreRequest(name, [5, 6], SamplingParams(), 0.0)
        return asyncio.create_task(anext(llm.generate([request])))  # type: ignore[arg-type]

    rejected = Rejections()
    llm.observers.append(rejected)
    first = ask("a")
    assert await client.added.get() == "a"
    with pytest.raises(EngineBusy):
        await ask("b")
    assert rejected.seen == [("max_num_queued_reqs", 0)]
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = ask("c")
    assert await client.added.get() == "c"
    assert client.aborted == ["a"]
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert llm.queue_limits.num_reqs == llm.queue_limits.num_queued_tokens == 0
    await llm.close()


async def test_a_client_that_fills_its_rank_leaves_the_others_to_everybody() -> None:
    client = SilentClient()
    client.config = SimpleNamespace(
        max_num_queued_reqs=4, max_num_queued_tokens=None, block_size=16, data_parallel_size=2
    )
    processor = SimpleNamespace(
        renderer=SimpleNamespace(tokenizer=Tokenizer(resolve_model("builtin://tiny"))),
        close=lambda: None,
    )
    llm = AsyncLLM(client, processor)  # type: ignore[arg-type]

    def ask(name: str, rank: int | None) -> asyncio.Task[object]:
        request = EngineCoreRequest(name, [5, 6], SamplingParams(), 0.0, data_parallel_rank=rank)
        return asyncio.create_task(anext(llm.generate([request])))  # type: ignore[arg-type]

    readers = []
    for name in "ab":
        readers.append(ask(name, 0))
        assert await client.added.get() == name
    with pytest.raises(EngineBusy, match="data-parallel rank 0, at most 2 may"):
        await ask("c", 0)
    for name, rank in (("d", None), ("e", 1)):
        readers.append(ask(name, rank))
        assert await client.added.get() == name
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await llm.close()


def test_a_refusal_is_a_503_that_says_when_to_come_back() -> None:
    error = to_api_error(EngineBusy("full", retry_after_s=7.0))
    assert error.http_status == 503
    assert error.headers()["retry-after"] == "7"


@pytest.mark.parametrize(("policy", "is_refused"), [("fcfs", True), ("priority", False)])
def test_a_priority_needs_an_engine_that_schedules_by_it(policy: str, is_refused: bool) -> None:
    path = str(resolve_model("builtin://tiny"))
    config = SimpleNamespace(
        model_path=path,
        model_name="tiny",
        scheduling_policy=policy,
        vocab_size=512,
        max_model_len=64,
        max_logprobs=20,
        logits_processors=(),
        seed=None,
        parsers=ParserConfig(),
        tokenizer=TokenizerConfig(),
        request_defaults=RequestDefaults(),
        has_copies=False,
        media=MediaConfig(),
        pooling=None,
    )
    processor = InputProcessor(config)  # type: ignore[arg-type]
    prompt = TokenizedPrompt([5, 6], [])
    if is_refused:
        with pytest.raises(InvalidRequest, match="--scheduling-policy priority"):
            processor.process_inputs(prompt, SamplingParams(), priority=-1)
    else:
        (request,) = processor.process_inputs(prompt, SamplingParams(), priority=-1)
        assert request.priority == -1
    assert processor.process_inputs(prompt, SamplingParams())[0].priority == 0
