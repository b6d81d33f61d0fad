"""Simulation of a trace with some routers and a fleet of simulated engines.

Owns: simulated time, and the events between routers and engines: requests, telemetry, first tokens, ends.
Must not know: how a choice is made (`Service.choose`), how results are shown.

Each router has its own service, index and replica loads, as separate processes would have. Engines announce stored and
evicted blocks at once, and their load every `HEARTBEAT_S`.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from argosy_protocol.fleet import FleetService
from argosy_router.config import UpstreamLimits
from argosy_router.fleet.replica import Member, Replica
from argosy_router.fleet.replica_key import ServiceKeys
from argosy_router.fleet.replica_load import Charge
from argosy_router.fleet.service import Service
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.pool import ConnectionPool
from argosy_router.http.tls import UpstreamTls
from argosy_router.prefixes.replica_prefixes import ReplicaPrefixes
from argosy_router.prompts.prompt_hash import Prompt
from argosy_router.simulation.simulated_engine import CacheChange, EngineModel, Job, SimulatedEngine
from argosy_router.simulation.trace import TraceRequest

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
