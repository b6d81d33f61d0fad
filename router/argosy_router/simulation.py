"""Simulation of request traces on the router's own routing code, in simulated time: some routers, and a fleet of
simulated engines that may grow and shrink.

Owns: a synthetic trace, a model of an engine, simulated time and its events (requests, telemetry, first tokens, ends),
and the figures that compare policies.
Must not know: sockets, clocks, how a choice is made (`Service.choose`), when a fleet should scale. Service, index,
replica load and policies are the production code; only engines and time are simulated.

Each router has its own service, index and replica loads, as separate processes would have. Engines announce stored and
evicted blocks at once, and their load every `HEARTBEAT_S`.
"""

# Not compiled: a simulator, which is no part of a running router.

from __future__ import annotations

import asyncio
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import sub
from typing import Literal

from msgspec import Struct

from argosy_protocol.fleet import FleetService
from argosy_router.config import UpstreamLimits
from argosy_router.fleet.replica import Charge, Member, Replica, ServiceKeys
from argosy_router.fleet.service import Service
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.upstream import ConnectionPool, UpstreamTls
from argosy_router.observability.lines import TraceRequest
from argosy_router.prefixes import Prompt, ReplicaPrefixes

SYNTHETIC_BLOCK_TOKENS = 64
_WARMUP_THINKS = 12.0
"""Length of the warm-up, in mean pauses between turns; few synthetic conversations last longer."""


