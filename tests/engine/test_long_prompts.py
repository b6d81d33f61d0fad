"""Prompts of megabytes delay no other request."""

from __future__ import annotations

import itertools
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from argosy_engine.api.app import build_app
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import InvalidRequest, PromptTooLong
from argosy_engine.frontend.renderer import Renderer
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_engine.resolved_config import RequestDefaults
from argosy_protocol.openai import decode_request
from stub_engine import StubEngine

LONG = "hello there " * 5000
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}
USER = {"role": "user", "content": "Hi"}


def test_tokenising_a_long_text_does_not_hold_up_other_threads() -> None:
    """Nor does another process, all of the time: a text that held them up would hold them up each time."""
    tokenizer, text = Tokenizer(resolve_model("builtin://tiny")), LONG * 10
    assert any(other_threads_run(tokenizer, text) for _ in range(20))


def other_threads_run(tokenizer: Tokenizer, text: str) -> bool:
    """Tokenise a text; return whether another thread has run at least once in each half of the time."""
    ticks, stop = [], threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    while not ticks:
        time.sleep(0.001)
    started = time.perf_counter()
    tokenizer.encode(text, add_special_tokens=False)
    ended = time.perf_counter()
    stop.set()
    thread.join()
    marks = [started, *(at for at in ticks if started < at < ended), ended]
    longest = max(after - before for before, after in itertools.pairwise(marks))
    return longest < (ended - started) / 2


@pytest.mark.parametrize(
    ("path", "body", "is_long"),
    [
        ("chat/completions", {"messages": [USER]}, False),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, True),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
            True,
        ),
        ("chat/completions", {"messages": [USER], "tools": [TOOL]}, True),
        ("chat/completions", {"messages": [USER], "documents": [{"text": LONG}]}, True),
        ("chat/completions", {"messages": [USER], "chat_template_kwargs": {"date": LONG}}, True),
        ("completions", {"prompt": "Hi"}, False),
        ("completions", {"prompt": ["Hi", LONG]}, True),
        ("completions", {"prompt": [[7] * 20000]}, True),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_long_prompts_are_tokenised_in_a_thread(
    path: str, body: dict[str, Any], is_long: bool, stream: bool
) -> None:
    threads: list[threading.Thread] = []

    def prompt(request: object, images: object = None) -> object:
        threads.append(threading.current_thread())
        raise InvalidRequest("enough seen")

    llm = SimpleNamespace(
        is_dead=False,
        heartbeat_age_s=0.0,
        is_sleeping=False,
        queue_limits=SimpleNamespace(check=lambda num_reqs: None),
        renderer=SimpleNamespace(render_chat=prompt, render_completion=prompt),
        input_processor=SimpleNamespace(media=None),
    )
    transport = httpx.ASGITransport(app=build_app(StubEngine(llm)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.post(f"/v1/{path}", json={**body, "stream": stream})
    assert answer.json()["error"]["message"] == "enough seen"
    (thread,) = threads
    assert (thread is not threading.main_thread()) == is_long


@pytest.fixture
def renderer() -> Renderer:
    config = SimpleNamespace(
        model_path=str(resolve_model("builtin://tiny")),
        request_defaults=RequestDefaults(),
        model_name="tiny",
        vocab_size=1024,
        max_model_len=64,
        pooling=None,
        logits_processors=(),
    )
    return Renderer(config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("chat/completions", {"messages": [USER], "tools": [TOOL]}),
        ("completions", {"prompt": LONG}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, endpoint: Any, body: dict[str, Any]
) -> None:
    request = decode_request(endpoint, json.dumps(body).encode())
    make: Any = renderer.render_chat if endpoint == "chat/completions" else renderer.render_completion
    monkeypatch.setattr(renderer.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenised"))
    with pytest.raises(PromptTooLong, match="64 tokens"):
        make(request)


def test_the_longest_text_that_fits_is_not_refused(renderer: Renderer) -> None:
    """Made of the longest token alone, it has one token less than the context."""
    tokenizer = renderer.tokenizer
    longest = max((tokenizer.token_text(token_id) for token_id in range(1024)), key=len)
    (token_id,) = tokenizer.encode(longest, add_special_tokens=False).ids
    prompt = renderer.render_text(longest * 63)
    assert prompt.token_ids == [token_id] * 63
