"""What telemetry may cost its router, of one replica, one service and all: rates of frames, of chunks, and of resets of
prefix caches.

Owns: the bounds. Must not know: connections, what a frame means.
An engine's image is its tenant's choice, so a replica may send anything, as fast as the network carries it; the router
that reads it serves every tenant. Invariant: within a second a replica's frames take at most some 5 per cent of a
core, and 13 if it reports 32 engine cores or more, also over several connections, since a reconnecting replica keeps
its budget. Beyond that its stream is cut.

The replicas of a service together take at most a quarter of a core, and all together half of one. What was read beyond
that is a debt, and until it is paid none of those streams is read on: engines send on at the router's pace, and nothing
is lost. While all together are in debt, a service waits for that only if it takes more than an equal share, so that a
tenant's services do not delay those of others.
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
it is scrubbed, and entries of many holders have room for all slots."""
CLEAR_BURST: Final = 16.0

SERVICE_FRAMES_PER_S: Final = 25_000.0
SERVICE_FRAME_BURST: Final = 100_000.0
SERVICE_CHUNKS_PER_S: Final = 1_000_000.0
SERVICE_CHUNK_BURST: Final = 32_000_000.0
"""As many chunks as a router of a gigabyte has room for."""
SERVICE_CLEARS_PER_S: Final = 8.0
SERVICE_CLEAR_BURST: Final = 64.0
"""And two for each replica: all may be connected anew at once, and that again soon."""
FRAMES_PER_S_IN_ALL: Final = 2 * SERVICE_FRAMES_PER_S
FRAME_BURST_IN_ALL: Final = 2 * SERVICE_FRAME_BURST
CHUNKS_PER_S_IN_ALL: Final = 2 * SERVICE_CHUNKS_PER_S
CHUNK_BURST_IN_ALL: Final = 2 * SERVICE_CHUNK_BURST


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

    def excess(self, now: float, *, chunks: int, clears: bool, frames: int = 1) -> str:
        """Count a frame, or several. Returns what there is too much of; empty if it is within the budget."""
        if not _take(self._frames, float(frames), now):
            return "frames"
        if chunks and not _take(self._chunks, float(chunks), now):
            return "chunks"
        if clears and not _take(self._clears, 1.0, now):
            return "resets of the prefix cache"
        return ""


class _Debt:
    """Frames and chunks that were read, and how long it takes until they are within the rates."""

    __slots__ = ("_chunks", "_frames")

    def __init__(self, frames: TokenBucket, chunks: TokenBucket) -> None:
        self._frames = frames
        self._chunks = chunks

    def add(self, frames: int, chunks: int, now: float) -> float:
        """Count what was read; return the seconds until that is within the rates."""
        return max(self._frames.spend(float(frames), now), self._chunks.spend(float(chunks), now))

    def resize(self, parts: int, now: float) -> None:
        """Divide the rates in all by a number of services."""
        self._frames.resize(FRAMES_PER_S_IN_ALL / parts * PERIOD_S, now, FRAME_BURST_IN_ALL / parts)
        self._chunks.resize(CHUNKS_PER_S_IN_ALL / parts * PERIOD_S, now, CHUNK_BURST_IN_ALL / parts)


def _all_debt() -> _Debt:
    return _Debt(
        _bucket(FRAMES_PER_S_IN_ALL, FRAME_BURST_IN_ALL), _bucket(CHUNKS_PER_S_IN_ALL, CHUNK_BURST_IN_ALL)
    )


class FleetTelemetryBudget:
    """The budget of all replicas of a router."""

    __slots__ = ("debt", "num_services")

    def __init__(self) -> None:
        self.debt = _all_debt()
        self.num_services = 0


class ServiceTelemetryBudget:
    """The budget of one service's replicas, which counts among its fleet's services until it is closed."""

    __slots__ = ("_clears", "_fleet", "_own", "_share", "_share_parts")

    def __init__(self, fleet: FleetTelemetryBudget) -> None:
        self._fleet = fleet
        fleet.num_services += 1
        self._own = _Debt(
            _bucket(SERVICE_FRAMES_PER_S, SERVICE_FRAME_BURST),
            _bucket(SERVICE_CHUNKS_PER_S, SERVICE_CHUNK_BURST),
        )
        self._clears = _bucket(SERVICE_CLEARS_PER_S, SERVICE_CLEAR_BURST)
        self._share = _all_debt()
        """Its equal share of what all services may take, which counts while these are in debt."""
        self._share_parts = 1

    def close(self) -> None:
        self._fleet.num_services -= 1

    def grant_replicas(self, replicas: int, now: float) -> None:
        """Set the burst of resets for so many replicas. What was used stays used."""
        self._clears.resize(SERVICE_CLEARS_PER_S * PERIOD_S, now, SERVICE_CLEAR_BURST + 2 * replicas)

    def spend(self, now: float, *, frames: int, chunks: int, clears: int) -> float:
        """Count what was read of a replica; return how many seconds later it may be read on."""
        own_s = max(self._own.add(frames, chunks, now), self._clears.spend(float(clears), now))
        all_s = self._fleet.debt.add(frames, chunks, now)
        return own_s if all_s <= 0.0 else max(own_s, min(all_s, self._share_s(now, frames, chunks)))

    def _share_s(self, now: float, frames: int, chunks: int) -> float:
        parts = max(1, self._fleet.num_services)
        if parts != self._share_parts:
            self._share_parts = parts
            self._share.resize(parts, now)
        return self._share.add(frames, chunks, now)
