"""How the engine's load leaves it: the telemetry stream to routers, a response header, and the line of statistics.

`TelemetryHub` is the engine's end of the stream (`argosy_protocol.telemetry`). The API process mirrors which chunks are
resident from the core's deltas, so a router that connects gets its snapshot without any work for the core. Each reader
has a bounded queue of encoded frames; a reader that cannot keep up is disconnected, and reconnects for a new snapshot.
The cores of an engine with data parallelism are one replica to routers: the stream announces what any of them holds
(`core.proc.rank_balancer` merges their deltas), and their loads together. Counts are sums; rates, times and shares are
those of one core.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.observer import Observer
from argosy_engine.messages import EngineCoreOutputs, ResidencyDelta, SchedulerStats
from argosy_engine.resolved_config import ResolvedConfig
from argosy_protocol import __version__
from argosy_protocol.telemetry import (
    HEARTBEAT_INTERVAL_S,
    SNAPSHOT_SLICE_CHUNKS,
    Cleared,
    Draining,
    Frame,
    Hello,
    Load,
    Removed,
    Stored,
    encode_frame,
    pack_u32,
    pack_u64,
    snapshot_of,
)

logger = logging.getLogger("argosy.stats")

MAX_READERS = 256

PACED_READERS = 64
"""Above this number load frames become rarer, so that all readers together cost what so many do."""

_QUEUE_FRAMES = 4096

LOAD_INTERVAL_S = 0.1
"""Minimum interval between load frames sent with the core's statistics. The last one is always sent, because a replica
that has become idle must not look busy until the next heartbeat. The router estimates the load between them."""


class _Reader:
    """A connected router: queue of frames to send, None at the end of the stream."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_cut_off = False

    def put(self, data: bytes | None) -> None:
        if self.queue.qsize() >= _QUEUE_FRAMES:
            self.is_cut_off = True
            data = None
        self.queue.put_nowait(data)


