"""BlockLives: how long a sample of KV blocks lives in the prefix cache, and how often it is read there.

Owns: which blocks are sampled, and their times. Must not know the pool's queue or hashes. A block is born when it is
allocated, is used when a request takes a reference on what it caches, and dies when that is evicted. A block that never
caches anything leaves no record.
Design: vLLM `v1/core/kv_cache_metrics.py` (`--kv-cache-metrics`; sampling at allocation).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from argosy_engine.messages.core_messages import BlockLife

MAX_USES: Final = 4
"""Uses of a block that are remembered, the last ones: up to three gaps a life."""
MAX_RECORDS: Final = 1024
"""Lives kept until the next report; further ones are dropped. Bounds what one report carries."""


class BlockLives:
    """Times of sampled blocks.

    Args:
        sample: share of the allocations that are followed, above 0 and up to 1.
        clock: seconds, monotonic.
        draw: a number of [0, 1) per allocation.
    """

    def __init__(
        self,
        sample: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._sample = sample
        self._clock = clock
        self._draw = draw
        self._births: dict[int, float] = {}
        self._uses: dict[int, deque[float]] = {}
        self._ended: list[BlockLife] = []

    def allocated(self, block_id: int) -> None:
        """Follow the block from now on, if it is drawn."""
        self._uses.pop(block_id, None)
        if self._draw() < self._sample:
            self._births[block_id] = self._clock()
        else:
            self._births.pop(block_id, None)

    def used(self, block_id: int) -> None:
        """Note that a request shares the block."""
        if block_id in self._births:
            self._uses.setdefault(block_id, deque(maxlen=MAX_USES)).append(self._clock())

    def evicted(self, block_id: int) -> None:
        """End the block's life."""
        born = self._births.pop(block_id, None)
        uses = self._uses.pop(block_id, ())
        if born is None or len(self._ended) >= MAX_RECORDS:
            return
        now, times = self._clock(), list(uses)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        self._ended.append(BlockLife(now - born, now - (times[-1] if times else born), gaps))

    def take(self) -> list[BlockLife]:
        """Return the lives that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended
