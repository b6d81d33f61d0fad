"""Registry of the router's metrics: the series of requests and replicas, and the scrape of all series.

Owns: which series a scrape renders, and when those of departed replicas are dropped. Must not know: names and help
(`definitions`), who counts what, and why.
Invariant: the series of a replica or model that left the fleet are dropped after a while, so that the size of a scrape
follows the size of the fleet.
"""

# Not compiled: renders scrapes; requests pass `series` only.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from argosy_protocol import __version__
from argosy_protocol.load_report import RolloutReport, SideReport
from argosy_protocol.routable_report import ReplicaState
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.metrics import definitions as define
from argosy_router.metrics.definitions import Definition
from argosy_router.metrics.series import PREFIX, Counter, Histogram, Labels, Reading, Rows, Series
from argosy_router.native.build_kind import BUILD_KIND

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)
DEPARTED_S = 600.0
"""How long the series of a replica that left are still exported: ten scrapes of a slow Prometheus."""


SLICE_COST = 16 * 1024
"""Characters rendered between two yields to the event loop: half a millisecond's worth."""
EMPTY_PART_COST = 4 * 1024
"""Cost of reading or forgetting a few rows without writing any, in the same unit."""
_FORGETTING_ROWS = 256


class Metrics:
    """All series of one router."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._series: list[Series] = []
        self._departed: dict[Labels, float] = {}
        """(model, replica) or (model, "") -> when a scrape first missed it"""

        # requests
        self.requests = self._counter(define.REQUESTS)
        self.duration = self._histogram(define.REQUEST_DURATION)
        self.ttft = self._histogram(define.TTFT)
        self.itl = self._histogram(define.ITL)
        self.disconnects = self._counter(define.CLIENT_DISCONNECTS)

        # routing decisions
        self.decision = self._histogram(define.DECISION)
        self.canaried = self._counter(define.CANARY_REQUESTS)
        self.routes = self._counter(define.ROUTES)
        self.predicted = self._counter(define.PREDICTED_CACHED_TOKENS)
        self.actual = self._counter(define.ACTUAL_CACHED_TOKENS)
        self.prompt_tokens = self._counter(define.PROMPT_TOKENS)
        self.completion_tokens = self._counter(define.COMPLETION_TOKENS)
        self.predicted_ttft = self._counter(define.PREDICTED_TTFT)
        self.actual_ttft = self._counter(define.ACTUAL_TTFT)
        self.ttft_error = self._histogram(define.TTFT_ERROR)

        # failures
        self.retries = self._counter(define.RETRIES)
        self.hedges = self._counter(define.HEDGES)
        self.failures = self._counter(define.UPSTREAM_FAILURES)
        self.ejections = self._counter(define.EJECTIONS)
        self.cooldowns = self._counter(define.COOLDOWNS)
        self.migrations = self._counter(define.MIGRATIONS)
        self.interrupted = self._counter(define.INTERRUPTED_STREAMS)

        # replicas
        self.add(
            define.REPLICA_STATE.reading(self._rows(_states)),
            define.INFLIGHT_REQUESTS.reading(self._each(lambda r: r.load.inflight)),
            define.QUEUED_TOKENS.reading(
                self._each(lambda r: r.load.queued_tokens * r.load.data_parallel_size)
            ),
            define.KV_USAGE_RATIO.reading(self._each(lambda r: r.load.kv_usage)),
            define.TELEMETRY_AGE.reading(self._rows(_telemetry_ages)),
            define.TELEMETRY_SYNCS.reading(self._each(lambda r: r.syncs)),
            define.TELEMETRY_SKIPPED_FRAMES.value(fleet.skipped_frames),
            define.INDEX_CHUNKS.reading(self._by_model(lambda s: len(s.index))),
            define.INDEX_BYTES.reading(self._by_model(lambda s: s.index.bytes)),
            define.ROUTABLE_REPLICAS.reading(self._by_model(_routable)),
            define.SERVICE_INFO.reading(self._names),
            define.ROLLOUT_WEIGHT.reading(self._canary_shares),
            define.ROLLOUT_ATTEMPTS.reading(self._rollouts(_by_side(lambda side: side.attempts))),
            define.ROLLOUT_FAILURES.reading(self._rollouts(_by_side(lambda side: side.failures))),
            define.PANIC.reading(self._by_model(lambda service: service.candidates.is_in_panic)),
            define.BUILD_INFO.reading(lambda: [((__version__, BUILD_KIND), 1.0)]),
        )

        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        self._scrape: asyncio.Task[bytes] | None = None
        """The scrape that is being rendered, if any."""

    @property
    def series(self) -> Iterable[Series]:
        """All series that a scrape renders, without those of the process."""
        return tuple(self._series)

    def add(self, *series: Series) -> None:
        """Register series."""
        self._series += series

    def render(self) -> bytes:
        """Render the text exposition at once; for large fleets use `scrape`."""
        return "".join(self._parts()).encode()

    async def scrape(self) -> bytes:
        """Render the text exposition in slices, yielding to the event loop in between. Concurrent scrapes share one."""
        if self._scrape is None:
            self._scrape = asyncio.create_task(self._render_in_slices(), name="scrape")
            self._scrape.add_done_callback(self._scraped)
        return await asyncio.shield(self._scrape)

    def _scraped(self, _: asyncio.Task[bytes]) -> None:
        self._scrape = None

    async def _render_in_slices(self) -> bytes:
        slices: list[bytes] = []
        parts: list[str] = []
        cost = 0
        for part in self._parts():
            parts.append(part)
            cost += len(part) or EMPTY_PART_COST
            if cost >= SLICE_COST:
                slices.append("".join(parts).encode())
                parts, cost = [], 0
                await asyncio.sleep(0)
        slices.append("".join(parts).encode())
        return b"".join(slices)

    def _parts(self) -> Iterator[str]:
        for _ in self._forget_departed(time.monotonic()):
            yield ""
        for series in tuple(self._series):
            yield from series.parts(PREFIX)
        yield generate_latest(self._process).decode()

    def _counter(self, definition: Definition) -> Counter:
        counter = definition.counter()
        self._series.append(counter)
        return counter

    def _histogram(self, definition: Definition) -> Histogram:
        histogram = definition.histogram()
        self._series.append(histogram)
        return histogram

    # readings of the fleet

    def _by_model(self, value: Callable[[Service], float]) -> Callable[[], Rows]:
        return lambda: [((s.spec.model,), value(s)) for s in self._fleet.services.values()]

    def _names(self) -> Rows:
        specs = [service.spec for service in self._fleet.services.values()]
        return [((spec.model, spec.namespace, spec.name), 1.0) for spec in specs]

    def _each(self, value: Callable[[Replica], float]) -> Callable[[], Rows]:
        return self._rows(lambda replica: [((), value(replica))])

    def _rows(self, rows: Callable[[Replica], Rows]) -> Callable[[], Rows]:
        """Read `rows` of every replica, with its model and name prepended to their labels."""

        def read() -> Iterator[tuple[Labels, float]]:
            for service in list(self._fleet.services.values()):
                for replica in list(service.replicas.values()):
                    for labels, value in rows(replica):
                        yield (service.spec.model, replica.name, *labels), value

        return read

    def _rollouts(self, rows: Callable[[RolloutReport], Rows]) -> Callable[[], Rows]:
        """Read `rows` of every service that is divided, with its model prepended to their labels."""

        def read() -> Iterator[tuple[Labels, float]]:
            now = time.monotonic()
            for service in list(self._fleet.services.values()):
                if service.sides is not None:
                    for labels, value in rows(service.sides.report(now)):
                        yield (service.spec.model, *labels), value

        return read

    def _canary_shares(self) -> Iterator[tuple[Labels, float]]:
        for service in list(self._fleet.services.values()):
            if service.sides is not None:
                yield (service.spec.model,), service.canary_share

    def _forget_departed(self, now: float) -> Iterator[None]:
        """Drop series of replicas and models that left the fleet, checking `_FORGETTING_ROWS` per step."""
        present = {
            (service.spec.model, name)
            for service in self._fleet.services.values()
            for name in ("", *service.replicas)
        } | {("", "")}
        departed: dict[Labels, float] = {}
        for series in self._series:
            if isinstance(series, Reading) or "model" not in series.labels:
                continue
            model = series.labels.index("model")
            replica = series.labels.index("replica") if "replica" in series.labels else None
            for count, labels in enumerate(list(series.values), 1):
                if count % _FORGETTING_ROWS == 0:
                    yield
                owner = (labels[model], labels[replica] if replica is not None else "")
                if owner in present:
                    continue
                since = departed[owner] = self._departed.get(owner, now)
                if now - since >= DEPARTED_S:
                    series.values.pop(labels, None)
        self._departed = departed


def _states(replica: Replica) -> Rows:
    return [((name,), float(replica.state == name)) for name in STATES]


def _by_side(value: Callable[[SideReport], float]) -> Callable[[RolloutReport], Rows]:
    return lambda report: [(("stable",), value(report.stable)), (("canary",), value(report.canary))]


def _telemetry_ages(replica: Replica) -> Rows:
    return [] if replica.heard_at is None else [((), time.monotonic() - replica.heard_at)]


def _routable(service: Service) -> int:
    return sum(replica.is_available for replica in service.replicas.values())
