"""What one replica's telemetry may cost its router: rates of frames, of chunks, and of resets of its prefix cache.

Owns: the bounds. Must not know: connections, what a frame means.
An engine's image is its tenant's choice, so a replica may send anything, as fast as the network carries it; the router
that reads it serves every tenant. Invariant: within a second a replica's frames take at most some 5 per cent of a
core, and 13 if it reports 32 engine cores or more, also over several connections, since a reconnecting replica keeps
its budget.
"""

from __future__ import annotations

from typing import Final

from argosy_router.ratelimit.token_bucket import PERIOD_S, TokenBucket

FRAMES_PER_S: Final = 5000.0
"""An engine sends a few frames each step and ten load reports a second: with eight cores and steps of 5 ms some 3000.
A frame costs its router some 10 us."""
FRAMES_PER_CORE_S: Final = 400.0
"""Likewise for each core of an engine with many: from 13 cores on it is more than the above."""
MAX_CORES: Final = 32
"""Engine cores that count: the number is the replica's own word. Twice as many as an InferenceService may ask for."""
FRAME_BURST: Final = 20_000.0
CHUNKS_PER_S: Final = 200_000.0
"""Chunks stored or removed. A prompt of a million tokens has some 16 000."""
CHUNK_BURST: Final = 4_000_000.0
"""A snapshot of 250 million tokens."""
CLEARS_PER_S: Final = 0.5
"""Resets of the prefix cache, snapshots of new connections among them. Each takes a slot of the service's index until
it is scrubbed, and every entry of the index has room for all slots."""
CLEAR_BURST: Final = 16.0


def _bucket(per_s: float, burst: float) -> TokenBucket:
    return TokenBucket(per_s * PERIOD_S, 0.0, burst)


def _take(bucket: TokenBucket, amount: float, now: float) -> bool:
    """Take an amount; False, and nothing is taken, if there is not enough."""
    if bucket.wait_s(amount, now) > 0.0:
        return False
    bucket.take(amount)
    return True


class TelemetryBudget:
    """The budget of one replica. Times are a monotonic clock's, passed in."""

    __slots__ = ("_chunks", "_clears", "_frames")

    def __init__(self) -> None:
        self._frames = _bucket(FRAMES_PER_S, FRAME_BURST)
        self._chunks = _bucket(CHUNKS_PER_S, CHUNK_BURST)
        self._clears = _bucket(CLEARS_PER_S, CLEAR_BURST)

    def grant_cores(self, cores: int, now: float) -> None:
        """Set the rate of frames for an engine of so many cores. What was used stays used."""
        per_s = max(FRAMES_PER_S, FRAMES_PER_CORE_S * min(cores, MAX_CORES))
        self._frames.resize(per_s * PERIOD_S, now, FRAME_BURST)

    def excess(self, now: float, *, chunks: int, clears: bool) -> str:
        """Count a frame. Returns what there is too much of; empty if it is within the budget."""
        if not _take(self._frames, 1.0, now):
            return "frames"
        if chunks and not _take(self._chunks, float(chunks), now):
            return "chunks"
        if clears and not _take(self._clears, 1.0, now):
            return "resets of the prefix cache"
        return ""
