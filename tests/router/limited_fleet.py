"""Two replicas behind a key with few parallel requests and a short queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from argosy_protocol.fleet import FleetDocument, ServiceLimits, encode_fleet
from argosy_router.config import FlowControlLimits
from argosy_router.discovery.sources import snapshot_of
from argosy_router.fleet.replica import Member

from .fake_engine import MODEL, FakeEngine, answer_normally
from .harness import Rig, rig, service

MAX_PARALLEL_REQUESTS = 4


@contextlib.asynccontextmanager
async def limited(tmp_path: Path, *scripts: Callable[..., Any], **config: Any) -> AsyncIterator[Rig]:
    """Two replicas, of which only r1 has the adapter and the alias, a key with few parallel requests, a short queue."""
    keys = tmp_path / "keys"
    terms = f"max_parallel_requests={MAX_PARALLEL_REQUESTS} tokens_per_minute=1000000000"
    keys.write_text(f"sk-key name=key {terms}\n")
    engines = [FakeEngine(script=script) for script in scripts]
    fields = {"limits": ServiceLimits(max_inflight_per_replica=2)}
    queue = FlowControlLimits(queue_timeout_s=0.5)
    async with rig(engines, api_keys_file=keys, fields=fields, **{"flow_control": queue, **config}) as r:
        spec = service(engines, adapters=("sql",), aliases=("small",), **fields)
        document = FleetDocument(services=(spec,))
        members = tuple(
            Member(f"r{n}", "", engine.url, adapters=("sql",) * n, aliases=("small",) * n)
            for n, engine in enumerate(engines)
        )
        snapshot = snapshot_of(document, encode_fleet(document))
        r.router.fleet.apply(replace(snapshot, members={spec.qualified_name: members}))
        r.http.headers["authorization"] = "Bearer sk-key"
        yield r
        await at_rest(r)


def gauges(r: Rig) -> dict[str, float]:
    figures = {
        name: r.metric(f'{name}{{model="{MODEL}"}}') for name in ("admitted_requests", "queued_requests")
    }
    figures["inflight_body_bytes"] = r.metric("inflight_body_bytes")
    figures["requests"] = r.router.requests.inflight
    for replica in r.router.fleet.replicas():
        load = replica.load
        figures |= {
            f"{replica.name} {name}": getattr(load, name)
            for name in (
                "inflight",
                "inflight_sequences",
                "inflight_tokens",
                "queued_tokens",
                "requests",
                "wait_s",
            )
        }
        figures[f"{replica.name} attempts"] = len(replica.inflight_attempts)
    return figures


async def at_rest(r: Rig) -> None:
    try:
        await r.until(lambda: not any(gauges(r).values()))
    except TimeoutError:
        assert not {name: value for name, value in gauges(r).items() if value}
    for engine in r.engines:
        engine.script = answer_normally
    # As many at once as the key may have: one that had been kept would be refused.
    answers = await asyncio.gather(
        *(
            r.http.post("/tokenize", json={"model": MODEL, "prompt": "x"})
            for _ in range(MAX_PARALLEL_REQUESTS)
        )
    )
    assert "rate_limit_exceeded" not in "".join(answer.text for answer in answers)
