"""The router's metrics: name, kind, labels, help and buckets of every `argosy_router_*` series, and the scrape of all.

Owns: the definitions, which series a scrape renders, and when those of departed replicas are dropped. Must not know:
who counts what, and why.
Invariants: label values are configured names of models, replicas and keys, or from short closed sets, never anything a
client sends. The series of a replica or model that left the fleet are dropped after a while, so that the size of a
scrape follows the size of the fleet.
"""

# Not compiled: a table and the rendering of scrapes; requests pass `metric_series` only.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from argosy_protocol import __version__
from argosy_protocol.reports import ReplicaState, RolloutReport, SideReport
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.metric_series import PREFIX, Counter, Histogram, Labels, Reading, Rows, Series
from argosy_router.native.build import BUILD_KIND

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
QUEUE_WAIT_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class Definition(NamedTuple):
    """What the exposition says of one series, besides its values."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """Without `PREFIX`, and without a counter's `_total`."""
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    def counter(self) -> Counter:
        """Return a counter that starts at zero."""
        return Counter(self.name, self.help, self.labels)

    def histogram(self) -> Histogram:
        """Return a histogram without observations."""
        return Histogram(self.name, self.help, self.labels, self.buckets)

    def reading(self, read: Callable[[], Rows]) -> Reading:
        """Return a gauge or counter whose values `read` returns at each scrape."""
        kind: Literal["gauge", "counter"] = "gauge" if self.kind == "gauge" else "counter"
        return Reading(kind, self.name, self.help, self.labels, read)

    def value(self, read: Callable[[], float]) -> Reading:
        """Return a gauge or counter without labels, whose value `read` returns at each scrape."""
        return self.reading(lambda: [((), read())])


_MODEL = ("model",)
_REPLICA = ("model", "replica")

# requests
REQUESTS = Definition("counter", "requests", ("model", "code"), "Requests answered, by status code.")
REQUEST_DURATION = Definition(
    "histogram",
    "request_duration_seconds",
    _MODEL,
    "Time from a complete request to the end of its response.",
    SECONDS,
)
TTFT = Definition(
    "histogram",
    "ttft_seconds",
    _MODEL,
    "Time to first token: from a complete request to the first event of its stream.",
    SECONDS,
)
ITL = Definition(
    "histogram", "itl_seconds", _MODEL, "Mean time between the tokens of a stream.", TOKEN_SECONDS
)
CLIENT_DISCONNECTS = Definition(
    "counter",
    "client_disconnects",
    _MODEL,
    "Requests whose client disconnected before the end of the response.",
)

# admission
RATE_LIMITED = Definition(
    "counter", "rate_limited", ("key",), "Requests refused by the rate limits of their API key."
)
LIMITING_ROUTERS = Definition(
    "gauge",
    "limiting_routers",
    ("source",),
    "Routers that divide the limits of keys, this one included, and whether their number is counted, configured or "
    "assumed.",
)
QUEUED_REQUESTS = Definition("gauge", "queued_requests", _MODEL, "Requests in the queue.")
ADMITTED_REQUESTS = Definition(
    "gauge", "admitted_requests", _MODEL, "Requests that flow control has admitted and that have not ended."
)
QUEUE_SECONDS = Definition(
    "histogram",
    "queue_seconds",
    ("model", "outcome"),
    "Time that requests spent in the queue, by how they left it.",
    QUEUE_WAIT_SECONDS,
)

# routing decisions
DECISION = Definition("histogram", "decision_seconds", (), "Time to choose a replica.", DECISION_SECONDS)
CANARY_REQUESTS = Definition(
    "counter",
    "canary_requests",
    ("model", "service"),
    "Requests for the models of services that have a canary, by the service that answered.",
)
ROUTES = Definition(
    "counter",
    "routes",
    (*_REPLICA, "reason", "mode"),
    "Attempts dispatched, by the reason for the choice and by what the router knew of the replica.",
)
PREDICTED_CACHED_TOKENS = Definition(
    "counter",
    "predicted_cached_tokens",
    _REPLICA,
    "Prompt tokens predicted to be in the replica's cache, for requests whose response reported usage.",
)
ACTUAL_CACHED_TOKENS = Definition(
    "counter", "actual_cached_tokens", _REPLICA, "Cached prompt tokens reported in usage."
)
PROMPT_TOKENS = Definition("counter", "prompt_tokens", _REPLICA, "Prompt tokens reported in usage.")
COMPLETION_TOKENS = Definition(
    "counter", "completion_tokens", _REPLICA, "Generated tokens reported in usage."
)
PREDICTED_TTFT = Definition(
    "counter", "predicted_ttft_seconds", _REPLICA, "Sum of the predicted times to first token of streams."
)
ACTUAL_TTFT = Definition(
    "counter", "actual_ttft_seconds", _REPLICA, "Sum of the measured times to first token of streams."
)
TTFT_ERROR = Definition(
    "histogram",
    "ttft_error_seconds",
    _REPLICA,
    "Absolute error of the predicted time to first token of streams.",
    SECONDS,
)

