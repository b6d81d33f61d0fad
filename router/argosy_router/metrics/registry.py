"""Registry of the router's metrics: names, labels and buckets in one place.

Owns: every `argosy_router_*` series. Must not know: who counts what, and why.
Invariant: label values are configured names of models, replicas and keys, or from short closed sets, never anything a
client sends. The series of a replica or model that left the fleet are dropped after a while, so that the size of a
scrape follows the size of the fleet.
"""

# Not compiled: renders scrapes; requests pass `series` only.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from argosy_protocol import __version__
from argosy_protocol.routable_report import ReplicaState
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.metrics.series import PREFIX, Counter, Histogram, Labels, Reading, Rows, Series
from argosy_router.native.build_kind import BUILD_KIND

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
"""vLLM's time-to-first-token buckets up to 160 s, so that dashboards can compare both."""
TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5),
)
"""vLLM's buckets of time per output token, with finer ones for small models."""
DECISION_SECONDS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3)
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
        model, replica = ("model",), ("model", "replica")

        # requests
        self.requests = self._counter("requests", "Requests answered.", ("model", "code"))
        self.duration = self._histogram(
            "request_duration_seconds", "From the whole request to the end.", model
        )
        self.ttft = self._histogram(
            "ttft_seconds", "From the whole request to a stream's first event.", model
        )
        self.itl = self._histogram(
            "itl_seconds", "Mean time between the tokens of a stream.", model, TOKEN_SECONDS
        )
        self.disconnects = self._counter("client_disconnects", "Clients gone before the end.", model)

        # choices
        self.decision = self._histogram("decision_seconds", "Time to choose a replica.", (), DECISION_SECONDS)
        self.canaried = self._counter(
            "canary_requests",
            "Requests for the models of services that have a canary, by the service that answered.",
            ("model", "service"),
        )
        self.routes = self._counter(
            "routes",
            "Attempts dispatched, by reason of the choice and by what the router knew of the replica.",
            (*replica, "reason", "mode"),
        )
        self.predicted = self._counter(
            "predicted_cached_tokens",
            "Prompt tokens expected in the replica's cache, for answers with usage.",
            replica,
        )
        self.actual = self._counter(
            "actual_cached_tokens",
            "Prompt tokens found in the replica's cache, by the usage of the same answers.",
            replica,
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, by usage of the answers.", replica
        )
        self.completion_tokens = self._counter(
            "completion_tokens", "Generated tokens, by usage of the answers.", replica
        )
        self.predicted_ttft = self._counter(
            "predicted_ttft_seconds", "Time to first token expected, for streams.", replica
        )
        self.actual_ttft = self._counter(
            "actual_ttft_seconds", "Time to first token of the same streams.", replica
        )
        self.ttft_error = self._histogram(
            "ttft_error_seconds", "Absolute error of the expected time to first token.", replica
        )

        # failures
        self.retries = self._counter(
            "retries", "Attempts repeated before the first byte.", ("model", "reason")
        )
        self.hedges = self._counter(
            "hedges", "Second attempts beside an overdue one, by what became of them.", ("model", "outcome")
        )
        self.failures = self._counter("upstream_failures", "Attempts that failed.", (*replica, "reason"))
        self.ejections = self._counter("ejections", "Ejections begun or renewed.", replica)
        self.cooldowns = self._counter(
            "rests", "Times a replica said that it was full and was put in cooldown.", replica
        )
        self.migrations = self._counter(
            "migrations", "Streams whose replica died, by what became of them.", ("model", "outcome")
        )
        self.interrupted = self._counter("interrupted_streams", "Answers broken off, by replica.", replica)

        # replicas
        self._gauge("replica_state", "1 for the current state.", (*replica, "state"), self._rows(_states))
        self._gauge(
            "inflight_requests",
            "Requests without an end yet.",
            replica,
            self._each(lambda r: r.load.inflight),
        )
        self._gauge(
            "queued_tokens",
            "Uncached prompt tokens ahead.",
            replica,
            self._each(lambda r: r.load.queued_tokens),
        )
        self._gauge(
            "kv_usage_ratio", "Share of the KV cache in use.", replica, self._each(lambda r: r.load.kv_usage)
        )
        self._gauge(
            "telemetry_age_seconds", "Since the last heartbeat.", replica, self._rows(_telemetry_ages)
        )
        self._sum(
            "telemetry_syncs", "Snapshots of residency taken in.", replica, self._each(lambda r: r.syncs)
        )
        self._sum(
            "telemetry_skipped_frames",
            "Frames of unknown type from newer engines.",
            (),
            lambda: [((), fleet.skipped_frames())],
        )
        self._gauge(
            "index_chunks", "Chunks in the prefix index.", model, self._by_model(lambda s: len(s.index))
        )
        self._gauge(
            "index_bytes", "Memory of the prefix index.", model, self._by_model(lambda s: s.index.bytes)
        )
        self._gauge("routable_replicas", "Replicas that may get requests.", model, self._by_model(_routable))
        self._gauge(
            "panic",
            "1 while most routable replicas are ejected: ejections are ignored then.",
            model,
            self._by_model(lambda service: service.candidates.is_in_panic),
        )
        self._gauge(
            "build_info",
            "Always 1, by version and build: compiled, or pure (Python sources, twice the CPU per request).",
            ("version", "build"),
            lambda: [((__version__, BUILD_KIND), 1.0)],
        )

        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        self._scrape: asyncio.Task[bytes] | None = None
        """The scrape under way."""

    @property
    def series(self) -> Iterable[Series]:
        """All series that a scrape renders, without those of the process."""
        return tuple(self._series)

    def add(self, *series: Series) -> None:
        """Register series that other modules own."""
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

    # definitions

    def _counter(self, name: str, text: str, labels: Labels) -> Counter:
        counter = Counter(name, text, labels)
        self._series.append(counter)
        return counter

    def _histogram(
        self, name: str, text: str, labels: Labels, bounds: tuple[float, ...] = SECONDS
    ) -> Histogram:
        histogram = Histogram(name, text, labels, bounds)
        self._series.append(histogram)
        return histogram

    def _gauge(self, name: str, text: str, labels: Labels, read: Callable[[], Rows]) -> None:
        self._series.append(Reading("gauge", name, text, labels, read))

    def _sum(self, name: str, text: str, labels: Labels, read: Callable[[], Rows]) -> None:
        self._series.append(Reading("counter", name, text, labels, read))

    # readings of the fleet

    def _by_model(self, value: Callable[[Service], float]) -> Callable[[], Rows]:
        return lambda: [((s.spec.model,), value(s)) for s in self._fleet.services.values()]

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


def _telemetry_ages(replica: Replica) -> Rows:
    return [] if replica.heard_at is None else [((), time.monotonic() - replica.heard_at)]


def _routable(service: Service) -> int:
    return sum(replica.is_available for replica in service.replicas.values())
