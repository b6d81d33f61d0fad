"""/ping and /invocations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
import pytest

from argosy_engine.api.app import build_app
from stub_engine import StubEngine

LLM = SimpleNamespace(
    is_dead=False, heartbeat_age_s=0.0, is_sleeping=False, config=SimpleNamespace(pooling=None)
)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=build_app(StubEngine(LLM)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


async def test_ping_answers_as_health(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_dead, status in ((False, 200), (True, 503)):
        monkeypatch.setattr(LLM, "is_dead", is_dead)
        answers = [await http.get("/ping"), await http.post("/ping"), await http.get("/health")]
        assert [answer.status_code for answer in answers] == [status] * 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"messages": None, "prompt": "x", "n": 0}, "n"),
        ({"messages": None}, None),
        ({"input": 5}, "input"),
        ({"query": "x"}, "documents"),
        ({"queries": "x"}, "documents"),
        ({"text_1": "x"}, "text_2"),
        ({"data_1": "x"}, "data_2"),
        ({"model": "tiny"}, None),
        ([], None),
    ],
)
async def test_invocations_go_to_the_endpoint_of_their_body(
    http: httpx.AsyncClient, body: object, param: str | None
) -> None:
    answer = await http.post("/invocations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["type"] == "invalid_request_error"
