"""TelemetryHub: the engine's end of the telemetry stream (`protocol.telemetry`).

The API process mirrors which chunks are resident from the core's deltas, so a router that connects gets its snapshot
without any work for the core. Each reader has a bounded queue of encoded frames; a reader that cannot keep up is
disconnected, and reconnects for a new snapshot.

The cores of an engine with data parallelism are one replica to routers: the stream announces what any of them holds
(`core.proc.rank_prefixes` merges their deltas), and their loads together. Counts are sums; rates, times and shares are
those of one core.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.observer import Observer
from argosy_engine.messages.core_messages import EngineCoreOutputs, ResidencyDelta, SchedulerStats
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
