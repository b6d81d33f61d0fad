"""StatsLog: logs a line of statistics every few seconds while there is traffic.

The format is vLLM's, so that existing parsers work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from argosy_engine.frontend.observer import Observer
from argosy_engine.messages.core_messages import EngineCoreOutputs, SchedulerStats

logger = logging.getLogger("argosy.stats")

INTERVAL_S = 5.0


class StatsLog(Observer):
    """Observer that needs no timer: a core with work sends outputs, an idle one heartbeats.

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
