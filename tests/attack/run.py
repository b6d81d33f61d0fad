"""The run: start the fleet and the canary, attack by attack, wait until the fleet is idle again, and collect findings.

Owns the sequence and its time limits. Must not know what an attack does.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import watch
from .canary import Canary, Record
from .fleet import Fleet
from .noise import ForeignLoad, LoopLag
from .rotation import endless
from .target import Attack, Target
from .verdict import (
    Finding,
    Phase,
    canary_findings,
    gauge_findings,
    leftover_findings,
    memory_findings,
    memory_growth,
    phase_findings,
)

PHASE_S = 8.0
SLOW_PHASE_S = 12.0
SETTLE_S = 1.0
"""Pause between attacks, so that after-effects of one are not attributed to the next."""
QUIET_S = 60.0
"""Time within which all gauges must return to zero at the end."""
SHORTEST_PHASE_S = 1.0
RESTART_S = 5.0
"""Approximate time that a restart adds to a phase, used for planning only."""


@dataclass
class Result:
    """Outcome of a run."""

    seconds: float
    rounds: float
    phases: list[Phase]
    findings: list[Finding]
    requests: dict[str, int]
    """Number of the canary's requests, by kind."""
    worst_wait_s: dict[str, float]
    """Longest wait of the canary's requests, by kind."""
    worst_loop_lag_s: float
    gauges: dict[str, float]
    growth: dict[str, float]
    """Bytes by which each process with enough samples grew."""
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def report(self, folder: Path) -> str:
        lines = [f"{self.seconds:.0f} s, {len(self.phases)} attacks, {self.rounds:.1f} rotations", ""]
        lines.append(f"{'canary':<14}{'requests':>10}{'longest wait':>14}")
        for kind, count in self.requests.items():
            lines.append(f"{kind:<14}{count:>10}{self.worst_wait_s[kind]:>12.2f} s")
        foreign = sorted(phase.foreign_cores for phase in self.phases)
        if foreign:
            lines.append(
                f"other programs kept {foreign[len(foreign) // 2]:.2f} cores busy (median of attacks, at most "
                f"{foreign[-1]:.2f}); this one's event loop was {self.worst_loop_lag_s:.2f} s late at worst"
            )
        for name, grown in self.growth.items():
            lines.append(f"memory of {name}: {grown / 2**20:+.1f} MiB")
        if not self.findings:
            return "\n".join([*lines, "", "nothing found"])
        lines += ["", f"{len(self.findings)} findings; logs are in {folder}"]
        seen = Counter((finding.kind, finding.phase, finding.text) for finding in self.findings)
        lines += [f"{count:>4} x {kind} ({phase}): {text}" for (kind, phase, text), count in seen.items()]
        return "\n".join(lines)


