"""Polling of foreign replicas, such as stock vLLM and SGLang, which have no telemetry stream.

Owns: polling `/health` and `/metrics` of one replica. Must not know: telemetry, policies, other replicas.
Invariants: only `/health` decides whether the replica is used; if its load figures are not readable, its load is what
this router sent it; the prefixes it is believed to hold are forgotten when it restarts.
"""

# Not compiled: runs for each poll of an engine, not for each request.

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from argosy_router.fleet.links.engine_metrics import parse_load
from argosy_router.fleet.replica import Replica
from argosy_router.http.fetch import Fetcher
from argosy_router.http.upstream_errors import ConnectFailed, FirstByteTimeout, IdleTimeout, UpstreamError

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
"""Between polls the router adds its own requests to the figures; other routers' requests show with this delay."""
TIMEOUT_S = 5.0
MISSES = 2
"""Unanswered polls of `/health` in a row before the replica is no longer used: a busy replica may miss one."""
MAX_METRICS_BYTES = 4 * 1024 * 1024
"""vLLM's exposition is some 100 KB per rank."""


class ForeignPoller:
    """Polls one foreign replica, and updates its health and load."""

    def __init__(
        self,
        replica: Replica,
        on_change: Callable[[], None],
        on_silent: Callable[[bool], None],
        rng: random.Random,
    ) -> None:
        """`on_silent(False)` is called while polls are not answered, and moves requests whose response has not begun.
        Streams keep their own deadline, because no other replica can continue them."""
        self._replica = replica
        self._fetcher = Fetcher(replica.pool)
        self._on_change = on_change
        self._on_silent = on_silent
        self._rng = rng
        self._misses = 0
        self._has_load = True
        """Whether the last poll of `/metrics` had load figures; initially true, so that a first failure is logged."""
        self._looked_up_tokens = 0.0

    async def poll(self, rounds: int) -> None:
        """Poll `rounds` times, with pauses, on one connection while it lasts."""
        try:
            for _ in range(rounds):
                self._fetcher.key = self._replica.key.current
                await self._poll_health()
                if self._replica.health.is_answering:
                    await self._poll_load()
                await asyncio.sleep(POLL_INTERVAL_S * self._rng.uniform(0.8, 1.0))
        finally:
            self._fetcher.close()

    async def _poll_health(self) -> None:
        replica = self._replica
        is_silent = False
        try:
            response = await self._fetcher.get("/health", TIMEOUT_S)
        except UpstreamError as error:
            is_silent = _is_silence(error)
            self._misses += is_silent
            is_answering = is_silent and replica.health.is_answering and self._misses < MISSES
        else:
            self._misses = 0
            is_answering = response.status == 200
        is_first = replica.note_tried()
        if replica.health.polled(is_answering=is_answering) or is_first:
            self._on_change()
        if is_silent and not is_answering:
            self._on_silent(False)

    async def _poll_load(self) -> None:
        replica = self._replica
        try:
            response = await self._fetcher.get("/metrics", TIMEOUT_S, MAX_METRICS_BYTES)
            load = parse_load(response.body) if response.status == 200 else None
        except UpstreamError:
            load = None
        if load is None:
            if self._has_load:
                log.info("replica %s: no load figures at /metrics, going by what it is sent", replica.name)
                replica.load.forget()
            self._has_load = False
            return
        self._has_load = True
        if load.looked_up_tokens < self._looked_up_tokens:
            log.info("replica %s has restarted", replica.name)
            replica.prefixes.clear()
        self._looked_up_tokens = load.looked_up_tokens
        replica.load.report(
            requests=load.running + load.waiting, tokens=load.queued_tokens, kv_usage=load.kv_usage
        )


def _is_silence(error: UpstreamError) -> bool:
    """Return whether the replica did not react at all, like a stopped process or an unreachable host."""
    if isinstance(error, ConnectFailed):
        return not error.refused
    return isinstance(error, (FirstByteTimeout, IdleTimeout))
