"""Attempt log: the last attempts, why each replica was chosen, and how the attempt ended; the last refusals.

Owns: bounded rings of records, which the admin port shows as decisions and refusals. Must not know: prompts, keys; a
record names a request by its id.
Invariant: at most `CAPACITY` records of each, whatever the load; a record is complete once its request has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from argosy_protocol.errors import NO_REASON, ErrorReason

CAPACITY = 1000
"""Records kept: a few hundred kilobytes; a minute of a busy service."""

HedgeOutcome = Literal["won", "lost", "failed", "promoted", "abandoned"]
"""won: the hedge responded first; lost: the first attempt did; failed: the hedge failed before that; promoted: the
first attempt failed, and the hedge took its place; abandoned: the client left before that."""


FIELDS = (
    *("time", "request_id", "model", "replica", "reason", "attempt", "prompt_tokens"),
    *("predicted_cached_tokens", "predicted_ttft_s", "cost_s", "mode", "resumed_tokens"),
    *("hedge", "status", "cached_tokens", "completion_tokens", "ttft_s", "upstream_id"),
)
_ERROR = ("error_type", "error_code", "error_param")


class AttemptRecord:
    """One attempt that was sent, and the decision for its replica."""

    __slots__ = (*FIELDS, "error")

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
        predicted_ttft_s: float | None,
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
        """Estimated; once the answer has reported its usage, the true number."""
        self.predicted_cached_tokens = predicted_cached_tokens
        self.predicted_ttft_s = predicted_ttft_s
        """None if the replica's speed was not measured yet."""
        self.cost_s = cost_s
        self.mode = mode
        """State of the replica's telemetry at the dispatch: `synced`, `stale` or `foreign`."""
        self.resumed_tokens = 0
        """Output tokens of a failed replica that precede what this attempt generates."""
        self.hedge: Literal["", "racing"] | HedgeOutcome = ""
        """How a hedge ended; empty for attempts that are no hedges."""
        self.status = 0
        """Zero until the request has ended."""
        self.error = NO_REASON
        """Why the client got an error, if it did."""
        self.cached_tokens: int | None = None
        """From the usage that the answer reports; None if it reported none."""
        self.completion_tokens: int | None = None
        """From the same usage; without one, the tokens that a stream's client was sent."""
        self.ttft_s: float | None = None
        """Streams only."""
        self.upstream_id = b""
        """The attempt's request id at the engine and in its log; empty until it is sent."""

    def as_dict(self) -> dict[str, object]:
        values: dict[str, object] = {name: getattr(self, name) for name in FIELDS}
        values["upstream_id"] = self.upstream_id.decode()
        values.update(zip(_ERROR, self.error, strict=True))
        return values


class AttemptLog:
    """A ring of the newest records."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: deque[AttemptRecord] = deque(maxlen=capacity)

    def add(self, record: AttemptRecord) -> None:
        self._records.append(record)

    def latest(self, limit: int, model: str = "") -> Iterator[AttemptRecord]:
        """Yield the newest records first, of one model if it is given."""
        for record in reversed(self._records):
            if limit <= 0:
                return
            if not model or record.model == model:
                limit -= 1
                yield record


class RefusedRequest:
    """One request that got an error before it was sent to a replica."""

    __slots__ = ("error", "model", "request_id", "status", "time")

    def __init__(self, time: float, request_id: str, model: str, status: int, error: ErrorReason) -> None:
        """`time` is the Unix time of the refusal; `model` is empty if the request was refused before it was decoded."""
        self.time = time
        self.request_id = request_id
        self.model = model
        self.status = status
        self.error = error

    def as_dict(self) -> dict[str, object]:
        values: dict[str, object] = {
            "time": self.time,
            "request_id": self.request_id,
            "model": self.model,
            "status": self.status,
        }
        values.update(zip(_ERROR, self.error, strict=True))
        return values


class RefusalLog:
    """A ring of the newest refusals. Requests without a valid key are left out: whoever tries keys could
    fill the ring."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._refused: deque[RefusedRequest] = deque(maxlen=capacity)

    def add(self, refused: RefusedRequest) -> None:
        if refused.status != 401:
            self._refused.append(refused)

    def latest(self, limit: int) -> Iterator[RefusedRequest]:
        """Yield the newest refusals first."""
        return islice(reversed(self._refused), limit)
