"""Simulation of a fleet whose replicas come and go: warm or cold, by the worth of their caches or not.

Owns: what a new replica does before routers know it, and which replicas leave. Must not know: when a fleet should
scale.
"""

from __future__ import annotations

import random
from typing import Literal

from argosy_router.simulation.simulated_engine import EngineModel, Job, SimulatedEngine
from argosy_router.simulation.simulator import Simulation
from argosy_router.simulation.trace import TraceRequest

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
