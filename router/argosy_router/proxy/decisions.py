"""The last choices, and what became of them.

Owns: a bounded ring of records for the admin port. Must not know: prompts, keys; a record names a request by its id.
Invariant: at most `CAPACITY` records, whatever the load; a record is complete once its request has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

CAPACITY = 1000
"""A few hundred kilobytes; a minute of a busy service."""

HedgeOutcome = Literal["won", "lost", "failed", "promoted", "abandoned"]
"""It answered first; the first attempt did; it failed before; the first attempt failed, which made it the only one; the
client left before."""


class DecisionRecord(Struct):
    """One dispatched attempt."""

    time: float
    """Unix time of the dispatch."""
    request_id: str
    model: str
    replica: str
    reason: str
    attempt: int
    prompt_tokens: int
    """Estimated before the answer, as the answer's usage says after it."""
    predicted_cached_tokens: int
    predicted_ttft_s: float
    cost_s: float
    mode: str
    """What was known of the replica: `synced`, `stale` or `foreign`."""
    resumed_tokens: int = 0
    """Output of a replica that died; this attempt goes on behind it."""
    hedge: Literal["", "racing"] | HedgeOutcome = ""
    """What became of an attempt that was sent beside one that was overdue. Empty for all others."""
    status: int = 0
    """Zero until the request has ended."""
    cached_tokens: int | None = None
    """By the answer's usage; absent when it has none."""
    completion_tokens: int | None = None
    """By the same usage; where there is none, what a stream's client was sent."""
    ttft_s: float | None = None
    """Streams only."""


class DecisionLog:
    """The ring."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=capacity)

    def add(self, record: DecisionRecord) -> None:
        self._records.append(record)

    def latest(self, limit: int, model: str = "") -> Iterator[DecisionRecord]:
        """Newest first."""
        for record in reversed(self._records):
            if limit <= 0:
                return
            if not model or record.model == model:
                limit -= 1
                yield record
