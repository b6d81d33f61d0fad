"""`stream_interval` and `return_prompt_text`, as in vLLM 0.32, over a real socket."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from processes import free_port, running
from served_engine import SERVE_TINY

CHAT = [{"role": "user", "content": "Count"}]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port = free_port()
    arguments = [*SERVE_TINY, "--dtype", "float32", "--served-model-name", "tiny", "--port", str(port)]
    arguments += ["--stream-interval", "2"]
    with (
        running(arguments, tmp_path_factory.mktemp("serve") / "log", port=port) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/chat/completions", json=body(stream=True, return_token_ids=True, **fields))
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in events[:-1]]


def ends(found: list[dict[str, Any]]) -> list[int]:
    """Return how many tokens there are with each event that has any."""
    choices = [choice for each in found for choice in each["choices"] if choice["token_ids"]]
    return list(itertools.accumulate(len(choice["token_ids"]) for choice in choices))


@pytest.mark.parametrize("stop", [None, ["\u2603"]], ids=["", "with a stop string"])
@pytest.mark.parametrize(("asked", "interval"), [(None, 2), (1, 2), (5, 5), (1000, 1000)])
def test_events_have_as_many_tokens_as_asked_for(
    http: httpx.Client, asked: int | None, interval: int, stop: list[str] | None
) -> None:
    undisturbed = [*range(1, 20, interval), 20]
    for _ in range(100):
        found = chunks(http, stream_interval=asked, stop=stop)
        told = ends(found)
        assert told[-1] == 20
        assert set(told) <= set(undisturbed)
        if told == undisturbed:
            break  # a reader that lags behind gets several events in one
    else:
        pytest.fail(f"{told} tokens with the events of every answer")
    text = "".join(choice["delta"].get("content") or "" for each in found for choice in each["choices"])
    whole = http.post("/v1/chat/completions", json=body(stop=stop, stream_interval=7)).json()
    assert text == whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 20


def test_it_is_at_least_one(http: httpx.Client) -> None:
    refused = http.post("/v1/chat/completions", json=body(stream_interval=0))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_interval")


def test_the_prompt_text_is_returned(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/chat/completions", json=body(return_prompt_text=True, return_token_ids=True)
    ).json()
    assert "Count" in answer["prompt_text"]
    told = http.post("/detokenize", json={"model": "tiny", "tokens": answer["prompt_token_ids"]}).json()
    assert answer["prompt_text"] == told["prompt"]
    first, *later = chunks(http, return_prompt_text=True)
    assert first["prompt_text"] == answer["prompt_text"]
    assert not any("prompt_text" in each for each in later)
    for fields in ({}, {"return_prompt_text": False}):
        assert "prompt_text" not in http.post("/v1/chat/completions", json=body(**fields)).json()
