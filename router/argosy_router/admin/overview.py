"""Figures of a router's services and replicas: the overview and the history of the last minutes for the admin page, and
the load report that the operator's autoscaler reads.

Owns: which figures are shown, samples of the metrics' sums, and the rates between them. Must not know: HTTP, requests,
how figures are rendered, how the operator scales.
Invariant: at most `SAMPLES` samples per model, whatever the load. Figures are differences of existing sums, so the
history adds no counting to requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from argosy_protocol import __version__
from argosy_protocol.reports import LoadReport, ReplicaLoadReport, ServiceLoadReport
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.flow_control import FlowController
from argosy_router.metric_series import Counter, Histogram
from argosy_router.metrics import Metrics

INTERVAL_S = 5.0
SAMPLES = 61
"""Five minutes of intervals."""
RECENT = 13
"""One minute of intervals, for the headline figures, which should be steadier than the curve."""


class Figures(Struct, frozen=True, kw_only=True):
    """Traffic over a period. Ratios and quantiles are None if there was none."""

    requests_per_s: float
    failed_ratio: float | None
    """Share of answers with a status of 500 or above."""
    hit_ratio: float | None
    """Share of prompt tokens that came from a cache, by the answers' usage."""
    output_tokens_per_s: float
    ttft_p50_s: float | None
    """Time to first token of streams, interpolated within a histogram bucket."""
    ttft_p90_s: float | None


class Trend(Struct, frozen=True, kw_only=True):
    """One model's last minutes."""

    interval_s: float
    recent: Figures
    """Over the last minute, or since the model's first request if that is shorter."""
    curve: Sequence[Figures]
    """Per interval, oldest first."""


class _Sums(NamedTuple):
    time: float
    requests: float = 0.0
    failed: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    completion_tokens: float = 0.0
    ttft: Sequence[float] = ()
    """Observations per bucket."""


class History:
    """Samples of one router's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: dict[str, deque[_Sums]] = {}

    async def run(self) -> None:
        """Sample periodically until cancelled."""
        while True:
            self.sample(time.monotonic())
            await asyncio.sleep(INTERVAL_S)

    def sample(self, now: float) -> None:
        """Take one sample of every model that has had a request."""
        sums = self._sums(now)
        for model, latest in sums.items():
            if model not in self._samples:
                self._samples[model] = deque([_Sums(now - INTERVAL_S)], maxlen=SAMPLES)
            self._samples[model].append(latest)
        for model in self._samples.keys() - sums.keys():
            del self._samples[model]

    def trends(self, now: float) -> Callable[[str], Trend]:
        """Return what returns a model's curve up to the last sample, and the last minute up to now. The sums of
        all models are read once: for each model, those of a thousand would take seconds."""
        sums = self._sums(now)
        return lambda model: self._trend(model, sums.get(model, _Sums(now)), now)

    def _trend(self, model: str, latest: _Sums, now: float) -> Trend:
        bounds = self._metrics.ttft.bounds
        samples = self._samples.get(model, deque())
        since = samples[-min(len(samples), RECENT)] if samples else _Sums(now - INTERVAL_S)
        return Trend(
            interval_s=INTERVAL_S,
            recent=_between(since, latest, bounds),
            curve=[_between(before, after, bounds) for before, after in pairwise(samples)],
        )

    def _sums(self, now: float) -> dict[str, _Sums]:
        metrics = self._metrics
        requests = _by_model(metrics.requests)
        failed: defaultdict[str, float] = defaultdict(float)
        for (model, code), count in metrics.requests.sums():
            if code >= "500":
                failed[model] += count
        prompt, cached = _by_model(metrics.prompt_tokens), _by_model(metrics.actual)
        completion, ttft = _by_model(metrics.completion_tokens), _buckets(metrics.ttft)
        return {
            model: _Sums(
                now,
                count,
                failed[model],
                prompt[model],
                cached[model],
                completion[model],
                ttft.get(model, ()),
            )
            for model, count in requests.items()
        }


def _by_model(counter: Counter) -> defaultdict[str, float]:
    position = counter.labels.index("model")
    sums: defaultdict[str, float] = defaultdict(float)
    for labels, value in counter.sums():
        sums[labels[position]] += value
    return sums


def _buckets(histogram: Histogram) -> dict[str, list[float]]:
    return {model: row[:-1] for (model,), row in histogram.values.items()}


def _between(before: _Sums, after: _Sums, bounds: Sequence[float]) -> Figures:
    seconds = max(1e-3, after.time - before.time)
    requests = after.requests - before.requests
    prompt = after.prompt_tokens - before.prompt_tokens
    old = before.ttft or (0.0,) * len(after.ttft)
    counts = [new - count for new, count in zip(after.ttft, old, strict=True)]
    return Figures(
        requests_per_s=requests / seconds,
        failed_ratio=(after.failed - before.failed) / requests if requests else None,
        hit_ratio=(after.cached_tokens - before.cached_tokens) / prompt if prompt else None,
        output_tokens_per_s=(after.completion_tokens - before.completion_tokens) / seconds,
        ttft_p50_s=quantile(0.5, counts, bounds),
        ttft_p90_s=quantile(0.9, counts, bounds),
    )


def quantile(share: float, counts: Sequence[float], bounds: Sequence[float]) -> float | None:
    """Estimate the value below which `share` of the observations lie, like Prometheus' `histogram_quantile`; `counts`:
    observations per bucket, one more than `bounds`: the last bucket has no upper bound."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    low = below = 0.0
    for count, high in zip(counts, bounds, strict=False):
        if below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        low, below = high, below + count
    return low


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


class LoadReports:
    """Makes the load reports of one router."""

    def __init__(self, fleet: Fleet, flow_control: FlowController) -> None:
        self._fleet = fleet
        self._flow_control = flow_control
        self._started = time.monotonic()

    async def wait_for_hold(self, after: int, timeout_s: float) -> None:
        """Wait until a service begins to hold requests after revision `after`, at most `timeout_s`."""
        await self._flow_control.wait_for_hold(after, timeout_s)

    def now(self, router: str) -> LoadReport:
        """The report of this moment."""
        now = time.monotonic()
        return LoadReport(
            router=router,
            revision=self._flow_control.hold_revision,
            uptime_s=round(now - self._started, 3),
            services=tuple(self._service(service, now) for service in self._fleet.services.values()),
        )

    def _service(self, service: Service, now: float) -> ServiceLoadReport:
        queue = self._flow_control.queue_of(service)
        return ServiceLoadReport(
            service=service.name,
            held=queue.num_held if queue is not None else 0,
            queued=queue.num_queued if queue is not None else 0,
            queued_tokens=round(queue.queued_cost) if queue is not None else 0,
            idle_s=round(self._flow_control.idle_s(service, now), 3),
            ttft_counts=service.demand.ttft_counts(now),
            replicas=tuple(_replica(replica, now) for replica in service.replicas.values()),
            rollout=None if service.sides is None else service.sides.report(now),
        )


def _replica(replica: Replica, now: float) -> ReplicaLoadReport:
    load = replica.load
    return ReplicaLoadReport(
        name=replica.name,
        uid=replica.uid,
        routable=replica.is_available,
        requests=load.requests,
        inflight=load.inflight_sequences,
        queued_tokens=load.queued_tokens * load.data_parallel_size,
        kv_usage=round(load.kv_usage, 4),
        cache_value=round(replica.cache_value.rate(now), 3),
    )
