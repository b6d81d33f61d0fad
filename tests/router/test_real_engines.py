"""Real engines behind the router: their telemetry brings prompts back to their cached prefix.

The router's deadlines stand still, because engines that start and compute beside other work may keep it waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService
from processes import Server, free_port, running

from .engine_processes import ENGINE, EnginePool
from .harness import DEADLINE_S, Rig, StoppedClock, rig

pytestmark = pytest.mark.timeout(300)  # for processes that start beside other work

TOPICS = ("harbor", "lantern", "winter", "orchard", "signal", "granite")
OTHER_TOPICS = ("copper", "meadow", "voyage", "candle")
"""The engines of other tests hold none of them."""


async def test_prompts_come_back_to_their_prefix(engine_pool: EnginePool) -> None:
    """The fleet idles: nothing but the time that a hit saves tells the replicas apart."""
    engines = engine_pool.take(3)
    endpoints = tuple(Endpoint(name=f"r{number}", url=engine.url) for number, engine in enumerate(engines))
    service = FleetService(namespace="default", name="svc", uid="u", model="tiny", endpoints=endpoints)
    async with rig(
        document=FleetDocument(services=(service,)), wait=False, admin_port=0, clock=StoppedClock()
    ) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        prefixes = [f"The {topic} is old and the {topic} is far away. " * 24 for topic in TOPICS]
        for number, prefix in enumerate(prefixes):
            asked = {
                "model": "tiny",
                "max_tokens": 2,
                "messages": [{"role": "user", "content": prefix + "What is it?"}],
            }
            first = await r.http.post(engines[number % 3].url + "/v1/chat/completions", json=asked)
            assert first.status_code == 200, first.text
            await heard_of(r, asked, f"r{number % 3}")
        for turn in ("Who lives there?", "How long does it take?"):
            for number, prefix in enumerate(prefixes):
                answer = await r.chat(prefix + turn, max_tokens=2)
                assert answer.headers["x-argosy-replica"] == f"r{number % 3}"
                assert answer.headers["x-argosy-route"] == "cached"
                usage = answer.json()["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= 0.8 * usage["prompt_tokens"]
                assert int(answer.headers["x-argosy-predicted-tokens"]) == pytest.approx(cached, abs=128)


@pytest.fixture
def unequal_engines(engine_pool: EnginePool, tmp_path: Path) -> Iterator[list[Server]]:
    """One of two cores, and one of one core."""
    port = free_port()
    command = [*ENGINE, "--port", str(port), "--data-parallel-size", "2"]
    with running(command, tmp_path / "log", port=port) as up:
        yield [up, *engine_pool.take(1)]


async def test_prompts_come_back_to_the_core_with_their_prefix(unequal_engines: list[Server]) -> None:
    endpoints = tuple(
        Endpoint(name=f"r{number}", url=engine.url) for number, engine in enumerate(unequal_engines)
    )
    service = FleetService(namespace="default", name="svc", uid="u", model="tiny", endpoints=endpoints)
    async with rig(
        document=FleetDocument(services=(service,)), wait=False, admin_port=0, clock=StoppedClock()
    ) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        assert [replica.load.data_parallel_size for replica in r.router.fleet.replicas()] == [2, 1]
        assert r.replica(0).load.max_num_seqs == 2 * r.replica(1).load.max_num_seqs
        prefixes = [f"The {topic} is old and the {topic} is far away. " * 24 for topic in OTHER_TOPICS]
        for rank, prefix in zip((0, 1, 0, 1), prefixes, strict=True):
            messages = [{"role": "user", "content": prefix + "What is it?"}]
            asked = {"model": "tiny", "max_tokens": 2, "messages": messages}
            first = await r.http.post(
                unequal_engines[0].url + "/v1/chat/completions", json={**asked, "data_parallel_rank": rank}
            )
            assert first.status_code == 200, first.text
            await heard_of(r, asked, "r0")
        for turn in ("Who lives there?", "How long does it take?"):
            for prefix in prefixes:
                answer = await r.chat(prefix + turn, max_tokens=2)
                assert answer.headers["x-argosy-replica"] == "r0"
                assert answer.headers["x-argosy-route"] == "cached"
                usage = answer.json()["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= 0.8 * usage["prompt_tokens"], "it went to the core that holds the prefix"
                assert int(answer.headers["x-argosy-predicted-tokens"]) == pytest.approx(cached, abs=128)
        refused = await r.chat("x", data_parallel_rank=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "data_parallel_rank")


async def heard_of(r: Rig, body: dict[str, Any], name: str) -> None:
    """Until the router knows that the replica holds this prompt."""
    async with asyncio.timeout(DEADLINE_S):
        held = 0.0
        while held < 0.8:
            told = (await r.http.post(r.router.admin_url + "/explain", json=body)).json()
            (candidate,) = (each for each in told["candidates"] if each["replica"] == name)
            held = candidate["hit_tokens"] / told["prompt_tokens"]


async def test_a_live_service_is_renamed_without_a_gap(engine_pool: EnginePool) -> None:
    (engine,) = engine_pool.take(1)

    def fleet(model: str, *aliases: str) -> FleetDocument:
        named = FleetService(
            namespace="default",
            name="tiny",
            uid="u",
            model=model,
            aliases=aliases,
            engine_model="tiny",
            endpoints=(Endpoint(name="r0", url=engine.url),),
        )
        return FleetDocument(services=(named,))

    prompt = "The tunnel is old and the tunnel is far away. " * 20
    async with rig(document=fleet("old"), wait=False, clock=StoppedClock()) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        assert (await r.chat(prompt, model="old", max_tokens=2)).json()["model"] == "old"
        r.discovery.set(fleet("org/New", "old"))
        for name in ("org/New", "old"):
            answer = await r.chat(prompt, model=name, max_tokens=2)
            assert answer.json()["model"] == name
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
            stream = await r.chat(prompt, model=name, max_tokens=2, stream=True)
            assert stream.text.count(f'"model":"{name}"') == stream.text.count('"object"') > 1
        body = {"model": "old", "prompt": "x", "max_tokens": 1}
        direct = await r.http.post(engine.url + "/v1/completions", json=body)
        assert direct.json()["model"] == "old", "past the router"