class TelemetryHub(Observer):
    def __init__(self, llm: AsyncLLM, config: ResolvedConfig) -> None:
        self._llm = llm
        self._config = config
        self._resident: dict[int, int] = {}
        self._readers: set[_Reader] = set()
        self._stats = [SchedulerStats()] * config.data_parallel_size
        """The last statistics of each core."""
        self._last_load = 0.0
        self._next_load: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._is_closed = False
        self._heartbeat = asyncio.create_task(self._beat(), name="telemetry heartbeat")

    @property
    def has_room(self) -> bool:
        return len(self._readers) < MAX_READERS

    @property
    def load_interval_s(self) -> float:
        """Minimum interval between load frames, with as many readers as there are."""
        return LOAD_INTERVAL_S * max(1.0, len(self._readers) / PACED_READERS)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the frames for one router: hello, snapshot, then changes, until it is drained or too slow."""
        reader = _Reader()
        for frame in self._opening():
            reader.put(frame)
        if self._is_closed:
            reader.put(None)
        self._readers.add(reader)
        try:
            while not reader.is_cut_off and (data := await reader.queue.get()) is not None:
                yield data
        finally:
            self._readers.discard(reader)

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.residency is not None:
            self._apply(outputs.residency)
        if outputs.stats is not None:
            self._stats[outputs.engine_index] = outputs.stats
            if not self._readers:
                return  # one that connects is sent the load first
            loop = asyncio.get_running_loop()
            due = self._last_load + self.load_interval_s
            if loop.time() >= due:
                self._send_load()
            elif self._next_load is None:
                self._next_load = loop.call_at(due, self._send_load)

    def drain(self) -> None:
        """Tell all routers to send no more requests, and end the streams."""
        self._is_draining = True
        self._broadcast(Draining())
        for reader in self._readers:
            reader.put(None)

    def close(self) -> None:
        """End the streams. A router that connects once more gets one that ends at once."""
        self._is_closed = True
        self._heartbeat.cancel()
        self._forget_next_load()
        for reader in self._readers:
            reader.put(None)

    def _opening(self) -> list[bytes]:
        config = self._config
        frames: list[Frame] = [
            Hello(
                epoch=config.epoch,
                model=config.model_name,
                model_fingerprint=config.model_fingerprint,
                block_size=config.block_size,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs * config.data_parallel_size,
                kv_cache_tokens=sum(memory.kv_cache_tokens for memory in config.memory_of_ranks),
                data_parallel_size=config.data_parallel_size,
                schedules_by_priority=config.scheduling_policy == "priority",
                takes_model_name=True,
                engine_version=__version__,
            )
        ]
        frames += snapshot_of(self._resident)
        frames.append(self._load())
        if self._is_draining:
            frames.append(Draining())
        return [encode_frame(frame) for frame in frames]

    def _apply(self, delta: ResidencyDelta) -> None:
        if delta.cleared:
            self._resident.clear()
            self._broadcast(Cleared())
        for start in range(0, len(delta.removed), SNAPSHOT_SLICE_CHUNKS):
            removed = delta.removed[start : start + SNAPSHOT_SLICE_CHUNKS]
            for chunk_hash in removed:
                self._resident.pop(chunk_hash, None)
            self._broadcast(Removed(hashes=pack_u64(removed)))
        if delta.stored:
            hashes = [end.hash for end in delta.stored]
            tokens = [end.token_end for end in delta.stored]
            self._resident.update(zip(hashes, tokens, strict=True))
            self._broadcast(Stored(hashes=pack_u64(hashes), tokens=pack_u32(tokens)))

    def _load(self) -> Load:
        cores = self._stats
        return Load(
            core_step_age_s=self._llm.heartbeat_age_s,
            num_running=sum(stats.num_running for stats in cores),
            num_waiting=sum(stats.num_waiting for stats in cores),
            queued_uncached_tokens=sum(stats.queued_uncached_tokens for stats in cores),
            kv_usage=sum(stats.kv_cache_usage for stats in cores) / len(cores),
            prefill_tokens_per_s=_mean_of_measured([stats.prefill_tokens_per_s for stats in cores]),
            decode_step_s=_mean_of_measured([stats.decode_step_s for stats in cores]),
            longest_step_s=max(stats.longest_step_s for stats in cores),
            num_yielding=sum(stats.num_yielding for stats in cores),
        )

    def _send_load(self) -> None:
        self._forget_next_load()
        self._last_load = asyncio.get_running_loop().time()
        self._broadcast(self._load())

    def _forget_next_load(self) -> None:
        if self._next_load is not None:
            self._next_load.cancel()
            self._next_load = None

    def _broadcast(self, frame: Frame) -> None:
        if self._readers:
            data = encode_frame(frame)
            for reader in self._readers:
                reader.put(data)

    async def _beat(self) -> None:
        """Send a load frame at least every interval, even if the core is silent: the frame tells for how long."""
        loop = asyncio.get_running_loop()
        while True:
            wait = self._last_load + HEARTBEAT_INTERVAL_S * 0.8 - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                self._send_load()


def _mean_of_measured(values: Sequence[float]) -> float:
    """Return the mean of the figures that are measured, i.e. not 0; 0 if none is."""
    measured = [value for value in values if value]
    return sum(measured) / len(measured) if measured else 0.0


FORMAT_HEADER = "endpoint-load-metrics-format"

HEADER = "endpoint-load-metrics"


class LoadReport(Observer):
    """The load as a response header, for balancers that read Open Request Cost Aggregation (ORCA).

    A request with `endpoint-load-metrics-format: TEXT` or `JSON` gets `endpoint-load-metrics` with its answer, with
    vLLM's names of the figures. Streams have none, as in vLLM: their headers are sent before there is a load to report.

    Args:
        num_ranks: number of engine cores.
    """

    def __init__(self, num_ranks: int) -> None:
        self._kv_usage = [0.0] * num_ranks
        self._num_waiting = [0] * num_ranks

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.stats is not None:
            self._kv_usage[outputs.engine_index] = outputs.stats.kv_cache_usage
            self._num_waiting[outputs.engine_index] = outputs.stats.num_waiting

    def headers(self, form: str | None) -> dict[str, str]:
        """Return the header in the form that a request asks for; none if it asks for no form that is known."""
        named = {
            "kv_cache_usage_perc": max(self._kv_usage),
            "num_requests_waiting": float(sum(self._num_waiting)),
        }
        match (form or "").upper():
            case "TEXT":
                return {
                    HEADER: "TEXT "
                    + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
                }
            case "JSON":
                return {HEADER: "JSON " + json.dumps({"named_metrics": named})}
            case _:
                return {}


INTERVAL_S = 5.0


class StatsLog(Observer):
    """Logs a line of statistics every few seconds while there is traffic, in vLLM's format, so that existing parsers
    work. It needs no timer: a core with work sends outputs, an idle one heartbeats.

    Args:
        num_engines: number of engine cores; each has lines of its own.
        clock: monotonic seconds.
    """

    def __init__(self, num_engines: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = [_EngineStats(index, clock) for index in range(num_engines)]

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._engines[outputs.engine_index].update(outputs)


class _EngineStats:
    """Statistics of one engine core since its last line."""

    def __init__(self, index: int, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._last = clock()
        self._generated = 0
        self._prefilled = 0
        self._queries = 0
        self._hits = 0
        self._was_busy = False

    def update(self, outputs: EngineCoreOutputs) -> None:
        stats = outputs.stats
        self._generated += sum(len(output.new_token_ids) for output in outputs.outputs)
        if stats is None:
            return
        self._generated += stats.num_tokens_elsewhere
        self._prefilled += max(stats.prefix_cache_queries - stats.prefix_cache_hits, 0)
        self._queries += stats.prefix_cache_queries
        self._hits += stats.prefix_cache_hits
        is_busy = bool(stats.num_running or stats.num_waiting or self._generated or self._prefilled)
        if is_busy and not self._was_busy:
            self._last = self._clock()  # traffic begins: rates are measured from now on
        self._was_busy = is_busy
        elapsed = self._clock() - self._last
        if is_busy and elapsed >= INTERVAL_S:
            self._log(stats, elapsed)

    def _log(self, stats: SchedulerStats, elapsed: float) -> None:
        logger.info(
            "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, GPU KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            self._index,
            self._prefilled / elapsed,
            self._generated / elapsed,
            stats.num_running,
            stats.num_waiting,
            stats.kv_cache_usage * 100,
            100 * self._hits / self._queries if self._queries else 0.0,
        )
        self._last = self._clock()
        self._generated = self._prefilled = self._queries = self._hits = 0
