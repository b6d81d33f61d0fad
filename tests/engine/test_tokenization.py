"""/tokenize and /detokenize give the tokens that a generation would get."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from argosy_engine.api.app import build_app
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.frontend.renderer import Renderer
from argosy_engine.resolved_config import RequestDefaults
from argosy_protocol.openai import decode_request
from stub_engine import StubEngine

LIMIT = 64
TEXT = "The quick brown fox"
CHAT = {"messages": [{"role": "user", "content": TEXT}]}


@pytest.fixture(scope="module")
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


@pytest.fixture
async def http(renderer: Renderer) -> AsyncIterator[httpx.AsyncClient]:
    blind = SimpleNamespace(media=None)
    llm = SimpleNamespace(
        is_dead=False, heartbeat_age_s=0.0, is_sleeping=False, renderer=renderer, input_processor=blind
    )
    transport = httpx.ASGITransport(app=build_app(StubEngine(llm)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


async def tokens(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/tokenize", json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == LIMIT
    return answer


async def test_tokens_are_those_of_a_prompt(http: httpx.AsyncClient, renderer: Renderer) -> None:
    text = decode_request("completions", msgspec.json.encode({"prompt": TEXT}))
    chat = decode_request("chat/completions", msgspec.json.encode(CHAT))
    (of_text,) = renderer.render_completion(text)  # type: ignore[arg-type]
    assert (await tokens(http, prompt=TEXT))["tokens"] == of_text.token_ids
    of_chat = renderer.render_chat(chat)  # type: ignore[arg-type]
    assert (await tokens(http, **CHAT))["tokens"] == of_chat.token_ids
    assert (await tokens(http, **CHAT, add_generation_prompt=False))["count"] < len(of_chat.token_ids)


async def test_there_and_back(http: httpx.AsyncClient) -> None:
    answer = await tokens(http, prompt=TEXT, add_special_tokens=False, return_token_strs=True)
    assert len(answer["token_strs"]) == answer["count"] > 1
    assert "".join(answer["token_strs"]).startswith("The")
    back = await http.post("/detokenize", json={"model": "tiny", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": TEXT}


async def test_texts_longer_than_the_context_can_be_counted(http: httpx.AsyncClient) -> None:
    assert (await tokens(http, prompt="fox " * LIMIT))["count"] >= LIMIT


async def test_lists_of_tokens_are_bounded(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """To list many tokens holds the interpreter, in which time nobody else is answered."""
    most = 2 * LIMIT
    monkeypatch.setattr("argosy_engine.api.endpoints.engine_routes.MAX_LISTED_TOKENS", most)
    fitting, chat = "fox " * (LIMIT // 2), {"messages": [{"role": "user", "content": "fox " * LIMIT}]}
    ids = (await tokens(http, prompt=fitting))["tokens"]
    assert len(ids) <= most
    for path, body in [
        ("/tokenize", {"prompt": fitting * 3}),
        ("/tokenize", chat),
        ("/detokenize", {"tokens": [5] * (most + 1)}),
    ]:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400
        assert f"at most {most} are taken; send it in parts" in answer.json()["error"]["message"]
    monkeypatch.setattr("argosy_engine.api.endpoints.engine_routes.MAX_LISTED_TOKENS", 1)
    assert len((await tokens(http, prompt="fox"))["tokens"]) > 1, "a prompt as long as the context is listed"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "messages"),
        ("/tokenize", {"prompt": None, "messages": None}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "large"}, 404, "model"),
        ("/detokenize", {"tokens": [1024]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "large"}, 404, "model"),
    ],
)
async def test_bad_input_is_refused_with_a_reason(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
