"""Model of one engine: a queue, one prefill at a time, batched decoding, a prefix cache with LRU eviction.

Owns: what an engine does with a request, in simulated time. Must not know: routers, traces.

Prefill takes `uncached / prefill_tokens_per_s`; a decode step takes `decode_step_s + decode_step_per_seq_s * running`,
with the batch size at the first token. At most `max_num_seqs` requests run, and only as many as fit into the KV cache
with all of their output; shared blocks count once, and blocks in use are never evicted. What the model leaves out
(chunked prefill that slows decoding, preemption) favours all policies alike.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import sub

from argosy_router.simulation.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speed and size of an engine. The defaults are those of SMG's mock worker: a mid-size GPU with an 8B model."""

    prefill_tokens_per_s: float = 8000.0
    decode_step_s: float = 0.006
    decode_step_per_seq_s: float = 0.00035
    kv_cache_tokens: int = 524_288
    max_num_seqs: int = 256


@dataclass(slots=True)
class Job:
    """One request at one engine."""

    request: TraceRequest
    on_first_token: Callable[[Job, float], None]
    on_end: Callable[[Job, float], None]
    cached_tokens: int = 0
    uncached_tokens: int = 0


@dataclass(slots=True)
class CacheChange:
    """Blocks that were added to a cache and evicted from it."""

    stored: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Prompt tokens up to the end of each stored block."""
    removed: list[int] = field(default_factory=list)


Schedule = Callable[[float, Callable[[float], None]], None]
"""Schedules a callback at a simulated time, which it receives."""


class SimulatedEngine:
    """One engine in simulated time."""

    def __init__(
        self, model: EngineModel, schedule: Schedule, on_cache_change: Callable[[CacheChange], None]
    ) -> None:
        self.model = model
        self._schedule = schedule
        self._on_cache_change = on_cache_change
        self._queue: deque[Job] = deque()
        self._cache: OrderedDict[int, int] = OrderedDict()
        """block -> its own tokens, least recently used first"""
        self._ends: dict[int, int] = {}
        """block -> prompt tokens up to its end"""
        self._cache_tokens = 0
        self._users: dict[int, int] = {}
        """block -> running requests that use it"""
        self._is_prefilling = False
        self.running = 0
        self.running_tokens = 0
        """KV cache tokens of running requests, to the end of their output."""
        self.queued_tokens = 0
        """Uncached prompt tokens of requests without a first token, as of their arrival."""
        self.busy_s = 0.0
        self._hits: dict[int, tuple[int, TraceRequest]] = {}
        """last block of a cached prefix -> how often it was found, and a request with this prefix and nothing more"""

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def kv_usage(self) -> float:
        return min(1.0, self.running_tokens / self.model.kv_cache_tokens)

    def submit(self, job: Job, now: float) -> None:
        """Queue a request that arrives at `now`."""
        job.uncached_tokens = job.request.input_tokens - self._cached(job.request)
        self.queued_tokens += job.uncached_tokens
        self._queue.append(job)
        self._prefill_next(now)

    def _prefill_next(self, now: float) -> None:
        if self._is_prefilling or not self._queue or self.running >= self.model.max_num_seqs:
            return
        if (
            self.running
            and self.running_tokens + self._room(self._queue[0].request) > self.model.kv_cache_tokens
        ):
            return
        job = self._queue.popleft()
        self._is_prefilling = True
        self.running += 1
        self._take(job.request)
        job.cached_tokens = self._cached(job.request)
        self._note_hit(job.request)
        seconds = (job.request.input_tokens - job.cached_tokens) / self.model.prefill_tokens_per_s
        self.busy_s += seconds
        self._schedule(now + seconds, lambda then: self._prefilled(job, then))

    def _prefilled(self, job: Job, now: float) -> None:
        self._is_prefilling = False
        self.queued_tokens -= job.uncached_tokens
        self._store(job.request)
        step = self.model.decode_step_s + self.model.decode_step_per_seq_s * self.running
        self._schedule(now + step, lambda then: job.on_first_token(job, then))
        self._schedule(now + step * max(1, job.request.output_tokens), lambda then: self._ended(job, then))
        self._prefill_next(now)

    def _ended(self, job: Job, now: float) -> None:
        self.running -= 1
        self._give_back(job.request)
        job.on_end(job, now)
        self._prefill_next(now)

    def _room(self, request: TraceRequest) -> int:
        """KV cache tokens that the request needs besides those that running requests already use."""
        shared = sum(tokens for block, tokens in _blocks(request) if block in self._users)
        return request.input_tokens + request.output_tokens - shared

    def _take(self, request: TraceRequest) -> None:
        self.running_tokens += self._room(request)
        for block in request.blocks:
            self._users[block] = self._users.get(block, 0) + 1

    def _give_back(self, request: TraceRequest) -> None:
        for block in request.blocks:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
        self.running_tokens -= self._room(request)

    def hottest(self, max_tokens: int) -> list[TraceRequest]:
        """Prompts that consist of the hottest prefixes, at most `max_tokens` tokens together: length times hits, as the
        engine's `prefix_hits` ranks them."""
        ranked = sorted(self._hits.values(), key=lambda hit: hit[0] * hit[1].input_tokens, reverse=True)
        chosen: list[TraceRequest] = []
        covered: set[int] = set()
        for _, prefix in ranked:
            if prefix.input_tokens <= max_tokens and prefix.blocks[-1] not in covered:
                max_tokens -= prefix.input_tokens
                covered.update(prefix.blocks)
                chosen.append(prefix)
        return chosen

    def residency(self) -> CacheChange:
        """All that is cached, for a router that connects."""
        change = CacheChange()
        for block in self._cache:
            change.stored.append(block)
            change.tokens.append(self._ends[block])
        return change

    def _note_hit(self, request: TraceRequest) -> None:
        run = self._run(request)
        if run:
            count, prefix = self._hits.get(request.blocks[run - 1], (0, None))
            if prefix is None:
                end = request.ends[run - 1]
                prefix = TraceRequest(0.0, end, 1, request.blocks[:run], request.ends[:run])
            self._hits[request.blocks[run - 1]] = (count + 1, prefix)

    def _run(self, request: TraceRequest) -> int:
        """Number of the prompt's blocks found in the cache."""
        run = 0
        for block in request.blocks:
            if block not in self._cache:
                break
            run += 1
        return run

    def _cached(self, request: TraceRequest) -> int:
        """Prompt tokens found in the cache; the last token is always computed, as in vLLM."""
        run = self._run(request)
        return min(request.ends[run - 1], request.input_tokens - 1) if run else 0

    def _store(self, request: TraceRequest) -> None:
        change = CacheChange()
        for (block, tokens), end in zip(_blocks(request), request.ends, strict=True):
            if block not in self._cache:
                self._cache[block] = tokens
                self._ends[block] = end
                self._cache_tokens += tokens
                change.stored.append(block)
                change.tokens.append(end)
        # The deepest blocks are touched first, so that they are evicted before the blocks they depend on.
        self._touch(reversed(request.blocks))
        for _ in range(len(self._cache)):
            if self._cache_tokens <= self.model.kv_cache_tokens:
                break
            block, tokens = self._cache.popitem(last=False)
            if block in self._users:
                self._cache[block] = tokens
            else:
                self._cache_tokens -= tokens
                del self._ends[block]
                change.removed.append(block)
        if change.stored or change.removed:
            self._on_cache_change(change)

    def _touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._cache.move_to_end(block)


def _blocks(request: TraceRequest) -> Iterable[tuple[int, int]]:
    """Each block with the number of tokens that it covers itself."""
    return zip(request.blocks, map(sub, request.ends, chain((0,), request.ends)), strict=False)
