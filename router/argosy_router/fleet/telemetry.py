"""Telemetry client: the router's end of a replica's telemetry stream.

Owns: one task per replica that keeps the stream open and applies its frames, and what telemetry may cost its router, of
one replica, one service and all: rates of frames, of chunks, and of resets of prefix caches.
Must not know: HTTP framing, policies, other replicas.
Invariants: only a stream of the right content type, in a version that the router reads, is trusted, as far as its
budget and the bounds of figures (`replica`) go. A lost stream changes the mode of routing (`stale`) and never
ejects. A silent stream or a stalled core makes the replica suspect, and its requests move to other replicas. A replica
that refuses connections gets no requests. Whatever the peer does, the task continues, with capped and jittered
back-off.

connecting --hello, last snapshot slice--> synced --stream lost--> stale --hello, last snapshot slice--> synced
    | | ^-- a new connection is refused: the process has ended ------' ^
    | `---- no room for another reader ---------------------------------'
    `------ another content type, or a version that excludes us ----> foreign (see `foreign_engines`)

An engine's image is its tenant's choice, so a replica may send anything, as fast as the network carries it; the router
that reads it serves every tenant. Within a second a replica's frames take at most some 5 per cent of a core, and 13 if
it reports 32 engine cores or more, also over several connections, since a reconnecting replica keeps its budget. Beyond
that its stream is cut. The replicas of a service together take at most a quarter of a core, and all together half of
one. What was read beyond that is a debt, and until it is paid none of those streams is read on: engines send on at the
router's pace, and nothing is lost. While all together are in debt, a service waits for that only if it takes more than
an equal share, so that a tenant's services do not delay those of others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from argosy_protocol.headers import TELEMETRY_CONTENT_TYPE, TELEMETRY_PATH
from argosy_protocol.telemetry import (
    PROTOCOL_VERSION,
    STALE_AFTER_S,
    Cleared,
    Draining,
    Frame,
    FrameReader,
    Hello,
    Load,
    Removed,
    Snapshot,
    Stored,
    TelemetryError,
    unpack_u32,
    unpack_u64,
)
from argosy_router.fleet.foreign_engines import ForeignPoller
from argosy_router.fleet.replica import (
    MAX_RATE,
    MAX_REPORTED_CORES,
    MAX_REQUESTS,
    MAX_SECONDS,
    MAX_TOKENS,
    Replica,
    bounded_count,
    bounded_number,
    bounded_rate,
)
from argosy_router.http.deadlines import backoff_s
from argosy_router.http.messages import Headers, first_value
from argosy_router.http.upstream import (
    ConnectFailed,
    FirstByteTimeout,
    IdleTimeout,
    UpstreamConnection,
    UpstreamError,
    request_head,
)
from argosy_router.prefixes import ReplicaPrefixes
from argosy_router.token_bucket import PERIOD_S, TokenBucket

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

    def __init__(self) -> None:
        self.debt = _all_debt()
        self.num_services = 0


class ServiceTelemetryBudget:
    """The budget of one service's replicas, which counts among its fleet's services until it is closed."""

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


log = logging.getLogger(__name__)

BACKOFF_BASE_S = 0.05
"""First pause before reconnecting: a restarted process is back soon, and its peers carry the load meanwhile."""
BACKOFF_CAP_S = 2.0
"""A recovered replica waits 2 s at worst, while not more than a thousand are unreachable."""
CONNECTS_PER_S = 500.0
"""To replicas that cannot be reached, in all: a router that a thousand engines answer must not spend its time on ten
thousand that do not."""
CONNECTS_PER_TURN = 16
"""Streams that begin in one turn of the event loop, about a tenth of a millisecond each."""
MIN_STREAM_S = 5.0
"""A stream that ends sooner counts as a failure: a replica that ends each of them at once is not reconnected to all the
time."""
HEAD_TIMEOUT_S = STALE_AFTER_S
STALL_LOOK_S = 1.0
"""Between two looks at the requests of a replica whose core has stalled, each of which may be given to another one: an
engine may have thousands that nobody else can take, and tell of its stall thousands of times at once."""
_LEAST_RATE = 0.01
"""Tokens per second: a rate below is none, and would make a wait of no finite length."""
_LEAST_STEP_S = 1e-7
POLLS_PER_RETRY = 60
"""Polls before a foreign replica is asked for telemetry again, about once a minute: it may have been replaced at the
same address."""


class NotArgosyEngine(Exception):
    """The replica does not speak the telemetry protocol, or not a version that the router reads."""


class KeyRefused(UpstreamError):
    """The replica refused the router's key."""


