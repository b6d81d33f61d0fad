"""The last choices, and what became of them.

Owns: a bounded ring of records for the admin port. Must not know: prompts, keys; a record names a request by its id.
Invariant: at most `CAPACITY` records, whatever the load; a record is complete once its request has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

CAPACITY = 1000
"""A few hundred kilobytes; a minute of a busy service."""

HedgeOutcome = Literal["won", "lost", "failed", "promoted", "abandoned"]
"""It answered first; the first attempt did; it failed before; the first attempt failed, which made it the only one; the
client left before."""


FIELDS = (
    *("time", "request_id", "model", "replica", "reason", "attempt", "prompt_tokens"),
    *("predicted_cached_tokens", "predicted_ttft_s", "cost_s", "mode", "resumed_tokens"),
    *("hedge", "status", "cached_tokens", "completion_tokens", "ttft_s", "upstream_id"),
)


class DecisionRecord:
    """One dispatched attempt."""

    __slots__ = FIELDS

    def __init__(
        self,
        time: float,
        request_id: str,
        model: str,
        replica: str,
        reason: str,
        attempt: int,
        prompt_tokens: int,
        predicted_cached_tokens: int,
        predicted_ttft_s: float,
        cost_s: float,
        mode: str,
    ) -> None:
        self.time = time
        """Unix time of the dispatch."""
        self.request_id = request_id
        self.model = model
        self.replica = replica
        self.reason = reason
        self.attempt = attempt
        self.prompt_tokens = prompt_tokens
        """Estimated before the answer, as the answer's usage says after it."""
        self.predicted_cached_tokens = predicted_cached_tokens
        self.predicted_ttft_s = predicted_ttft_s
        self.cost_s = cost_s
        self.mode = mode
        """What was known of the replica: `synced`, `stale` or `foreign`."""
        self.resumed_tokens = 0
        """Output of a replica that died; this attempt goes on behind it."""
        self.hedge: Literal["", "racing"] | HedgeOutcome = ""
        """What became of an attempt that was sent beside one that was overdue. Empty for all others."""
        self.status = 0
        """Zero until the request has ended."""
        self.cached_tokens: int | None = None
        """By the answer's usage; absent when it has none."""
        self.completion_tokens: int | None = None
        """By the same usage; where there is none, what a stream's client was sent."""
        self.ttft_s: float | None = None
        """Streams only."""
        self.upstream_id = b""
        """What the engine, and its log, call the attempt; empty until it is sent."""

    def as_dict(self) -> dict[str, object]:
        values: dict[str, object] = {name: getattr(self, name) for name in FIELDS}
        values["upstream_id"] = self.upstream_id.decode()
        return values


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
