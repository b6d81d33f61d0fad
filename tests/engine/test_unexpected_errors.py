"""Unexpected exceptions: a plain 500 for the client, one traceback in the log, no prompt in either."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import httpx
import pytest

from argosy_engine.api.app import build_app
from argosy_engine.errors import InvalidRequest
from argosy_protocol.program.process import MAX_TRACEBACK_BYTES
from stub_engine import StubEngine

SECRET = "my diagnosis is"


async def answer_of(error: Exception, *, stream: bool) -> httpx.Response:
    """What a client gets where making its prompt raises `error`."""

    def render_chat(request: object, images: object = None) -> object:
        raise error

    llm = SimpleNamespace(
        is_dead=False,
        heartbeat_age_s=0.0,
        is_sleeping=False,
        queue_limits=SimpleNamespace(check=lambda num_reqs: None),
        renderer=SimpleNamespace(render_chat=render_chat),
        input_processor=SimpleNamespace(media=None),
    )
    transport = httpx.ASGITransport(app=build_app(StubEngine(llm)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        body = {"messages": [{"role": "user", "content": SECRET}], "stream": stream}
        return await client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_error_is_logged_once_without_the_prompt(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await answer_of(KeyError(SECRET), stream=stream)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error")
    (record,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    text = record.getMessage()
    assert "KeyError" in text
    assert "in render_chat" in text, "the traceback reaches to where it was raised"
    assert SECRET not in caplog.text


def recurse(levels: int) -> None:
    if levels:
        recurse(levels - 1)
    raise RecursionError(SECRET)


async def test_a_request_too_deep_for_the_stack_is_the_clients_fault() -> None:
    answer = await answer_of(RecursionError(SECRET), stream=False)
    assert answer.status_code == 400
    assert "nested too deeply" in answer.json()["error"]["message"]


async def test_the_frames_that_are_logged_are_few(caplog: pytest.LogCaptureFixture) -> None:
    try:
        recurse(500)
    except RecursionError as error:
        await answer_of(error, stream=False)
    (record,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert len(record.getMessage()) < MAX_TRACEBACK_BYTES + 1024


async def test_expected_errors_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert (await answer_of(InvalidRequest("no"), stream=False)).status_code == 400
    assert caplog.records == []