# failures
RETRIES = Definition(
    "counter", "retries", ("model", "reason"), "Attempts repeated before the first byte of a response."
)
HEDGES = Definition(
    "counter", "hedges", ("model", "outcome"), "Second attempts sent beside an overdue one, by outcome."
)
UPSTREAM_FAILURES = Definition(
    "counter", "upstream_failures", (*_REPLICA, "reason"), "Attempts that failed, by reason."
)
EJECTIONS = Definition("counter", "ejections", _REPLICA, "Ejections of a replica, begun or renewed.")
COOLDOWNS = Definition(
    "counter", "rests", _REPLICA, "Times a replica reported that it was full and was put in cooldown."
)
MIGRATIONS = Definition(
    "counter",
    "migrations",
    ("model", "outcome"),
    "Streams whose replica failed, by outcome of their migration.",
)
INTERRUPTED_STREAMS = Definition(
    "counter", "interrupted_streams", _REPLICA, "Responses left incomplete because their replica failed."
)

# replicas
REPLICA_STATE = Definition(
    "gauge",
    "replica_state",
    (*_REPLICA, "state"),
    "State of a replica: 1 for the current one, 0 for the others.",
)
INFLIGHT_REQUESTS = Definition(
    "gauge", "inflight_requests", _REPLICA, "Requests sent to a replica that have not ended."
)
QUEUED_TOKENS = Definition(
    "gauge", "queued_tokens", _REPLICA, "Uncached prompt tokens that a replica has yet to compute."
)
KV_USAGE_RATIO = Definition("gauge", "kv_usage_ratio", _REPLICA, "Share of a replica's KV cache in use.")
TELEMETRY_AGE = Definition(
    "gauge", "telemetry_age_seconds", _REPLICA, "Time since the last heartbeat of a replica."
)
TELEMETRY_SYNCS = Definition(
    "counter", "telemetry_syncs", _REPLICA, "Snapshots of cached prefixes received from a replica."
)
TELEMETRY_SKIPPED_FRAMES = Definition(
    "counter",
    "telemetry_skipped_frames",
    (),
    "Telemetry frames of unknown types, which newer engines send; the router skips them.",
)
INDEX_CHUNKS = Definition("gauge", "index_chunks", _MODEL, "Chunks in the prefix index.")
INDEX_BYTES = Definition("gauge", "index_bytes", _MODEL, "Memory of the prefix index.")
ROUTABLE_REPLICAS = Definition("gauge", "routable_replicas", _MODEL, "Replicas that may get requests.")
SERVICE_INFO = Definition(
    "gauge",
    "service_info",
    ("model", "service_namespace", "service_name"),
    "Always 1, by the model's name in the other series and the service that has it.",
)
ROLLOUT_WEIGHT = Definition(
    "gauge",
    "rollout_weight_ratio",
    _MODEL,
    "Share of the requests that a canary rollout's new revision gets.",
)
ROLLOUT_ATTEMPTS = Definition(
    "gauge",
    "rollout_attempts",
    ("model", "side"),
    "Attempts that ended at the replicas of each side of a canary rollout, stable or canary, within its window.",
)
ROLLOUT_FAILURES = Definition(
    "gauge",
    "rollout_failures",
    ("model", "side"),
    "Those of them that an error of the engine or of the connection ended.",
)
PANIC = Definition(
    "gauge", "panic", _MODEL, "1 while most routable replicas are ejected; the router then ignores ejections."
)

# connections
CLIENT_CONNECTIONS = Definition("gauge", "client_connections", (), "Open client connections.")
REFUSED_CONNECTIONS = Definition(
    "counter", "refused_connections", (), "Client connections refused beyond --max-connections."
)
UNREAD_RESPONSES_CUT = Definition(
    "counter",
    "unread_responses_cut",
    (),
    "Client connections cut because the client did not read its responses and its key's share of --max-inflight-bytes "
    "was taken.",
)
STREAM_PAUSES = Definition("counter", "stream_pauses", (), "Event-loop pauses made to coalesce stream reads.")
INFLIGHT_BODY_BYTES = Definition(
    "gauge",
    "inflight_body_bytes",
    (),
    "Memory of request bodies that are being received or whose response is incomplete, and of responses that clients "
    "have not read.",
)
LARGE_BODIES = Definition(
    "counter",
    "large_bodies",
    ("outcome",),
    "Bodies that another process read because they are large or their key sends much, and large responses: read, "
    "refused for their content, or unavailable because that process failed.",
)

# files and batches
RESPONSE_WRITES = Definition(
    "counter",
    "response_writes",
    ("outcome",),
    "Responses by what became of storing them: stored, failed, refused because too many were being stored; and late: "
    "the answer's end was sent before.",
)
RESPONSE_WRITING_BYTES = Definition(
    "gauge", "response_writing_bytes", (), "Bytes of responses that are being stored."
)
TASK_RESTARTS = Definition(
    "counter", "task_restarts", ("task",), "Parts of the router that failed, and were begun anew."
)
BATCH_UNAVAILABLE = Definition(
    "gauge",
    "batch_unavailable",
    (),
    "1 while `argosy batch` has not answered after three failures in a row: files, batches and stored responses are "
    "refused.",
)
BATCH_REQUESTS_INFLIGHT = Definition(
    "gauge", "batch_requests_inflight", (), "Requests of batches that this router has in flight."
)