def synthetic_trace(
    count: int,
    rate_per_s: float,
    *,
    groups: int = 40,
    prefix_tokens: int = 2048,
    turns: float = 4.0,
    turn_tokens: int = 400,
    output_tokens: int = 150,
    think_s: float = 20.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """Generate conversations that share system prompts: about half of the prompt tokens can come from a cache.

    Each conversation begins with one of `groups` prefixes, the k-th with a weight of 1/k, and has `turns` turns on
    average (geometric). Each turn's prompt is the previous prompt, its answer, and `turn_tokens` more on average
    (exponential). Conversations begin as a Poisson process, so that `rate_per_s` requests arrive on average.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    popularity = [1.0 / (rank + 1) for rank in range(groups)]
    requests: list[TraceRequest] = []
    fresh = iter(range(1, 1 << 62))
    prefixes = [_new_blocks(prefix_tokens, fresh) for _ in range(groups)]
    begin = -_WARMUP_THINKS * think_s  # so that conversations of every age are under way at zero
    horizon = count / rate_per_s
    while True:
        begin += rng.expovariate(rate_per_s / turns)
        if begin > horizon:
            seen = [request for request in requests if 0.0 <= request.arrival_s <= horizon]
            if len(seen) >= count:
                return sorted(seen, key=lambda request: request.arrival_s)[:count]
            horizon *= 1.1
        (group,) = rng.choices(range(groups), popularity)
        blocks, tokens, now = list(prefixes[group]), prefix_tokens, begin
        while True:
            tokens += 1 + int(rng.expovariate(1.0 / turn_tokens))
            output = 1 + int(rng.expovariate(1.0 / output_tokens))
            blocks += [next(fresh) for _ in range(tokens // SYNTHETIC_BLOCK_TOKENS - len(blocks))]
            ends = tuple(SYNTHETIC_BLOCK_TOKENS * (number + 1) for number in range(len(blocks)))
            requests.append(TraceRequest(now, tokens, output, tuple(blocks), ends))
            if rng.random() >= 1.0 - 1.0 / turns:
                break
            tokens += output
            now += rng.expovariate(1.0 / think_s)


def _new_blocks(tokens: int, fresh: Iterator[int]) -> list[int]:
    return [next(fresh) for _ in range(tokens // SYNTHETIC_BLOCK_TOKENS)]


def at_speed(requests: Iterable[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, arriving `factor` times as fast."""
    return [request._replace(arrival_s=request.arrival_s / factor) for request in requests]


def oracle_tokens(requests: Iterable[TraceRequest]) -> int:
    """Prompt tokens that an unbounded cache shared by all replicas would provide."""
    seen: set[int] = set()
    total = 0
    for request in requests:
        run = 0
        for block in request.blocks:
            if block not in seen:
                break
            run += 1
        total += min(request.ends[run - 1], request.input_tokens - 1) if run else 0
        seen.update(request.blocks)
    return total


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
    """One engine in simulated time: a queue, one prefill at a time, batched decoding, a prefix cache with LRU eviction.

    Prefill takes `uncached / prefill_tokens_per_s`; a decode step takes `decode_step_s + decode_step_per_seq_s *
    running`, with the batch size at the first token. At most `max_num_seqs` requests run, and only as many as fit into
    the KV cache with all of their output; shared blocks count once, and blocks in use are never evicted. What the model
    leaves out (chunked prefill that slows decoding, preemption) favours all policies alike.
    """

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


HEARTBEAT_S = 1.0
"""The real engines' interval when idle; a busy engine reports more often, so this is the harder case."""


@dataclass(slots=True)
class SimulationOutcome:
    """Measurements of one replay."""

    policy: str
    replicas: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    predicted_ttft_s: list[float] = field(default_factory=list)
    """Predictions, in the order of `ttft_s`."""
    arrival_s: list[float] = field(default_factory=list)
    """When the requests arrived, in the order of `ttft_s`."""
    cached: list[tuple[int, int]] = field(default_factory=list)
    """Cached tokens and all tokens of their prompts, in the same order."""
    busy_s: list[float] = field(default_factory=list)
    """Seconds of prefill, per replica."""
    makespan_s: float = 0.0


def unused_pool(url: str) -> ConnectionPool:
    """Connection pool of a replica to which nothing is ever sent."""
    loop = asyncio.new_event_loop()
    loop.close()
    return ConnectionPool(url, UpstreamLimits(), TimerWheel(loop), UpstreamTls())


class SimulatedRouter:
    """One router's knowledge of the fleet."""

    def __init__(self, names: Sequence[str], model: EngineModel, index_capacity: int) -> None:
        spec = FleetService(namespace="replay", name="service", uid="0", model="model")
        self.service = Service(spec, ServiceKeys(), index_capacity)
        for name in names:
            self.add(name, model)

    def add(self, name: str, model: EngineModel) -> None:
        """Connect to one more replica."""
        member, service = Member(name, name, f"http://{name}"), self.service
        replica = Replica(service.name, member, unused_pool(member.url), ReplicaPrefixes(service.index))
        replica.load.max_num_seqs = model.max_num_seqs
        replica.link = "synced"
        service.replicas[name] = replica
        service.invalidate()

    def remove(self, name: str) -> None:
        """Forget a replica that leaves."""
        self.service.replicas.pop(name).prefixes.close()
        self.service.invalidate()


class Simulation:
    """One replay of one trace with one policy."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        policy: str,
        replicas: int,
        model: EngineModel | Sequence[EngineModel],
        *,
        routers: int = 1,
        seed: int = 0,
        index_capacity: int = 1_000_000,
    ) -> None:
        self._requests = requests
        self._policy = policy
        self._rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = 0
        self._left = len(requests)
        models = [model] * replicas if isinstance(model, EngineModel) else list(model)
        names = [f"r{number:03}" for number in range(replicas)]
        self._routers = [SimulatedRouter(names, models[0], index_capacity) for _ in range(routers)]
        self._engines = {
            name: SimulatedEngine(each, self._at, self._announcer(name))
            for name, each in zip(names, models, strict=True)
        }
        self.outcome = SimulationOutcome(policy, replicas)

    def run(self) -> SimulationOutcome:
        """Run the simulation to the end of the last request."""
        for request in self._requests:
            self._at(request.arrival_s, lambda now, request=request: self._arrive(request, now))
        self._at(0.0, self._heartbeat)
        while self._events and self._left:
            now, _, event = heapq.heappop(self._events)
            self.outcome.makespan_s = now
            event(now)
        self.outcome.busy_s = [engine.busy_s for engine in self._engines.values()]
        return self.outcome

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, event))

    def _arrive(self, request: TraceRequest, now: float) -> None:
        routers = self._routers
        router = routers[0] if len(routers) == 1 else self._rng.choice(routers)
        blocks = request.blocks
        prompt = Prompt(
            blocks, blocks[0] if blocks else 0, 0, request.input_tokens, chunk_tokens=request.ends
        )
        choice = router.service.choose(prompt, now, self._rng, policy=self._policy)
        charge = choice.replica.load.charge(choice.uncached_tokens)
        router.service.dispatched(choice, prompt, now)
        job = Job(
            request,
            lambda job, then: self._first_token(job, charge, choice.predicted_ttft_s, then),
            lambda job, then: self._end(charge),
        )
        self.outcome.prompt_tokens += request.input_tokens
        self.outcome.predicted_tokens += min(choice.decision.predicted_tokens, request.input_tokens)
        self._engines[choice.replica.name].submit(job, now)

    def _first_token(self, job: Job, charge: Charge, predicted_s: float, now: float) -> None:
        charge.first_token()
        self.outcome.ttft_s.append(now - job.request.arrival_s)
        self.outcome.predicted_ttft_s.append(predicted_s)
        self.outcome.cached_tokens += job.cached_tokens
        self.outcome.arrival_s.append(job.request.arrival_s)
        self.outcome.cached.append((job.cached_tokens, job.request.input_tokens))

    def _end(self, charge: Charge) -> None:
        charge.release()
        self._left -= 1

    def _announcer(self, name: str) -> Callable[[CacheChange], None]:
        def announce(change: CacheChange) -> None:
            for router in self._routers:
                replica = router.service.replicas.get(name)
                if replica is not None:
                    replica.prefixes.stored(change.stored, change.tokens)
                    replica.prefixes.removed(change.removed)

        return announce

    def _heartbeat(self, now: float) -> None:
        for router in self._routers:
            for replica in router.service.replicas.values():
                engine = self._engines[replica.name]
                model = engine.model
                replica.load.report(
                    requests=engine.running + engine.waiting,
                    tokens=engine.queued_tokens,
                    kv_usage=engine.kv_usage,
                    prefill_tokens_per_s=model.prefill_tokens_per_s,
                    decode_step_s=model.decode_step_s + model.decode_step_per_seq_s * engine.running,
                )
                replica.prefixes.expire(now)
        self._at(now + HEARTBEAT_S, self._heartbeat)


Victims = Literal["least-valuable", "newest", "oldest", "random"]
"""Which replicas leave: those whose caches are worth least to the routers, the newest (as a ReplicaSet chooses among
ready pods that became ready at clearly different times), the oldest, or any (as it does among those of about one
age)."""


class ScalingSimulation(Simulation):
    """A replay during which replicas are added and removed at given times."""

    @property
    def routable(self) -> list[str]:
        """Names of the replicas that routers know, oldest first."""
        return list(self._routers[0].service.replicas)

    def add_replicas(
        self, at_s: float, count: int, model: EngineModel, *, warm_up_s: float = 0.0, warm_up_tokens: int = 0
    ) -> None:
        """Add replicas at a time. They compute the hottest prefixes of a living one, at most `warm_up_tokens` tokens,
        and are known to routers once they have, or after `warm_up_s`."""
        for number in range(count):
            self._at(
                at_s, lambda now, number=number: self._start(number, model, warm_up_s, warm_up_tokens, now)
            )

    def remove_replicas(self, at_s: float, count: int, victims: Victims, *, seed: int = 0) -> None:
        """Remove replicas at a time. What they compute is finished; routers send them nothing more."""
        self._at(at_s, lambda now: self._remove(count, victims, seed, now))

    def _start(
        self, number: int, model: EngineModel, warm_up_s: float, warm_up_tokens: int, now: float
    ) -> None:
        name = f"new{number:03}"
        engine = self._engines[name] = SimulatedEngine(model, self._at, self._announcer(name))
        living = [each for each in self._routers[0].service.replicas if each in self._engines]
        peer = self._engines[living[number % len(living)]]
        prefixes = peer.hottest(warm_up_tokens) if warm_up_s else []
        left = len(prefixes)

        def computed(job: Job, then: float) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._join(name, engine, then)

        for prefix in prefixes:
            engine.submit(Job(prefix, lambda job, then: None, computed), now)
        self._at(now + warm_up_s, lambda then: self._join(name, engine, then))

    def _join(self, name: str, engine: SimulatedEngine, now: float) -> None:
        for router in self._routers:
            if name in router.service.replicas:
                continue
            router.add(name, engine.model)
            resident = engine.residency()
            router.service.replicas[name].prefixes.stored(resident.stored, resident.tokens)

    def _remove(self, count: int, victims: Victims, seed: int, now: float) -> None:
        names = self.routable
        if victims == "least-valuable":
            names.sort(key=lambda name: sum(self._value(name, now)))
        elif victims == "newest":
            names.reverse()
        elif victims == "random":
            random.Random(seed).shuffle(names)  # noqa: S311 - reproducible, not secret
        for name in names[:count]:
            for router in self._routers:
                router.remove(name)

    def _value(self, name: str, now: float) -> list[float]:
        return [router.service.replicas[name].cache_value.rate(now) for router in self._routers]


def conversation_of(request: TraceRequest, prefix_blocks: int) -> int:
    """What the turns of one conversation of a synthetic trace have in common: the first block of its own."""
    return request.blocks[prefix_blocks] if len(request.blocks) > prefix_blocks else -1


BASELINE = "round-robin"


class PolicyResult(Struct, frozen=True, kw_only=True):
    """Figures of one policy on one number of replicas."""

    policy: str
    replicas: int
    cached_share: float
    """Share of prompt tokens found in a cache."""
    oracle_share: float
    """The same for an unbounded cache shared by all replicas."""
    predicted_share: float
    """Share of prompt tokens that the router expected to be cached."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_error_mean_s: float
    """Mean absolute difference between predicted and simulated time to first token."""
    imbalance: float
    """Busiest replica's prefill time over the mean."""
    makespan_s: float


def result_of(outcome: SimulationOutcome, oracle_tokens: int) -> PolicyResult:
    """Compute the figures of one replay."""
    ttft = sorted(outcome.ttft_s)
    errors = [abs(a - b) for a, b in zip(outcome.ttft_s, outcome.predicted_ttft_s, strict=True)]
    mean_busy = sum(outcome.busy_s) / len(outcome.busy_s)
    return PolicyResult(
        policy=outcome.policy,
        replicas=outcome.replicas,
        cached_share=outcome.cached_tokens / outcome.prompt_tokens,
        oracle_share=oracle_tokens / outcome.prompt_tokens,
        predicted_share=outcome.predicted_tokens / outcome.prompt_tokens,
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        ttft_error_mean_s=sum(errors) / len(errors),
        imbalance=max(outcome.busy_s) / mean_busy if mean_busy else 1.0,
        makespan_s=outcome.makespan_s,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of an ordered sample lies (nearest rank)."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


HEADER = (
    *("REPLICAS", "POLICY", "CACHED", "OF ORACLE", "TTFT P50", "P90", "P99"),
    *("P90 / RR", "P99 / RR", "IMBALANCE"),
)


def rows(results: Sequence[PolicyResult]) -> list[tuple[str, ...]]:
    """Rows of the table under `HEADER`; the ratios compare to round-robin on the same number of replicas."""
    baselines = {result.replicas: result for result in results if result.policy == BASELINE}
    table: list[tuple[str, ...]] = []
    for result in results:
        baseline = baselines.get(result.replicas)
        ratios = ("-", "-")
        if baseline is not None:
            ratios = (
                f"{result.ttft_p90_s / baseline.ttft_p90_s:.2f}",
                f"{result.ttft_p99_s / baseline.ttft_p99_s:.2f}",
            )
        of_oracle = result.cached_share / result.oracle_share if result.oracle_share else 1.0
        table.append(
            (
                str(result.replicas),
                result.policy,
                f"{result.cached_share:.1%}",
                f"{of_oracle:.1%}",
                f"{result.ttft_p50_s:.3f}s",
                f"{result.ttft_p90_s:.3f}s",
                f"{result.ttft_p99_s:.3f}s",
                *ratios,
                f"{result.imbalance:.2f}",
            )
        )
    return table
