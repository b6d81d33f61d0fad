"""Real engines behind the router: what they say of their caches and their speed brings prompts back to their prefix."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from argosy_engine.protocol.fleet import Endpoint, FleetDocument, FleetService
from argosy_router.policy.rates import PRIOR_PREFILL_TOKENS_PER_S
from processes import Server, free_port, running

from .harness import rig

ENGINE = [
    *("argosy_engine.api.serve", "builtin://tiny", "--served-model-name", "tiny", "--threads", "1"),
    "--disable-log-stats",
]
TOPICS = ("harbor", "lantern", "winter", "orchard", "signal", "granite")


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Server]]:
    ports = [free_port() for _ in range(3)]
    servers = [running([*ENGINE, "--port", str(port)], tmp_path / f"log{port}", port=port) for port in ports]
    with ExitStack() as stack, ThreadPoolExecutor() as starters:
        yield list(starters.map(stack.enter_context, servers))


async def test_prompts_come_back_to_their_prefix(engines: list[Server]) -> None:
    """The fleet idles: nothing but the time that a hit saves tells the replicas apart."""
    endpoints = tuple(Endpoint(name=f"r{number}", url=engine.url) for number, engine in enumerate(engines))
    service = FleetService(namespace="default", name="svc", uid="u", model="tiny", endpoints=endpoints)
    async with rig(document=FleetDocument(services=(service,)), wait=False) as r:
        await r.until(lambda: all(replica.is_synced for replica in r.router.fleet.replicas()))
        await r.chat("How fast are you? " * 50, max_tokens=2)
        loads = [replica.load for replica in r.router.fleet.replicas()]
        await r.until(lambda: all(load.prefill_tokens_per_s != PRIOR_PREFILL_TOKENS_PER_S for load in loads))
        prefixes = {topic: f"The {topic} is old and the {topic} is far away. " * 24 for topic in TOPICS}
        homes = {}
        for topic, prefix in prefixes.items():
            first = await r.chat(prefix + "What is it?", max_tokens=2)
            homes[topic] = first.headers["x-argosy-replica"]
            assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] < 100
        assert len(set(homes.values())) > 1
        for turn in ("Who lives there?", "How long does it take?"):
            for topic, prefix in prefixes.items():
                answer = await r.chat(prefix + turn, max_tokens=2)
                assert answer.headers["x-argosy-replica"] == homes[topic]
                assert answer.headers["x-argosy-route"] in ("cached", "predicted")
                usage = answer.json()["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= 0.8 * usage["prompt_tokens"]
                assert int(answer.headers["x-argosy-predicted-tokens"]) == pytest.approx(cached, abs=128)
