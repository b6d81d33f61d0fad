"""The router's metrics: names, labels, buckets, in one place.

Owns: every `argosy_router_*` series. Must not know: who counts what, and why.
Invariant: counting is a dict or list operation on the loop's own thread; labels are model, replica and short closed
sets, never anything a client sends.

prometheus_client's own counters take a lock and a label lookup per event, some 10 us per request for what is counted
here; a custom collector hands it the finished sums at scrape time instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from argosy_router.fleet import Fleet

PREFIX = "argosy_router_"
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
"""vLLM's time-to-first-token buckets up to 160 s, so that panels compare."""
DECISION_SECONDS = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3)
STATES = ("connecting", "synced", "stale", "foreign", "ejected", "draining")


class Counter:
    """A monotonic sum per label tuple."""

    __slots__ = ("help", "labels", "name", "values")

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.values: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def add(self, labels: tuple[str, ...], amount: float = 1.0) -> None:
        self.values[labels] += amount

    def collect(self) -> Metric:
        family = CounterMetricFamily(PREFIX + self.name, self.help, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """Observations per label tuple, by bucket."""

    __slots__ = ("bounds", "help", "labels", "name", "values")

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float] = SECONDS
    ) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.bounds = bounds
        self.values: dict[tuple[str, ...], list[float]] = {}
        """bucket counts, then the sum"""

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        row = self.values.get(labels)
        if row is None:
            row = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1.0
        row[-1] += value

    def collect(self) -> Metric:
        family = HistogramMetricFamily(PREFIX + self.name, self.help, labels=self.labels)
        for labels, row in self.values.items():
            total = 0.0
            buckets = []
            for bound, count in zip((*map(str, self.bounds), "+Inf"), row, strict=False):
                total += count
                buckets.append((bound, total))
            family.add_metric(labels, buckets, row[-1])
        return family


class Metrics(Collector):
    """All series of one router."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.connections = 0
        by_model, by_replica = ("model",), ("model", "replica")
        self.requests = Counter("requests", "Requests answered.", ("model", "code"))
        self.duration = Histogram("request_duration_seconds", "From the whole request to the end.", by_model)
        self.ttft = Histogram("ttft_seconds", "From the whole request to a stream's first event.", by_model)
        self.decision = Histogram("decision_seconds", "Time to choose a replica.", (), DECISION_SECONDS)
        self.routes = Counter("routes", "Requests dispatched, by reason of the choice.", ("model", "reason"))
        self.retries = Counter("retries", "Attempts repeated before the first byte.", ("model", "reason"))
        self.failures = Counter("upstream_failures", "Attempts that failed.", ("model", "replica", "reason"))
        self.ejections = Counter("ejections", "Ejections begun or renewed.", by_replica)
        self.interrupted = Counter("interrupted_streams", "Streams whose replica died.", by_replica)
        self.disconnects = Counter("client_disconnects", "Clients gone before the end.", by_model)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens, by usage of the answers.", by_replica)
        self.predicted = Counter(
            "predicted_cached_tokens", "Hits expected, for answers with usage.", by_replica
        )
        self.actual = Counter("actual_cached_tokens", "Hits, by usage of the same answers.", by_replica)
        self.predicted_ttft = Counter(
            "predicted_ttft_seconds", "Time to first token expected, for streams.", by_replica
        )
        self.actual_ttft = Counter(
            "actual_ttft_seconds", "Time to first token of the same streams.", by_replica
        )
        self.ttft_error = Histogram(
            "ttft_error_seconds", "Difference between the two, either way.", by_replica
        )
        self._families: tuple[Counter | Histogram, ...] = (
            self.requests,
            self.duration,
            self.ttft,
            self.decision,
            self.routes,
            self.retries,
            self.failures,
            self.ejections,
            self.interrupted,
            self.disconnects,
            self.prompt_tokens,
            self.predicted,
            self.actual,
            self.predicted_ttft,
            self.actual_ttft,
            self.ttft_error,
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            yield family.collect()
        yield from self._fleet_gauges()
        yield GaugeMetricFamily(
            PREFIX + "client_connections", "Open client connections.", value=self.connections
        )
        yield CounterMetricFamily(
            PREFIX + "telemetry_skipped_frames",
            "Frames of unknown type from newer engines.",
            value=self._fleet.skipped_frames(),
        )

    def _fleet_gauges(self) -> Iterable[Metric]:
        labels = ("model", "replica")
        state = GaugeMetricFamily(
            PREFIX + "replica_state", "1 for the current state.", labels=(*labels, "state")
        )
        inflight = GaugeMetricFamily(
            PREFIX + "inflight_requests", "Requests without an end yet.", labels=labels
        )
        queued = GaugeMetricFamily(PREFIX + "queued_tokens", "Uncached prompt tokens ahead.", labels=labels)
        chunks = GaugeMetricFamily(PREFIX + "index_chunks", "Chunks in the prefix index.", labels=("model",))
        for service in self._fleet.services.values():
            model = service.spec.model
            chunks.add_metric((model,), len(service.index))
            for replica in service.replicas.values():
                inflight.add_metric((model, replica.name), replica.load.inflight)
                queued.add_metric((model, replica.name), replica.load.queued_tokens)
                for name in STATES:
                    state.add_metric((model, replica.name, name), float(replica.state == name))
        return state, inflight, queued, chunks
