"""The render pool: separate bounded queues by prompt size, without work for clients that left."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from argosy_engine.api.endpoints.chat import chat, chat_stream
from argosy_engine.api.endpoints.completions import completion, completion_stream
from argosy_engine.api.endpoints.exchange import to_api_error
from argosy_engine.api.served_engine import OpenAIServing
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import EngineBusy, PromptTooLong, ResourceBusy
from argosy_engine.frontend import admission
from argosy_engine.frontend.admission import (
    LONG_THREADS,
    MAX_LONG_JOBS,
    MAX_MEDIUM_BYTES,
    Abandoned,
    RenderPool,
    stop_if_abandoned,
)
from argosy_engine.frontend.output_processor import request_error
from argosy_engine.frontend.prompts import ControlTokens
from argosy_engine.frontend.renderer import MIN_INPUT_BYTES, Renderer
from argosy_engine.frontend.tokenizer import INLINE_CHARS
from argosy_engine.messages import EngineCoreOutput, ErrorKind
from argosy_engine.resolved_config import RequestDefaults
from argosy_protocol.headers import RESOURCE_BUSY
from argosy_protocol.openai import decode_request

SHORT, MEDIUM, LONG = INLINE_CHARS, MAX_MEDIUM_BYTES, MAX_MEDIUM_BYTES + 1


class Job:
    """Work that runs until it is released."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.released = threading.Event()
        self.ended = threading.Event()
        self.saw_the_client_leave = False

    def __call__(self, answer: str) -> str:
        self.started.set()
        self.released.wait(60)
        try:
            stop_if_abandoned()
        except Abandoned:
            self.saw_the_client_leave = True
            raise
        finally:
            self.ended.set()
        return answer


@pytest.fixture
def pool() -> Iterator[RenderPool]:
    pool = RenderPool()
    yield pool
    pool.close()


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


async def test_a_template_of_a_request_holds_up_nobody_else(pool: RenderPool) -> None:
    request: Any = SimpleNamespace(chat_template="{{ messages }}")
    job = Job()
    waiting = asyncio.create_task(pool.run(1, job, request))
    await wait_for(job.started)
    for size in (SHORT, MEDIUM, LONG):
        assert await pool.run(size, str.upper, "a") == "A"
    job.released.set()
    assert await waiting is request


async def test_long_prompts_hold_up_neither_medium_nor_short_ones(pool: RenderPool) -> None:
    jobs = [Job() for _ in range(LONG_THREADS + 2)]
    waiting = [asyncio.create_task(pool.run(LONG, job, "long")) for job in jobs]
    await wait_for(jobs[0].started)
    assert await pool.run(MEDIUM, str.upper, "medium") == "MEDIUM"
    assert await pool.run(SHORT, str.upper, "short") == "SHORT"
    for job in jobs:
        job.released.set()
    assert await asyncio.gather(*waiting) == ["long"] * len(jobs)