class TelemetryFull(UpstreamError):
    """The replica is an Argosy engine and healthy, but its telemetry serves its maximum of readers."""


class Reconnects:
    """What beginning streams costs a router in all.

    When a large fleet is discovered, its streams begin a few in each turn of the event loop, first come first served;
    and the more replicas are unreachable, the less often each is tried. Services with such replicas share the attempts
    equally: those of one with many do not slow down the return of another's.
    """

    def __init__(self) -> None:
        self._failing: dict[str, int] = {}
        """Service -> number of its replicas whose last stream failed, if there are any."""
        self._num_begun = 0
        """In this turn of the loop."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def cap_s(self, service: str) -> float:
        """The longest pause before a replica of a service is tried again."""
        return max(BACKOFF_CAP_S, self._failing.get(service, 0) * len(self._failing) / CONNECTS_PER_S)

    def note(self, service: str, more: int) -> None:
        """Note that so many more replicas of a service fail, or fewer."""
        failing = self._failing.get(service, 0) + more
        if failing:
            self._failing[service] = failing
        else:
            self._failing.pop(service, None)

    @property
    def num_failing(self) -> int:
        """Replicas whose last stream failed."""
        return sum(self._failing.values())

    async def turn(self) -> None:
        """Wait until a stream may begin."""
        loop = asyncio.get_running_loop()
        if not self._num_begun:
            loop.call_soon(self._next_turn)
        if self._num_begun < CONNECTS_PER_TURN:
            self._num_begun += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < CONNECTS_PER_TURN:
            waiter = self._waiting.popleft()
            if not waiter.done():  # cancelled: its replica has gone
                waiter.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)


class TelemetryClient:
    """Follows one replica's telemetry, and updates its health, load and prefixes."""

    def __init__(
        self,
        replica: Replica,
        model: str,
        on_change: Callable[[], None],
        on_silent: Callable[[bool], None],
        may_eject: Callable[[], bool],
        rng: random.Random,
        service_budget: ServiceTelemetryBudget,
        reconnects: Reconnects,
    ) -> None:
        """
        Args:
            on_silent: called with False when heartbeats stop, and with True when a new connection gets no answer
                either: the process is stopped, or its machine is gone.
            may_eject: returns whether one more of the service's replicas may be ejected.
            service_budget: what the telemetry of all replicas of the service may cost.
            reconnects: what beginning streams may cost, to all replicas.
        """
        self._replica = replica
        self._model = model
        self._sent_key = ""
        self._tried: set[str] = set()
        """Keys that the replica has refused since it last accepted one, or refused all."""
        self._on_change = on_change
        self._on_silent = on_silent
        self._may_eject = may_eject
        self._rng = rng
        self._foreign = ForeignPoller(replica, on_change, on_silent, rng)
        self._budget = TelemetryBudget()
        self._service_budget = service_budget
        self._reconnects = reconnects
        self._is_failing = False
        self._unspent = _Read()
        self._looked_at = -math.inf
        """When the requests of the replica were last told of a stall."""
        self.skipped_frames = 0

    async def run(self) -> None:
        """Keep the stream open, or poll a foreign replica, until cancelled."""
        try:
            await self._run()
        finally:
            self._note_failing(False)

    async def _run(self) -> None:
        replica = self._replica
        failures = 0
        while True:
            is_foreign = has_other_key = False
            await self._reconnects.turn()
            began = time.monotonic()
            try:
                failures = 0 if await self._follow() and _has_lasted(began) else failures + 1
            except NotArgosyEngine as reason:
                is_foreign = True
                if replica.link != "foreign":
                    log.info("replica %s is not one of ours: %s", replica.name, reason)
            except (UpstreamError, TelemetryError) as error:
                was_stable = replica.is_synced and _has_lasted(began)
                has_other_key = self._has_other_key(error)
                failures = 0 if was_stable or has_other_key else failures + 1
                self._stream_failed(error)
            # Not awaited in `except`: compiled code would keep the exception current for every other task meanwhile.
            if is_foreign:
                self._note_failing(False)
                if replica.health.reachable():
                    self._on_change()
                self._set_link("foreign")
                await self._foreign.poll(POLLS_PER_RETRY)
                continue
            if not has_other_key and replica.note_tried():
                self._on_change()
            self._note_failing(failures > 0)
            cap_s = self._reconnects.cap_s(replica.service)
            await asyncio.sleep(backoff_s(failures, BACKOFF_BASE_S, cap_s, self._rng))

    def _note_failing(self, is_failing: bool) -> None:
        if is_failing != self._is_failing:
            self._reconnects.note(self._replica.service, 1 if is_failing else -1)
            self._is_failing = is_failing

    def _has_other_key(self, error: Exception) -> bool:
        """Whether the replica has refused its key and gets another one now."""
        if not isinstance(error, KeyRefused):
            return False
        self._tried.add(self._sent_key)
        if self._replica.key.refused(self._sent_key, self._tried):
            return True
        self._tried.clear()
        self._replica.key.is_refused = True
        return False

    def _key_accepted(self) -> None:
        self._note_failing(False)
        self._replica.key.is_refused = False
        self._tried.clear()

    def _stream_failed(self, error: UpstreamError | TelemetryError) -> None:
        """Report to the replica's health how its stream failed.

        A lost stream alone says nothing about its health; silence does, and so does a refused new connection.
        """
        self._note_loss(str(error))
        if isinstance(error, TelemetryFull):
            self._key_accepted()
            if self._replica.health.reachable():
                self._on_change()
            self._set_link("stale")
        elif self._replica.link != "stale":
            return
        elif isinstance(error, ConnectFailed) and error.refused:
            self._set_link("connecting")  # nothing listens on the port: the process has ended
        elif isinstance(error, (ConnectFailed, FirstByteTimeout, IdleTimeout)):
            self._note_silence()

    def _note_silence(self) -> None:
        """Report to the replica's health that it did not respond, and have its requests moved."""
        health = self._replica.health
        is_certain = health.is_suspect
        if health.silent(time.monotonic(), may_eject=self._may_eject()):
            self._on_change()
        self._on_silent(is_certain)

    async def _follow(self) -> bool:
        """Follow one connection until it ends. Returns whether the replica was synced then."""
        connection = await self._replica.pool.connect()
        stream = _Stream(self._apply, self._pause_s)
        self._sent_key = self._replica.key.current
        try:
            head = request_head(self._replica.pool, TELEMETRY_PATH, self._sent_key)
            connection.send(stream, head, HEAD_TIMEOUT_S, STALE_AFTER_S)
            stream.connection = connection
            await stream.ended
        finally:
            connection.abort()
            stream.close()
            self.skipped_frames += stream.reader.skipped
        was_synced = self._replica.is_synced
        self._note_loss("stream ended")
        return was_synced

    def _apply(self, frame: Frame) -> None:
        replica = self._replica
        chunks, clears = _num_chunks(frame), _clears(frame)
        self._unspent.add(chunks, clears)
        excess = self._budget.excess(time.monotonic(), chunks=chunks, clears=clears)
        if excess:
            raise TelemetryError(f"too many {excess}")
        if isinstance(frame, Load):
            self._apply_load(frame)
        elif isinstance(frame, (Stored, Removed, Snapshot, Cleared)):
            apply_residency(replica.prefixes, frame)
            if isinstance(frame, Snapshot) and frame.last:
                self._synced()
        elif isinstance(frame, Hello):
            self._apply_hello(frame)
        elif isinstance(frame, Draining) and not replica.has_announced_drain:
            replica.has_announced_drain = True
            self._on_change()

    def _pause_s(self, skipped: int) -> float:
        """Count what was read, with so many frames of unknown types, against the service's budget; return how long to
        read no more.

        Raises:
            TelemetryError: there are too many of these frames.
        """
        now, read = time.monotonic(), self._unspent
        if skipped and self._budget.excess(now, frames=skipped, chunks=0, clears=False):
            raise TelemetryError("too many frames")
        pause_s = self._service_budget.spend(
            now, frames=read.frames + skipped, chunks=read.chunks, clears=read.clears
        )
        self._unspent = _Read()
        return pause_s

    def _apply_hello(self, hello: Hello) -> None:
        if hello.min_reader_version > PROTOCOL_VERSION:
            raise NotArgosyEngine(f"telemetry needs a reader of version {hello.min_reader_version}")
        if hello.model != self._model:
            log.warning(
                "replica %s serves %r, expected %r: prefix hints will not match",
                self._replica.name,
                hello.model,
                self._model,
            )
        replica = self._replica
        self._key_accepted()
        replica.hello = hello
        replica.load.max_num_seqs = max(1, bounded_count(hello.max_num_seqs, MAX_REQUESTS))
        replica.load.data_parallel_size = max(1, bounded_count(hello.data_parallel_size, MAX_REPORTED_CORES))
        self._budget.grant_cores(replica.load.data_parallel_size, time.monotonic())
        replica.load.forget()
        replica.has_announced_drain = False

    def _apply_load(self, load: Load) -> None:
        replica = self._replica
        replica.heard_at = time.monotonic()
        replica.load.report(
            requests=bounded_count(load.num_running + load.num_waiting, MAX_REQUESTS),
            tokens=bounded_count(load.queued_uncached_tokens, MAX_TOKENS),
            kv_usage=bounded_number(load.kv_usage, 1.0),
            prefill_tokens_per_s=bounded_rate(load.prefill_tokens_per_s, _LEAST_RATE, MAX_RATE),
            decode_step_s=bounded_rate(load.decode_step_s, _LEAST_STEP_S, MAX_SECONDS),
            yielding=bounded_count(load.num_yielding, MAX_REQUESTS),
        )
        health = replica.health
        if replica.load.has_free_slot and health.found_capacity():
            self._on_change()
        is_changed = health.heartbeat(
            bounded_number(load.core_step_age_s, MAX_SECONDS),
            bounded_number(load.longest_step_s, MAX_SECONDS),
            has_work=replica.has_work,
        )
        is_stalled = replica.is_stalled
        if is_changed:
            self._on_change()
        if is_stalled and replica.heard_at - self._looked_at >= STALL_LOOK_S:
            self._looked_at = replica.heard_at
            for attempt in list(replica.inflight_attempts):
                attempt.core_stalled(load.core_step_age_s, health.stall_bound_s)

    def _synced(self) -> None:
        self._replica.syncs += 1
        self._replica.note_tried()
        if self._replica.health.synced():
            self._on_change()
        self._set_link("synced")

    def _note_loss(self, reason: str) -> None:
        """Note that the stream has ended. Known prefixes remain a good estimate; the load report does not."""
        replica = self._replica
        if replica.link == "foreign":
            self._set_link("connecting")
        if replica.link == "synced":
            log.info("replica %s: telemetry lost (%s)", replica.name, reason)
            replica.load.forget()
            replica.health.telemetry_lost()
            self._set_link("stale")

    def _set_link(self, link: str) -> None:
        if self._replica.link != link:
            self._replica.link = link  # type: ignore[assignment]
            self._on_change()


