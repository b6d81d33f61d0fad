"""Model names that only some replicas list: which replicas get requests for them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import timeit

import msgspec
import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_router.config import UpstreamLimits
from argosy_router.discovery import sources
from argosy_router.fleet.fleet import Fleet, FleetSnapshot
from argosy_router.fleet.replica import Member
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.upstream import UpstreamTls

from .discovered_fleet import PROMPT, routing
from .fake_engine import Connection, FakeEngine, Received, answer_normally
from .harness import Rig, chat, rig, service, until


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
    monkeypatch.setattr(sources, "RECHECK_S", 0.005)
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


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{number}" for number in range(count))


async def test_a_list_of_very_many_names_is_not_used_and_costs_no_other_replica_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every name goes with every adapter: with ten thousand of both a router had no memory left."""
    hostile = FakeEngine(model="big", aliases=numbered("a", 200), adapters=numbered("b", 200))
    halves = [FakeEngine(model="half", adapters=numbered(name, 3000)) for name in "cd"]
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(each) for each in (hostile, *halves, engine("small"))]
        published: list[FleetSnapshot] = []
        wheel = TimerWheel(asyncio.get_running_loop())
        discovery = sources.ModelDiscovery("static", "", wheel, UpstreamTls(), published.append)
        discovery.set_members([Member(f"r{number}", "", each.url) for number, each in enumerate(engines)])
        await until(lambda: not published[-1].unasked and published[-1].unheard == 1)
        services = {each.model: each for each in published[-1].document.services}
        assert set(services) == {"half", "tiny"}
        assert len(services["half"].adapters) == 3000, "those of the first"
        assert len(published[-1].members["static/half"]) == 2
        assert services["tiny"].aliases == ("small",)
        assert "it has 201 models and 200 adapters, which are too many" in caplog.text
        assert caplog.text.count("'half' have too many names together") == 1
        await discovery.close()
        wheel.close()


async def test_the_time_for_aliases_grows_with_their_number() -> None:
    """Each was looked for among those of all replicas: a list of a megabyte held the event loop for twelve seconds with
    each of its changes. CPU times are compared."""

    async def cpu_s(count: int) -> float:
        spec = service([], aliases=numbered("a", count))
        members = [
            Member(f"r{each}", "", "http://127.0.0.1:1", aliases=spec.aliases[each:]) for each in (0, 1)
        ]
        fleet = Fleet(wheel, UpstreamLimits())

        def apply() -> None:
            document = FleetDocument(services=(msgspec.structs.replace(spec, created=str(time.monotonic())),))
            fleet.apply(FleetSnapshot(document, "", {"default/svc": tuple(members)}))

        apply()
        taken_s = min(timeit.repeat(apply, timer=time.process_time, number=1, repeat=3))
        assert fleet.services["default/svc"].candidates.partial_aliases == {"a0"}
        await fleet.close()
        return taken_s

    wheel = TimerWheel(asyncio.get_running_loop())
    assert await cpu_s(4000) < 64 * max(await cpu_s(250), 0.0002)
    wheel.close()
