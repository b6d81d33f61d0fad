"""Canaries: their share of another service's requests, and none when they cannot answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from argosy_protocol.fleet import Canary, FleetDocument, FleetService
from argosy_router.admin.app import explain_body

from .fake_engine import DONE, Connection, FakeEngine, Received, completion, event
from .harness import Rig, chat, rig, service

STABLE, NEXT = "default/svc", "default/next"


async def answer_by_name(connection: Connection, request: Received) -> None:
    name = connection.engine.model
    assert request.json["model"] == name, "an engine is asked for its own model"
    if request.json.get("stream"):
        connection.begin_stream()
        connection.chunk(event("a").replace(b'"tiny"', json.dumps(name).encode()) + DONE)
        connection.end_stream()
    else:
        connection.answer(200, completion().replace(b'"tiny"', json.dumps(name).encode()))


def services(r_engines: list[FakeEngine], weight: int, **fields: Any) -> tuple[FleetService, FleetService]:
    stable, following = r_engines
    return (
        service([stable], canary=Canary(service="next", weight=weight), **fields),
        service([following], name="next", uid="uid-2", model="tiny-next"),
    )


@contextlib.asynccontextmanager
async def canaried(weight: int, **config: Any) -> AsyncIterator[Rig]:
    engines = [
        FakeEngine(script=answer_by_name),
        FakeEngine(script=answer_by_name, model="tiny-next", hello={"model": "tiny-next"}),
    ]
    async with engines[0], engines[1]:
        document = FleetDocument(services=services(engines, weight))
        async with rig(engines, document=document, **config) as r:
            yield r


async def answered_by(r: Rig, headers: list[dict[str, str]], **fields: Any) -> list[str]:
    """The services that answer one request with each of the headers."""
    answers = []
    for each in headers:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        answer = await r.http.post("/v1/chat/completions", json=body, headers=each)
        assert answer.status_code == 200
        assert answer.json()["model"] == fields.get("model", "tiny")
        answers.append(answer.headers["x-argosy-service"])
    return answers


def ids(count: int) -> list[dict[str, str]]:
    return [{"x-request-id": f"request-{number}"} for number in range(count)]


@pytest.mark.parametrize(("weight", "expected"), [(0, 0), (20, 40), (100, 200)])
async def test_a_canary_gets_its_share(weight: int, expected: int) -> None:
    async with canaried(weight) as r:
        counts = Counter(await answered_by(r, ids(200)))
        assert counts[NEXT] == pytest.approx(expected, abs=20 if 0 < weight < 100 else 0)
        assert counts[NEXT] == len(r.engines[1].requests) == 200 - counts[STABLE]
        for key in (STABLE, NEXT):
            assert r.metric(f'canary_requests_total{{model="tiny",service="{key}"}}') == counts[key]
        assert r.metric('requests_total{code="200",model="tiny-next"}') == counts[NEXT]


async def test_the_same_id_and_the_same_session_go_the_same_way() -> None:
    async with canaried(50) as r:
        for headers in (ids(20), [{"x-session-id": f"session-{number}"} for number in range(20)]):
            first = await answered_by(r, headers)
            assert set(first) == {STABLE, NEXT}
            assert await answered_by(r, headers) == first
            r.discovery.set(FleetDocument(services=services(list(r.engines), 70)))
            raised = await answered_by(r, headers)
            assert all(after == NEXT for before, after in zip(first, raised, strict=True) if before == NEXT)
            r.discovery.set(FleetDocument(services=services(list(r.engines), 50)))
        by_key = await answered_by(r, ids(20), prompt_cache_key="session-0")
        assert set(by_key) == {first[0]}, "by whatever name the session is declared, and whatever the id"


async def test_only_requests_for_the_service_itself_are_shared() -> None:
    async with canaried(100) as r:
        assert await answered_by(r, ids(3), model="tiny-next") == [NEXT] * 3
        assert await answered_by(r, ids(3), model=STABLE) == [NEXT] * 3
        assert not r.engines[0].requests
        streamed = await r.chat(stream=True)
        assert streamed.text == (event("a") + DONE).decode(), "a stream names the model as the client did"


async def test_a_canary_that_cannot_answer_gets_nothing() -> None:
    async with canaried(100) as r:
        stable, following = services(list(r.engines), 100)
        r.discovery.set(FleetDocument(services=(stable,)))
        assert await answered_by(r, ids(3)) == [STABLE] * 3
        r.discovery.set(FleetDocument(services=(stable, service([], name="next", uid="uid-2", model="n"))))
        assert await answered_by(r, ids(3)) == [STABLE] * 3
        r.discovery.set(FleetDocument(services=(stable, following)))
        canary = r.router.fleet.services[NEXT]
        await r.until(lambda: canary.candidates.can_answer(0.0))
        assert await answered_by(r, ids(3)) == [NEXT] * 3
        for replica in canary.replicas.values():
            assert replica.health.failed(1e12, refused=True, may_eject=True)
        assert await answered_by(r, ids(3)) == [STABLE] * 3


async def test_the_canarys_own_canary_does_not_count() -> None:
    async with canaried(100) as r:
        stable, _ = services(list(r.engines), 100)
        back = service(
            r.engines[1:],
            name="next",
            uid="uid-2",
            model="tiny-next",
            canary=Canary(service="svc", weight=100),
        )
        r.discovery.set(FleetDocument(services=(stable, back)))
        assert await answered_by(r, ids(3)) == [NEXT] * 3


@pytest.mark.parametrize("weight", [0, 50, 100])
async def test_both_may_serve_the_same_name(weight: int) -> None:
    engines = [FakeEngine(script=answer_by_name), FakeEngine(script=answer_by_name)]
    async with engines[0], engines[1]:
        stable, following = services(engines, weight, created="2026-02-01T00:00:00Z")
        following = replace(following, model="tiny", created="2026-01-01T00:00:00Z")
        async with rig(engines, document=FleetDocument(services=(following, stable))) as r:
            counts = Counter(await answered_by(r, ids(40)))
            assert {key for key, count in counts.items() if count} == (
                {STABLE} if not weight else {STABLE, NEXT} if weight < 100 else {NEXT}
            )
            assert [len(engine.requests) for engine in engines] == [counts[STABLE], counts[NEXT]]
            assert r.metric('requests_total{code="200",model="tiny"}') == 40
            assert await answered_by(r, ids(3), model=NEXT) == [NEXT] * 3
            listed = (await r.http.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["tiny"]
            r.discovery.set(FleetDocument(services=(following,)))
            assert await answered_by(r, ids(3)) == [NEXT] * 3, "the old one is gone: no name has to change"


async def test_a_key_for_the_service_covers_its_canary_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-client").hexdigest()
    path.write_text(f"sha256:{digest} name=client models=tiny\n")
    async with canaried(100, api_keys_file=path) as r:
        r.http.headers["authorization"] = "Bearer sk-client"
        assert await answered_by(r, ids(2)) == [NEXT] * 2
        assert (await r.chat(model="tiny-next")).status_code == 404


async def test_explanations_follow_a_session_to_the_canary() -> None:
    async with canaried(50) as r:
        body = json.dumps(chat()).encode()
        sessions = [f"session-{number}" for number in range(10)]
        answered = await answered_by(r, [{"x-session-id": session} for session in sessions])
        explained = [
            json.loads(explain_body(r.router.fleet, body, session.encode()))["service"]
            for session in sessions
        ]
        assert explained == answered
        assert json.loads(explain_body(r.router.fleet, body, b""))["service"] == STABLE