def _has_lasted(began: float) -> bool:
    return time.monotonic() - began >= MIN_STREAM_S


def _num_chunks(frame: Frame) -> int:
    return len(frame.hashes) // 8 if isinstance(frame, (Stored, Removed, Snapshot)) else 0


def _clears(frame: Frame) -> bool:
    return isinstance(frame, Cleared) or (isinstance(frame, Snapshot) and frame.first)


def apply_residency(residency: ReplicaPrefixes, frame: Frame) -> None:
    """Apply a frame about the prefix cache; other frames change nothing."""
    if isinstance(frame, Stored):
        residency.stored(unpack_u64(frame.hashes), unpack_u32(frame.tokens))
    elif isinstance(frame, Removed):
        residency.removed(unpack_u64(frame.hashes))
    elif isinstance(frame, Snapshot):
        if frame.first:
            residency.clear()
        residency.stored(unpack_u64(frame.hashes), unpack_u32(frame.tokens))
    elif isinstance(frame, Cleared):
        residency.clear()


class _Read:
    """What was read of a stream since its service's budget was last charged."""

    def __init__(self) -> None:
        self.frames = 0
        self.chunks = 0
        self.clears = 0

    def add(self, chunks: int, clears: bool) -> None:
        self.frames += 1
        self.chunks += chunks
        self.clears += clears