# usage, logs and the program itself
USAGE_REQUESTS = Definition(
    "counter",
    "usage_requests",
    ("key", "model", "metered"),
    "Requests answered per API key; usage of streams that were cut is estimated.",
)
USAGE_TOKENS = Definition(
    "counter",
    "usage_tokens",
    ("key", "model", "kind"),
    "Tokens used per API key; cached tokens are also counted as prompt tokens.",
)
USAGE_WRITE_FAILURES = Definition(
    "counter",
    "usage_write_failures",
    (),
    "Failed attempts to append to the usage files; the lines are written later.",
)
ACCESS_LOG_DROPPED_LINES = Definition(
    "counter",
    "access_log_dropped_lines",
    (),
    "Access log lines dropped because standard error was not read in time.",
)
BUILD_INFO = Definition(
    "gauge",
    "build_info",
    ("version", "build"),
    "Always 1, by version and build: compiled, or pure (Python sources: 1.2 to 3 times the CPU per request).",
)

DEFINITIONS = tuple(value for value in list(globals().values()) if isinstance(value, Definition))
"""All of the above."""


CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)
DEPARTED_S = 600.0
"""How long the series of a replica that left are still exported: ten scrapes of a slow Prometheus."""


SLICE_COST = 16 * 1024
"""Characters rendered between two yields to the event loop: half a millisecond's worth."""
EMPTY_PART_COST = 4 * 1024
"""Cost of reading or forgetting a few rows without writing any, in the same unit."""
_FORGETTING_ROWS = 256


S = TypeVar("S", Counter, Histogram)


class Metrics:
    """All series of one router."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._series: list[Series] = []
        self._departed: dict[Labels, float] = {}
        """(model, replica) or (model, "") -> when a scrape first missed it"""

        # requests
        self.requests = self._kept(REQUESTS.counter())
        self.duration = self._kept(REQUEST_DURATION.histogram())
        self.ttft = self._kept(TTFT.histogram())
        self.itl = self._kept(ITL.histogram())
        self.disconnects = self._kept(CLIENT_DISCONNECTS.counter())

        # routing decisions
        self.decision = self._kept(DECISION.histogram())
        self.canaried = self._kept(CANARY_REQUESTS.counter())
        self.routes = self._kept(ROUTES.counter())
        self.predicted = self._kept(PREDICTED_CACHED_TOKENS.counter())
        self.actual = self._kept(ACTUAL_CACHED_TOKENS.counter())
        self.prompt_tokens = self._kept(PROMPT_TOKENS.counter())
        self.completion_tokens = self._kept(COMPLETION_TOKENS.counter())
        self.predicted_ttft = self._kept(PREDICTED_TTFT.counter())
        self.actual_ttft = self._kept(ACTUAL_TTFT.counter())
        self.ttft_error = self._kept(TTFT_ERROR.histogram())

        # failures
        self.retries = self._kept(RETRIES.counter())
        self.hedges = self._kept(HEDGES.counter())
        self.failures = self._kept(UPSTREAM_FAILURES.counter())
        self.ejections = self._kept(EJECTIONS.counter())
        self.cooldowns = self._kept(COOLDOWNS.counter())
        self.migrations = self._kept(MIGRATIONS.counter())
        self.interrupted = self._kept(INTERRUPTED_STREAMS.counter())

        # replicas
        self.add(
            REPLICA_STATE.reading(self._rows(_states)),
            INFLIGHT_REQUESTS.reading(self._each(lambda r: r.load.inflight)),
            QUEUED_TOKENS.reading(self._each(lambda r: r.load.queued_tokens * r.load.data_parallel_size)),
            KV_USAGE_RATIO.reading(self._each(lambda r: r.load.kv_usage)),
            TELEMETRY_AGE.reading(self._rows(_telemetry_ages)),
            TELEMETRY_SYNCS.reading(self._each(lambda r: r.syncs)),
            TELEMETRY_SKIPPED_FRAMES.value(fleet.skipped_frames),
            INDEX_CHUNKS.reading(self._by_model(lambda s: len(s.index))),
            INDEX_BYTES.reading(self._by_model(lambda s: s.index.bytes)),
            ROUTABLE_REPLICAS.reading(self._by_model(_routable)),
            SERVICE_INFO.reading(self._names),
            ROLLOUT_WEIGHT.reading(self._canary_shares),
            ROLLOUT_ATTEMPTS.reading(self._rollouts(_by_side(lambda side: side.attempts))),
            ROLLOUT_FAILURES.reading(self._rollouts(_by_side(lambda side: side.failures))),
            PANIC.reading(self._by_model(lambda service: service.candidates.is_in_panic)),
            BUILD_INFO.reading(lambda: [((__version__, BUILD_KIND), 1.0)]),
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

    def _kept(self, series: S) -> S:
        self._series.append(series)
        return series

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
