"""Model names that only some replicas list: which replicas get requests for them."""

from __future__ import annotations

import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_router.discovery import model_discovery

from .discovered_fleet import PROMPT, routing
from .fake_engine import Connection, FakeEngine, Received, answer_normally
from .harness import Rig, chat, rig, service


async def answer_by_name(connection: Connection, request: Received) -> None:
    """Like every OpenAI server, it does not know a model it does not list."""
    if request.json["model"] in (connection.engine.model, *connection.engine.aliases):
        await answer_normally(connection, request)
    else:
        connection.answer(404, b'{"error":{"message":"no such model"}}')


def engine(*aliases: str) -> FakeEngine:
    return FakeEngine(has_telemetry=False, aliases=aliases, script=answer_by_name)


def asked(engine: FakeEngine) -> set[str]:
    return {request.json["model"] for request in engine.requests}


def partial(r: Rig) -> frozenset[str]:
    (only,) = r.router.fleet.services.values()
    return only.candidates.partial_aliases


@pytest.mark.parametrize("policy", ["cost", "round-robin", "prefix-hash"])
async def test_only_those_that_list_it_are_asked_by_it(policy: str) -> None:
    plain, named = engine(), engine("small")
    async with routing(plain, named) as r:
        r.router.fleet.policy = policy
        for number in range(6):
            assert (await r.chat(f"{number} {PROMPT}", model="small")).status_code == 200
        assert asked(named) == {"small"}
        assert not plain.requests
        for number in range(16):
            assert (await r.chat(f"another {number} {PROMPT}")).status_code == 200
        assert asked(plain) == {"tiny"}, "by the name that all list, all are asked"


async def test_an_alias_that_no_replica_lists_is_refused() -> None:
    plain, named = engine(), engine("small")
    async with routing(plain, named) as r:
        await named.stop()
        await r.until(lambda: not all(replica.is_routable for replica in r.router.fleet.replicas()))
        answer = await r.chat(model="small")
        assert answer.status_code == 503
        assert "'small'" in answer.json()["error"]["message"]
        assert not plain.requests
        assert (await r.chat()).status_code == 200


async def test_prefixes_of_an_alias_are_the_model_s() -> None:
    async with routing(engine(), engine("small")) as r:
        first = await r.chat(PROMPT, model="small")
        second = await r.chat(PROMPT)
        assert second.headers["x-argosy-replica"] == first.headers["x-argosy-replica"]
        assert int(second.headers["x-argosy-predicted-tokens"]) > 100


async def test_a_name_that_all_replicas_list_is_an_ordinary_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_discovery, "RECHECK_S", 0.005)
    plain, named = engine(), engine("small")
    async with routing(plain, named) as r:
        assert partial(r) == {"small"}
        plain.aliases = ("small",)
        await r.until(lambda: not partial(r))
        for number in range(8):
            assert (await r.chat(f"{number} {PROMPT}", model="small")).status_code == 200
        assert asked(plain) == asked(named) == {"small"}


async def test_the_aliases_of_a_document_are_all_its_replicas() -> None:
    engines = [FakeEngine(aliases=("small",)), FakeEngine(aliases=("small",))]
    async with rig(engines, policy="round-robin", fields={"aliases": ("small",)}) as r:
        assert not partial(r)
        assert {(await r.chat(model="small")).headers["x-argosy-replica"] for _ in range(4)} == {"r0", "r1"}
        r.discovery.set(FleetDocument(services=(service(engines, aliases=("small", "late")),)))
        assert not partial(r)
        names = {(await r.chat(model="late")).headers["x-argosy-replica"] for _ in range(4)}
        assert names == {"r0", "r1"}


async def test_the_explanation_names_replicas_without_the_alias() -> None:
    async with rig([FakeEngine(), FakeEngine()], fields={"aliases": ("small",)}, admin_port=0) as r:
        (only,) = r.router.fleet.services.values()
        only.candidates.partial_aliases = frozenset(("small",))
        r.replica(0).names = frozenset()
        told = (await r.http.post(r.router.admin_url + "/explain", json=chat(model="small"))).json()
        assert told["replica"] == "r1"
        assert [(row["replica"], row["reason"]) for row in told["excluded"]] == [
            ("r0", "it does not have 'small'")
        ]
