"""Overview of the router for the admin page.

Owns: which figures of services and replicas are shown. Must not know: HTTP, how they are rendered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from argosy_protocol import __version__
from argosy_router.admin.history import History, Trend
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.metrics.registry import Metrics

REPLICAS_PER_TURN = 500
"""As many are viewed in one turn of the event loop; each takes some 10 us."""


class ReplicaView(Struct, frozen=True, kw_only=True):
    """One replica."""

    name: str
    url: str
    state: str
    is_available: bool
    """Whether it may get requests."""
    inflight: int
    """Requests of this router that have not ended."""
    requests: int
    """Requests running or waiting there, of all routers."""
    max_num_seqs: int
    queued_tokens: int
    kv_usage: float
    prefill_tokens_per_s: float | None
    """As measured; None: not measured yet."""
    decode_step_s: float | None
    hit_ratio: float | None
    """Share of prompt tokens that came from its cache, since the router started."""
    heard_s: float | None
    """Seconds since its last heartbeat."""
    idle_connections: int


class ServiceView(Struct, frozen=True, kw_only=True):
    """One service."""

    service: str
    model: str
    aliases: Sequence[str]
    policy: str
    model_source: str
    """Where its model is fetched from; empty if it is not."""
    model_fetch: str
    """How far that is: `cached`, `fetching 40 %`; empty if nothing is known."""
    index_chunks: int
    bytes_per_token: float
    trend: Trend
    replicas: Sequence[ReplicaView]


class Overview(Struct, frozen=True, kw_only=True):
    """The whole router."""

    router: str
    version: str
    uptime_s: float
    state: str
    """`ready`, `starting` (replicas not found or not tried yet, or all refuse the router's key), or `draining`."""
    connections: int
    services: Sequence[ServiceView]


class Overviews:
    """Builds overviews of the router called `name`."""

    def __init__(
        self, fleet: Fleet, metrics: Metrics, history: History, name: str, connections: Callable[[], int]
    ) -> None:
        """`connections` returns the number of connected clients."""
        self._fleet = fleet
        self._metrics = metrics
        self._history = history
        self._name = name
        self._connections = connections
        self._started = time.monotonic()

    async def now(self, *, is_ready: bool, is_draining: bool) -> Overview:
        """Build an overview of the current state, in turns."""
        now = time.monotonic()
        trend = self._history.trends(now)
        views: list[ServiceView] = []
        num_replicas = 0
        for service in list(self._fleet.services.values()):
            views.append(self._service(service, trend, now))
            num_replicas += 1 + len(service.replicas)
            if num_replicas >= REPLICAS_PER_TURN:
                num_replicas = 0
                await asyncio.sleep(0)
        waiting = "draining" if is_draining else "starting"
        return Overview(
            router=self._name,
            version=__version__,
            uptime_s=now - self._started,
            state="ready" if is_ready else waiting,
            connections=self._connections(),
            services=views,
        )

    def _service(self, service: Service, trend: Callable[[str], Trend], now: float) -> ServiceView:
        model, fetch = service.spec.model, service.spec.fetch
        return ServiceView(
            service=service.spec.qualified_name,
            model=model,
            aliases=service.spec.aliases,
            policy=self._fleet.policy or service.spec.policy,
            model_source="" if fetch is None else fetch.source,
            model_fetch="" if fetch is None else fetch.state,
            index_chunks=len(service.index),
            bytes_per_token=service.lengths.bytes_per_token,
            trend=trend(model),
            replicas=[
                self._replica(model, replica, now)
                for replica in sorted(service.replicas.values(), key=lambda replica: replica.name)
            ],
        )

    def _replica(self, model: str, replica: Replica, now: float) -> ReplicaView:
        load, labels = replica.load, (model, replica.name)
        prompt = self._metrics.prompt_tokens.sum(labels)
        cached = self._metrics.actual.sum(labels)
        return ReplicaView(
            name=replica.name,
            url=replica.url,
            state=replica.state,
            is_available=replica.is_available,
            inflight=load.inflight,
            requests=load.requests,
            max_num_seqs=load.max_num_seqs,
            queued_tokens=load.queued_tokens,
            kv_usage=load.kv_usage,
            prefill_tokens_per_s=load.measured.prefill_tokens_per_s or None,
            decode_step_s=load.measured.decode_step_s or None,
            hit_ratio=cached / prompt if prompt else None,
            heard_s=None if replica.heard_at is None else now - replica.heard_at,
            idle_connections=replica.pool.idle,
        )
