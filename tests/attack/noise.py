"""What else slows clients down: this process's own event loop, and other programs on the machine.

Owns: the loop's lags and the machine's CPU accounts. Must not know: what they are compared with.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

_TICK_S = 0.02
_NOTEWORTHY_S = 0.02
_KEPT = 100_000


class LoopLag:
    """How late this process's event loop was. A client on it sees every event at least that late, through no fault of
    the fleet's."""

    def __init__(self) -> None:
        self._lags: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """(when a tick ran, how many seconds late)"""
        self.worst = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - due > _NOTEWORTHY_S:
                self.note(now, now - due)

    def note(self, ran: float, late: float) -> None:
        """A tick ran, and was late."""
        self.worst = max(self.worst, late)
        self._lags.append((ran, late))

    def between(self, start: float, end: float) -> float:
        """Seconds for which the loop stood still within a span of time."""
        total = 0.0
        for ran, late in reversed(self._lags):
            if ran < start:
                break
            total += max(0.0, min(ran, end) - max(ran - late, start))
        return total


def machine_cpu_s() -> float:
    """CPU seconds of everything on this machine so far, idle time excluded."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of these processes so far; those that are gone count nothing."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Cores that programs other than the fleet and this one kept busy since the last reading."""

    def __init__(self) -> None:
        self._before: tuple[float, float, dict[int, float]] = (time.monotonic(), machine_cpu_s(), {})

    def read(self, pids: Iterable[int]) -> float:
        """Cores, from 0 to the number of the machine's. A process counts from the reading on that first names it."""
        now, machine = time.monotonic(), machine_cpu_s()
        own = {pid: process_cpu_s([pid]) for pid in (*pids, os.getpid())}
        then, machine_then, own_then = self._before
        ours = sum(used - own_then.get(pid, used) for pid, used in own.items())
        self._before = now, machine, own
        return max(0.0, (machine - machine_then - ours) / max(0.1, now - then))