class Run:
    """One run over the given attacks."""

    def __init__(
        self, fleet: Fleet, attacks: Sequence[Attack], seconds: float, phase_s: float, patience_s: float = 0.0
    ) -> None:
        self._fleet = fleet
        self._attacks = attacks
        self._seconds = seconds
        self._patience_s = patience_s
        self._phase_s = self._fitting(phase_s)
        self._lag = LoopLag()
        self._foreign = ForeignLoad()
        self._phases: list[Phase] = []
        self._memory: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def _fitting(self, phase_s: float) -> float:
        """Return the phase length, shortened if a whole rotation would not fit into the run otherwise."""
        kills = sum(RESTART_S for attack in self._attacks if attack.kills)
        room = (self._seconds - kills) / len(self._attacks) - SETTLE_S
        return max(SHORTEST_PHASE_S, min(phase_s, room))

    async def run(self) -> Result:
        started = time.monotonic()
        lag = asyncio.create_task(self._lag.run())
        try:
            await self._fleet.start()
            canary = Canary(self._fleet.port)
            await canary.learn()
            clients = asyncio.create_task(canary.run())
            print(f"the fleet is up after {time.monotonic() - started:.0f} s", flush=True)
            self._foreign.read(self._fleet.pids().values())
            try:
                await self._attack(canary)
            finally:
                clients.cancel()
                await asyncio.gather(clients, return_exceptions=True)
            gauges = await self._quiet_gauges()
            result = self._result(canary.records, gauges, time.monotonic() - started)
            result.findings += leftover_findings(await asyncio.to_thread(self._fleet.stop))
            return result
        finally:
            lag.cancel()
            await asyncio.to_thread(self._fleet.stop)

    async def _attack(self, canary: Canary) -> None:
        end = time.monotonic() + self._seconds
        for attack in endless(self._attacks):
            if time.monotonic() + self._phase_s > end:
                return
            await self._phase(attack, canary)
            self._sample_memory()

    async def _phase(self, attack: Attack, canary: Canary) -> None:
        before, first = await watch.ejections(self._fleet), len(canary.records)
        began = time.monotonic()
        seconds = (
            max(self._phase_s, min(SLOW_PHASE_S, 2 * self._phase_s)) if attack.is_slow else self._phase_s
        )
        target = Target(self._fleet, began + seconds)
        phase = Phase(attack.name, began, began + seconds, stall_s=attack.stall_s, kills=attack.kills)
        self._phases.append(phase)
        await attack.run(target)
        await asyncio.sleep(SETTLE_S)
        phase.ended = time.monotonic()
        phase.outcomes, phase.unexpected = dict(target.outcomes), dict(target.unexpected)
        phase.ejections = await watch.ejections(self._fleet) - before
        phase.foreign_cores = self._foreign.read(self._fleet.pids().values())
        print(self._progress(phase, canary.records[first:]), flush=True)

    def _progress(self, phase: Phase, records: Sequence[Record]) -> str:
        findings = self._canary_findings(records, [phase]) + phase_findings([phase])
        waits = [end - start for record in records for start, end in record.waits]
        outcomes = ", ".join(f"{count} x {what}" for what, count in phase.outcomes.items() if count)
        line = (
            f"{phase.ended - phase.began:5.1f} s  {phase.name:<36} canary {len(records):>3}, longest wait "
            f"{max(waits, default=0.0):5.2f} s, others' cores {phase.foreign_cores:4.2f}  [{outcomes}]"
        )
        return "\n".join([line, *(f"        FINDING: {found.kind}: {found.text}" for found in findings)])

    def _canary_findings(self, records: Sequence[Record], phases: Sequence[Phase]) -> list[Finding]:
        return canary_findings(records, phases, self._lag.between, self._patience_s)

    def _sample_memory(self) -> None:
        now = time.monotonic()
        for name, pid in self._fleet.pids().items():
            self._memory[name].append((now, float(watch.anonymous_bytes(pid))))

    async def _quiet_gauges(self) -> dict[str, float]:
        """Wait until all gauges are zero, at most `QUIET_S`, and return them."""
        deadline = time.monotonic() + QUIET_S
        while True:
            gauges = await watch.gauges(self._fleet)
            if not any(gauges.values()) or time.monotonic() > deadline:
                return gauges
            await asyncio.sleep(0.5)

    def _result(self, records: Sequence[Record], gauges: dict[str, float], seconds: float) -> Result:
        growth = {name: memory_growth(points, len(self._attacks)) for name, points in self._memory.items()}
        worst: defaultdict[str, float] = defaultdict(float)
        for record in records:
            worst[record.kind] = max(worst[record.kind], *(end - start for start, end in record.waits))
        return Result(
            seconds=seconds,
            rounds=len(self._phases) / len(self._attacks),
            phases=self._phases,
            findings=[
                *self._canary_findings(records, self._phases),
                *phase_findings(self._phases),
                *gauge_findings(gauges),
                *memory_findings(self._memory, len(self._attacks)),
            ],
            requests=dict(Counter(record.kind for record in records)),
            worst_wait_s=dict(worst),
            worst_loop_lag_s=self._lag.worst,
            gauges=gauges,
            growth={name: grown for name, grown in growth.items() if grown is not None},
            samples=dict(self._memory),
        )
