"""Model names that only the fleet document has: engines learn from a header which name clients used."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import unquote

import pytest

from argosy_protocol.fleet import Canary, FleetDocument
from argosy_protocol.headers import MODEL_NAME
from argosy_router.config import FlowControlLimits

from .fake_engine import DONE, Connection, FakeEngine, Received, answer_normally, completion
from .harness import Rig, chat, rig, service
from .queueing import ONE_AT_A_TIME

STABLE = "svc"
"""What engines call the model."""
PROMPT = "word " * 200


def named(body: bytes, name: str) -> bytes:
    return body.replace(b'"model": "tiny"', b'"model": ' + json.dumps(name).encode())


async def answer_by_header(connection: Connection, request: Received) -> None:
    """As our engine: the header's name goes into the answer, and without it only its own names exist."""
    engine = connection.engine
    given = request.headers.get(MODEL_NAME)
    name = unquote(given) if given is not None else request.json["model"]
    if given is None and name not in (engine.model, *engine.aliases):
        connection.answer(404, b'{"error":{"message":"no such model"}}')
    elif request.json.get("stream"):
        connection.begin_stream()
        connection.chunk(named(b'data: {"id": "x", "model": "tiny", "choices": []}\n\n', name))
        connection.chunk(DONE)
        connection.end_stream()
    else:
        connection.answer(200, named(completion(), name))


def new_engine() -> FakeEngine:
    return FakeEngine(model=STABLE, hello={"takes_model_name": True}, script=answer_by_header)


def old_engine(*names: str) -> FakeEngine:
    """From before: it knows the names it was started with."""
    model, *aliases = names
    return FakeEngine(model=model, aliases=tuple(aliases), script=answer_by_header)


def names(model: str, *aliases: str) -> dict[str, Any]:
    return {"model": model, "aliases": aliases, "engine_model": STABLE}


def fleet(engines: list[FakeEngine], model: str, *aliases: str) -> FleetDocument:
    return FleetDocument(services=(service(engines, **names(model, *aliases)),))


async def answers(r: Rig, name: str) -> list[str]:
    """The names in an answer and in a stream for `name`."""
    unary = await r.chat(model=name)
    assert unary.status_code == 200, unary.text
    stream = await r.chat(model=name, stream=True)
    assert stream.status_code == 200, stream.text
    events = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
    return [unary.json()["model"], *(json.loads(event)["model"] for event in events)]


ASKED = ("org/Tiny", "small", "default/svc")
NO_QUEUE = FlowControlLimits(max_queued_requests=0)


async def test_an_error_names_the_model_as_the_client_did_while_no_replica_is_ready() -> None:
    async with rig([], wait=False, fields=names("org/Tiny", "small")) as r:
        for name in ASKED:
            answer = await r.chat(model=name)
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == f"no replica of model {name!r} is ready"


async def test_an_error_names_the_model_as_the_client_did_where_it_is_busy() -> None:
    fields = {**names("org/Tiny", "small"), **ONE_AT_A_TIME}
    async with rig([new_engine()], fields=fields, flow_control=NO_QUEUE) as r:
        charge = r.replica(0).load.charge(1)
        for name in ASKED:
            answer = await r.chat(model=name)
            assert answer.status_code == 429
            assert answer.json()["error"]["message"] == f"model {name!r} has more requests than it can take"
        charge.release()


async def test_an_error_names_the_model_as_the_client_did_after_a_failed_attempt() -> None:
    async def fail(connection: Connection, request: Received) -> None:
        connection.die()

    engine = FakeEngine(model=STABLE, hello={"takes_model_name": True}, script=fail)
    async with rig([engine], fields=names("org/Tiny", "small")) as r:
        answer = await r.chat(model="default/svc")
        assert answer.status_code == 502
        assert "'default/svc'" in answer.json()["error"]["message"]


async def test_an_engine_of_another_make_gets_the_name_that_it_was_started_with_though_clients_cannot_use_it() -> (
    None
):
    engine = FakeEngine(model="team-a/chat", aliases=("own",), has_telemetry=False, script=answer_by_header)
    fields = {"model": "default/svc", "aliases": ("own",), "withheld_model": "team-a/chat"}
    async with rig([engine], fields=fields) as r:
        for name in ("default/svc", "own"):
            assert set(await answers(r, name)) == {name}
        assert [request.json["model"] for request in engine.requests] == ["team-a/chat"] * 2 + ["own"] * 2
        assert (await r.chat(model="team-a/chat")).status_code == 404