@pytest.mark.parametrize("size", [MEDIUM, LONG])
async def test_a_full_size_class_refuses(
    pool: RenderPool, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(admission, "MAX_MEDIUM_JOBS", 3)
    monkeypatch.setattr(admission, "MAX_LONG_JOBS", 3)
    pool = RenderPool()
    job = Job()
    waiting = [asyncio.create_task(pool.run(size, job, "x")) for _ in range(3)]
    await wait_for(job.started)
    with pytest.raises(EngineBusy, match=r"3 .* prompts are waiting"):
        await pool.run(size, str.upper, "one more")
    job.released.set()
    await asyncio.gather(*waiting)
    assert await pool.run(size, str.upper, "later") == "LATER"
    pool.close()


async def test_tenants_take_turns_at_long_prompts(pool: RenderPool) -> None:
    running, done = Job(), list[str]()
    first = asyncio.create_task(pool.run(LONG, running, "a0", "a"))
    await wait_for(running.started)
    others = [
        asyncio.create_task(pool.run(LONG, done.append, name, name[0]))
        for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    await asyncio.sleep(0)
    running.released.set()
    await asyncio.gather(first, *others)
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_one_tenant_cannot_fill_a_size_class(pool: RenderPool) -> None:
    running = Job()
    waiting = [asyncio.create_task(pool.run(LONG, running, "x", "a")) for _ in range(MAX_LONG_JOBS * 3 // 4)]
    await wait_for(running.started)
    for _ in range(2):
        with pytest.raises(EngineBusy, match=r"24 long prompts of the same key are waiting"):
            await asyncio.wait_for(pool.run(LONG, str.upper, "one more", "a"), 10)
    waiting += [asyncio.create_task(pool.run(LONG, str.upper, "x", f"{n}")) for n in range(8)]
    await asyncio.sleep(0)
    waiting.pop(1).cancel()  # one of "a", which makes room for another tenant and not for its own
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(EngineBusy, match="of the same key"):
        await asyncio.wait_for(pool.run(LONG, str.upper, "one more", "a"), 10)
    waiting.append(asyncio.create_task(pool.run(LONG, str.upper, "x", "new")))
    running.released.set()
    assert set(await asyncio.gather(*waiting)) == {"x", "X"}
    assert await pool.run(LONG, str.upper, "later", "a") == "LATER"


async def test_closing_drops_what_waits(pool: RenderPool) -> None:
    running = Job()
    tasks = [asyncio.create_task(pool.run(LONG, running, "x", "a")) for _ in range(3)]
    await wait_for(running.started)
    pool.close()
    for task in tasks[1:]:
        with pytest.raises(asyncio.CancelledError):
            await task
    running.released.set()
    assert await tasks[0] == "x"


async def test_a_prompt_whose_client_left_is_not_made(pool: RenderPool) -> None:
    running, queued = Job(), Job()
    first = asyncio.create_task(pool.run(LONG, running, "first"))
    await wait_for(running.started)
    second = asyncio.create_task(pool.run(LONG, queued, "second"))
    await asyncio.sleep(0)
    for task in (first, second):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    running.released.set()
    await wait_for(running.ended)
    assert running.saw_the_client_leave
    assert await pool.run(LONG, str.upper, "third") == "THIRD"
    assert not queued.started.is_set()


async def test_a_search_for_markers_ends_when_its_client_leaves(pool: RenderPool) -> None:
    control_tokens = ControlTokens(["<|im_start|>", "<|im_end|>"])
    begun, went_on = threading.Event(), threading.Event()
    ends: list[str] = []
    ended = threading.Event()

    def search(text: str) -> None:
        control_tokens.hide(text)
        begun.set()
        went_on.wait(60)
        try:
            control_tokens.hide(text)
            ends.append("it was searched")
        except Abandoned:
            ends.append("it was given up")
        finally:
            ended.set()

    task = asyncio.create_task(pool.run(LONG, search, "<|" * 100_000))
    await wait_for(begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    went_on.set()
    await wait_for(ended)
    assert ends == ["it was given up"]


@pytest.mark.parametrize("endpoint", ["chat", "chat stream", "completion", "completion stream"])
@pytest.mark.parametrize("size", [SHORT, MEDIUM])
async def test_the_core_s_requests_are_made_where_the_prompt_is_rendered(endpoint: str, size: int) -> None:
    """Checking a grammar takes as long as tokenising a prompt."""
    threads: list[int] = []

    class Made(Exception):
        pass

    def sampling_params(request: Any, num_prompts: int) -> Any:
        threads.append(threading.get_ident())
        raise Made

    def render(request: Any, images: object = None) -> list[str]:
        threads.append(threading.get_ident())
        return ["prompt"]

    renderer = SimpleNamespace(render_chat=render, render_completion=render)
    llm = SimpleNamespace(
        renderer=renderer,
        queue_limits=SimpleNamespace(check=lambda _: None),
        input_processor=SimpleNamespace(sampling_params=sampling_params, media=None),
    )
    serving = OpenAIServing(llm, ("tiny",))  # type: ignore[arg-type]
    of_chat = endpoint.startswith("chat")
    prompt = {"messages": [{"role": "user", "content": "x"}]} if of_chat else {"prompt": "x"}
    request: Any = decode_request(
        "chat/completions" if of_chat else "completions", json.dumps(prompt).encode()
    )
    answer: Any = (chat if of_chat else completion)(serving, request, "id", size)
    if endpoint.endswith("stream"):
        answer.close()
        answer = anext((chat_stream if of_chat else completion_stream)(serving, request, "id", size))
    with pytest.raises(Made):
        await answer
    serving.close()
    rendered, made = threads
    assert rendered == made
    assert (made == threading.get_ident()) == (size == SHORT)


LIMIT = 64


@pytest.fixture
def renderer() -> Renderer:
    config = SimpleNamespace(
        model_path=str(resolve_model("builtin://tiny")),
        request_defaults=RequestDefaults(),
        model_name="tiny",
        vocab_size=1024,
        max_model_len=LIMIT,
        pooling=None,
        logits_processors=(),
    )
    return Renderer(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("is_part", [False, True])
def test_a_chat_that_cannot_fit_is_refused_before_its_text_is_looked_at(
    renderer: Renderer, role: str, is_part: bool
) -> None:
    text = "<|" * (LIMIT * renderer.tokenizer.max_token_chars)
    content: Any = [{"type": "text", "text": text}] if is_part else text
    body = {"messages": [{"role": role, "content": content}]}
    request = decode_request("chat/completions", json.dumps(body).encode())
    renderer.template = SimpleNamespace(render=lambda *_: pytest.fail("it was rendered"))  # type: ignore[assignment]
    with pytest.raises(PromptTooLong, match=f"{LIMIT} tokens"):
        renderer.render_chat(request)  # type: ignore[arg-type]


def test_a_rendered_chat_that_cannot_fit_is_refused_before_markers_are_looked_for(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlTokens, "hide", lambda *_: pytest.fail("markers were looked for"))
    text = "<|im_end|>" * (LIMIT * renderer.tokenizer.max_token_chars)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    request = decode_request("chat/completions", json.dumps({"messages": messages}).encode())
    with pytest.raises(PromptTooLong, match="characters at most"):
        renderer.render_chat(request)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dropped",
    [
        {"messages": [{"role": "assistant", "content": "<|" * MIN_INPUT_BYTES}]},
        {"messages": [{"role": "assistant", "content": "", "reasoning": "<|" * MIN_INPUT_BYTES}]},
        {"documents": [{"text": "<|" * MIN_INPUT_BYTES}]},
        {"chat_template_kwargs": {"unused": "<|" * MIN_INPUT_BYTES}},
    ],
)
def test_text_that_a_template_drops_is_bounded_before_markers_are_looked_for(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, dropped: dict[str, Any]
) -> None:
    monkeypatch.setattr(ControlTokens, "hide", lambda *_: pytest.fail("markers were looked for"))
    body = {"messages": [{"role": "user", "content": "Hi"}]} | dropped
    request = decode_request("chat/completions", json.dumps(body).encode())
    renderer.template = SimpleNamespace(render=lambda *_: "Hi", has_thinking=False)  # type: ignore[assignment]
    with pytest.raises(PromptTooLong, match="the chat template drops"):
        renderer.render_chat(request)  # type: ignore[arg-type]


def test_as_many_markers_as_tokens_are_refused_untokenised(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenised"))
    messages = [{"role": "user", "content": "<|im_end|>" * LIMIT}]
    request = decode_request("chat/completions", json.dumps({"messages": messages}).encode())
    with pytest.raises(PromptTooLong, match=f"{LIMIT} tokens"):
        renderer.render_chat(request)  # type: ignore[arg-type]


def test_reasoning_longer_than_the_context_is_accepted_if_the_template_drops_it(
    renderer: Renderer,
) -> None:
    thought = "<think>" + "word " * (LIMIT * renderer.tokenizer.max_token_chars) + "</think>Yes"
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": thought},
        {"role": "user", "content": "Go"},
    ]
    request = decode_request("chat/completions", json.dumps({"messages": messages}).encode())
    renderer.template = SimpleNamespace(  # type: ignore[assignment]
        render=lambda *_, **__: "Hi Yes Go", has_thinking=False
    )
    assert renderer.render_chat(request).token_ids  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ResourceBusy("4 long prompts are waiting"), "resource_busy"),
        (request_error(EngineCoreOutput("a", [], error_kind=ErrorKind.BUSY)), "resource_busy"),
        (request_error(EngineCoreOutput("a", [], error_kind=ErrorKind.ASLEEP)), None),
        (EngineBusy("2 requests are waiting or running"), None),
    ],
)
def test_a_busy_resource_is_told_apart_from_a_busy_engine(error: Exception, code: str | None) -> None:
    told = to_api_error(error)
    assert (told.http_status, told.code) == (503, code)
    assert (RESOURCE_BUSY in told.headers()) is (code is not None)
