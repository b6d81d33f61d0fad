"""Measures what else slows clients down: this process's own event loop, and other programs on the machine.

Owns the event loop's lag and the machine's CPU times. Must not know what they are compared with.
"""

from __future__ import annotations

import asyncio
import os
import time
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

_TICK_S = 0.02
_NOTEWORTHY_S = 0.02
_KEPT = 100_000


class LoopLag:
    """Records the lag of this process's event loop, by which its clients see events later than the fleet sent them."""

    def __init__(self) -> None:
        self._lags: list[tuple[float, float]] = []
        """(time at which a tick ran, seconds by which it was late), in the order of time."""
        self.worst = 0.0

    async def run(self) -> None:
        """Measure the lag until cancelled."""
        while True:
            due = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - due > _NOTEWORTHY_S:
                self.note(now, now - due)

    def note(self, ran: float, late: float) -> None:
        """Record that a tick ran late."""
        self.worst = max(self.worst, late)
        self._lags.append((ran, late))
        if len(self._lags) > 2 * _KEPT:
            del self._lags[:_KEPT]

    def between(self, start: float, end: float) -> float:
        """Return the seconds for which the loop was blocked between two times."""
        total = 0.0
        for position in range(bisect_left(self._lags, (start, 0.0)), len(self._lags)):
            ran, late = self._lags[position]
            if ran - late > end:
                break
            total += max(0.0, min(ran, end) - max(ran - late, start))
        return total


def machine_cpu_s() -> float:
    """Return the CPU seconds of all programs on this machine so far, without idle time."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of these processes so far. Processes that have exited count as 0."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Measures how many cores other programs than the fleet and this one keep busy."""

    def __init__(self) -> None:
        self._before: tuple[float, float, dict[int, float]] = (time.monotonic(), machine_cpu_s(), {})

    def read(self, pids: Iterable[int]) -> float:
        """Return the cores kept busy since the last reading. A process of `pids` counts as ours from the first reading
        that names it."""
        now, machine = time.monotonic(), machine_cpu_s()
        own = {pid: process_cpu_s([pid]) for pid in (*pids, os.getpid())}
        then, machine_then, own_then = self._before
        ours = sum(used - own_then.get(pid, used) for pid, used in own.items())
        self._before = now, machine, own
        return max(0.0, (machine - machine_then - ours) / max(0.1, now - then))
