"""/tokenize and /detokenize through the router: any replica of the model answers, and nothing is inserted as cached."""

from __future__ import annotations

import json

import pytest

from .fake_engine import MODEL, Connection, FakeEngine, Received
from .harness import rig

BODY = {"model": MODEL, "prompt": "The quick brown fox jumps over the lazy dog. " * 60}


async def tokenize(connection: Connection, request: Received) -> None:
    connection.answer(200, json.dumps({"path": request.path, "got": request.json}).encode())


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_the_body_reaches_an_engine_as_it_is(path: str) -> None:
    async with rig([FakeEngine(script=tokenize)]) as r:
        answer = await r.http.post(path, json=BODY)
        assert answer.json() == {"path": path, "got": BODY}
        (service,) = r.router.fleet.services.values()
        assert len(service.index) == 0, "no engine has it cached now"
        assert (await r.http.post("/v1/completions", json=BODY)).status_code == 200
        assert len(service.index) > 0


async def test_errors_are_the_router_s_own() -> None:
    async with rig([FakeEngine(script=tokenize)]) as r:
        for body, status, param in (
            ({**BODY, "model": "absent"}, 404, "model"),
            ({"prompt": "a"}, 400, "model"),
            ({**BODY, "model": 5}, 400, "model"),
        ):
            answer = await r.http.post("/tokenize", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert (await r.http.get("/tokenize")).status_code == 405
        assert not r.engines[0].requests


async def test_a_key_s_models_are_all_it_may_ask() -> None:
    keys = ("sk-a",)
    async with rig([FakeEngine(script=tokenize)], api_keys=keys) as r:
        assert (await r.http.post("/tokenize", json=BODY)).status_code == 401
        headers = {"authorization": "Bearer sk-a"}
        assert (await r.http.post("/tokenize", json=BODY, headers=headers)).status_code == 200