async def test_answers_have_the_name_that_was_asked_for_and_bodies_keep_their_bytes() -> None:
    engines = [new_engine()]
    async with rig(engines, fields=names("org/Tiny", "small", "kleine-Größe")) as r:
        for name in ("org/Tiny", "small", "kleine-Größe", "default/svc"):
            assert set(await answers(r, name)) == {name}
        body = json.dumps(chat(model="small"), indent=3).encode()
        await r.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert engines[0].requests[-1].body == body
        assert (await r.chat(model=STABLE)).status_code == 404, "it is no name of clients"


async def test_a_live_service_answers_to_a_new_name_at_once_and_to_the_old_one_until_it_goes() -> None:
    engines = [new_engine(), new_engine()]
    async with rig(engines, fields=names("old")) as r:
        replicas, syncs = list(r.router.fleet.replicas()), r.metric("telemetry_syncs_total")
        first = await r.chat(PROMPT, model="old")
        r.discovery.set(fleet(engines, "new", "old"))
        for name in ("new", "old"):
            assert set(await answers(r, name)) == {name}
        again = await r.chat(PROMPT, model="new")
        assert again.headers["x-argosy-replica"] == first.headers["x-argosy-replica"]
        assert int(again.headers["x-argosy-predicted-tokens"]) > 100, "what is known of caches is kept"
        r.discovery.set(fleet(engines, "new"))
        assert (await r.chat(model="old")).status_code == 404
        assert set(await answers(r, "new")) == {"new"}
        assert list(r.router.fleet.replicas()) == replicas
        assert r.metric("telemetry_syncs_total") == syncs, "no replica was given up"
        models = (await r.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == ["new"]
        assert r.metric('requests_total{code="200",model="new"}') > 0


async def test_a_running_request_survives_the_renaming() -> None:
    opens = asyncio.Event()

    async def late(connection: Connection, request: Received) -> None:
        await opens.wait()
        await answer_by_header(connection, request)

    engines = [new_engine()]
    engines[0].script = late
    async with rig(engines, fields=names("old")) as r:
        asking = asyncio.create_task(r.chat(model="old"))
        await r.until(lambda: bool(engines[0].requests))
        r.discovery.set(fleet(engines, "new"))
        opens.set()
        assert (await asking).json()["model"] == "old"


async def test_engines_from_before_are_asked_by_a_name_they_know() -> None:
    engines = [old_engine("old", "small")]
    async with rig(engines, fields=names("old", "small")) as r:
        for name in ("old", "small", "default/svc"):
            assert set(await answers(r, name)) == {name}
        assert {request.json["model"] for request in engines[0].requests} == {"old"}


async def test_a_fleet_half_way_through_an_upgrade_answers_by_all_names() -> None:
    engines = [old_engine("old", "small"), new_engine()]
    async with rig(engines, fields=names("old", "small"), policy="round-robin") as r:
        for name in ("old", "small", "default/svc"):
            for _ in range(2):
                assert set(await answers(r, name)) == {name}
        assert all(engine.requests for engine in engines)


async def test_a_request_that_waited_reaches_a_replica_that_knows_less() -> None:
    """Between its arrival and its turn an older engine has taken the newer one's place."""
    new, old = new_engine(), old_engine("old")
    opens = asyncio.Event()

    async def refuse(connection: Connection, _: Received) -> None:
        await opens.wait()
        connection.answer(503, b"{}")

    new.script = refuse
    async with rig([new], fields=names("old")) as r, old:
        asking = asyncio.create_task(r.chat(model="default/svc"))
        await r.until(lambda: bool(new.requests))
        r.discovery.set(fleet([new, old], "old"))
        await r.until_state(1, "synced")
        opens.set()
        assert (await asking).status_code == 200
        assert old.requests[0].json["model"] == "old"


async def test_a_canary_answers_by_the_name_of_its_service() -> None:
    main, canary = new_engine(), new_engine()
    canary.model = "svc2"
    async with rig([main, canary]) as r:
        weighted = Canary(service="next", weight=100)
        r.discovery.set(
            FleetDocument(
                services=(
                    service([main], model="tiny", engine_model=STABLE, canary=weighted),
                    service([canary], name="next", uid="uid-2", model="tiny-next", engine_model="svc2"),
                )
            )
        )
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        assert set(await answers(r, "tiny")) == {"tiny"}
        assert canary.requests
        assert not main.requests
        assert {request.json["model"] for request in canary.requests} == {"tiny"}


@pytest.mark.parametrize("has_telemetry", [True, False])
async def test_clients_cannot_say_it_themselves(has_telemetry: bool) -> None:
    async with rig([FakeEngine(has_telemetry=has_telemetry, script=answer_normally)]) as r:
        answer = await r.http.post("/v1/chat/completions", json=chat(), headers={MODEL_NAME: "another"})
        assert answer.status_code == 200
        assert MODEL_NAME not in r.engines[0].requests[0].headers
