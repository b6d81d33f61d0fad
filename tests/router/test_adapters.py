"""LoRA adapters of other engines: which replica gets a request, and what counts as its prefix."""

from __future__ import annotations

import json

import pytest

from argosy_router.auth.accounts import Account
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.discovery import sources
from argosy_router.proxy.call import may_use

from .discovered_fleet import PROMPT, routing
from .fake_engine import Connection, FakeEngine, Received, completion, event


async def answer_by_name(connection: Connection, request: Received) -> None:
    """Like vLLM, which answers 404 for an adapter it does not have, and names the adapter in its answer."""
    name = request.json["model"]
    if name not in (connection.engine.model, *connection.engine.adapters):
        connection.answer(404, b'{"error":{"message":"no such model"}}')
    elif request.json.get("stream"):
        connection.begin_stream()
        for text in ('"model":"tiny"', "b"):
            connection.chunk(event(text).replace(b'"tiny"', json.dumps(name).encode()))
        connection.end_stream()
    else:
        connection.answer(200, completion().replace(b'"tiny"', json.dumps(name).encode()))


def vllm(*adapters: str) -> FakeEngine:
    return FakeEngine(has_telemetry=False, adapters=adapters, script=answer_by_name)


async def test_requests_go_to_the_replicas_that_list_the_adapter() -> None:
    both, legal, base = vllm("sql", "legal"), vllm("legal"), vllm()
    async with routing(base, both, legal) as r:
        for number in range(8):
            assert (await r.chat(f"{number} {PROMPT}", model="tiny:sql")).status_code == 200
            assert (await r.chat(f"{number} {PROMPT}", model="legal")).status_code == 200
        assert {request.json["model"] for request in both.requests} >= {"sql"}
        assert {request.json["model"] for request in legal.requests} == {"legal"}
        assert not base.requests
        for number in range(8):
            assert (await r.chat(f"{number} {PROMPT}")).status_code == 200
        assert base.requests


async def test_an_adapter_whose_replicas_are_gone_is_not_looked_for_elsewhere() -> None:
    only, base = vllm("sql"), vllm()
    async with routing(only, base) as r:
        await only.stop()
        await r.until(lambda: not all(replica.is_routable for replica in r.router.fleet.replicas()))
        answer = await r.chat(model="tiny:sql")
        assert answer.status_code == 503
        assert "tiny:sql" in answer.json()["error"]["message"]
        assert (await r.chat()).status_code == 200
        assert not any(request.json["model"] == "sql" for request in base.requests)


async def test_an_adapter_has_a_prefix_cache_of_its_own() -> None:
    async with routing(vllm("sql")) as r:
        await r.chat(PROMPT)
        predicted = [
            int((await r.chat(PROMPT, model=model)).headers["x-argosy-predicted-tokens"])
            for model in ("tiny:sql", "sql", "tiny")
        ]
        assert predicted[0] == 0
        assert min(predicted[1:]) > 100, "by either name it is the same adapter"


async def test_answers_name_the_adapter_as_the_client_did() -> None:
    async with routing(vllm("sql")) as r:
        for name in ("tiny:sql", "sql", "tiny", "static/tiny", "static/tiny:sql"):
            assert (await r.chat(model=name)).json()["model"] == name
        streamed = (await r.chat(model="tiny:sql", stream=True)).text
        assert streamed.count('"model": "tiny:sql"') == 2
        assert '\\"model\\":\\"tiny\\"' in streamed, "generated text stays as it is"


async def test_models_are_listed_with_their_adapters() -> None:
    async with routing(vllm("sql")) as r:
        cards = (await r.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
            ("tiny", "tiny", None),
            ("tiny:sql", "sql", "tiny"),
        ]
        assert (await r.http.get("/v1/models/sql")).json()["parent"] == "tiny"


async def test_an_adapter_that_is_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "RECHECK_S", 0.005)
    engine = vllm()
    async with routing(engine) as r:
        assert (await r.chat(model="tiny:sql")).status_code == 404
        replica = next(r.router.fleet.replicas())
        engine.adapters = ("sql",)
        await r.until(lambda: r.router.fleet.service_of("tiny:sql") is not None)
        assert (await r.chat(model="tiny:sql")).status_code == 200
        assert next(r.router.fleet.replicas()) is replica, "what is known of the replica stays"


@pytest.mark.parametrize(
    ("models", "may"),
    [(("tiny",), True), (("tiny:sql",), True), (("sql",), True), (("tiny:legal",), False)],
)
async def test_a_key_for_the_model_or_for_one_of_its_adapters(models: tuple[str, ...], may: bool) -> None:
    async with routing(vllm("sql", "legal")) as r:
        service = r.router.fleet.service_of("sql")
        assert service is not None
        assert (
            may_use(r.router.fleet, Account(KeyTerms(name="k", models=models), 0.0), "sql", service, "sql")
            is may
        )