class _Stream:
    """Response sink that feeds a frame reader; `ended` resolves when the stream is over."""

    def __init__(self, apply: Callable[[Frame], None], pause_s: Callable[[int], float]) -> None:
        """`pause_s` is told after each read how many frames were skipped, and returns how long to read no more."""
        self.reader = FrameReader()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connection: UpstreamConnection | None = None
        self._apply = apply
        self._pause_s = pause_s
        self._resumption: asyncio.TimerHandle | None = None
        self._is_greeted = False

    def on_response(self, status: int, headers: Headers) -> None:
        content_type = first_value(headers, b"content-type") or b""
        if status in (401, 403):
            self._end(KeyRefused("the replica refused the router's key"))
        elif status == 429:
            self._end(TelemetryFull("telemetry has no room for another reader"))
        elif status >= 500:
            self._end(UpstreamError(f"telemetry answered {status}"))
        elif (
            status != 200
            or content_type.partition(b";")[0].strip().lower() != TELEMETRY_CONTENT_TYPE.encode()
        ):
            self._end(NotArgosyEngine(f"status {status}, another content type"))
        elif self.connection is not None:
            self.connection.begun()

    def on_data(self, data: bytes) -> None:
        if self.ended.done():
            return
        skipped = self.reader.skipped
        try:
            for frame in self.reader.feed(data):
                if isinstance(frame, Hello) == self._is_greeted:
                    raise TelemetryError("a hello is the first frame, and no other one")
                self._is_greeted = True
                self._apply(frame)
            self._pause(self._pause_s(self.reader.skipped - skipped))
        except (TelemetryError, NotArgosyEngine, ValueError) as error:
            self._end(
                error if isinstance(error, (TelemetryError, NotArgosyEngine)) else TelemetryError(str(error))
            )

    def _pause(self, seconds: float) -> None:
        if seconds > 0.0 and self.connection is not None:
            self.close()
            self.connection.pause_reading()
            loop = asyncio.get_running_loop()
            self._resumption = loop.call_later(seconds, self.connection.resume_reading)

    def close(self) -> None:
        """Do not read on after a pause."""
        if self._resumption is not None:
            self._resumption.cancel()

    def on_end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def on_failed(self, error: UpstreamError) -> None:
        self._end(error)

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
