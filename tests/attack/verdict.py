"""Limits of a run, and the findings where it exceeded them.

Owns the limits. Must not know processes, sockets or clocks: all input is records, so that tests can make them up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from .canary import Record

STALL_S = 2.0
"""Longest time that a client may wait for an event while no replica is being killed."""
PACE_S = 0.05
"""Time that each token of an answer in one piece may take on top, because its client sees no progress: a stream of 20
tokens per second has not stalled. Streams, whose events are timed one by one, have no such allowance."""
MEMORY_WARM_UP_SHARE = 0.3
"""Share of a process's first samples to ignore, while its caches fill and its allocators reach their size."""
MEMORY_ROTATIONS = 3
"""Rotations that a process must live through for its growth to be judged, since attacks differ in peak memory."""
MEMORY_GROWTH_BYTES = 24 << 20
"""Growth over all samples, by the median slope, that allocators and caches account for."""
MEMORY_GROWTH_SHARE = 0.05
"""The same as a share of the process's memory after warm-up. The larger of the two limits applies."""


@dataclass
class Phase:
    """One execution of one attack."""

    name: str
    began: float
    ended: float = 0.0
    stall_s: float = STALL_S
    kills: bool = False
    outcomes: dict[str, int] = field(default_factory=dict)
    """Number of the attack's requests by status or kind of failure."""
    unexpected: dict[str, int] = field(default_factory=dict)
    """Number of answers that bad input must not get."""
    ejections: float = 0.0
    foreign_cores: float = 0.0
    """Cores that other programs kept busy during the phase."""


@dataclass
class Finding:
    """One violation of a limit."""

    kind: str
    phase: str
    text: str


def during(record: Record, phases: Sequence[Phase]) -> list[Phase]:
    """Return the phases that overlap the request."""
    return [phase for phase in phases if phase.began <= record.ended_at and record.sent_at <= phase.ended]


def canary_findings(
    records: Sequence[Record],
    phases: Sequence[Phase],
    lag_between: Callable[[float, float], float],
    patience_s: float = 0.0,
) -> list[Finding]:
    """Return the canary's failed requests, and its waits that were too long after subtracting this process's own lag.

    Args:
        patience_s: added to the limit, for machines that other programs use.
    """
    found = []
    for record in records:
        around = during(record, phases)
        names = ", ".join(dict.fromkeys(phase.name for phase in around)) or "between phases"
        if record.failure:
            found.append(Finding("canary failed", names, f"{record.kind}: {record.failure}"))
        allowed = max((phase.stall_s for phase in around), default=STALL_S)
        allowed += patience_s + PACE_S * record.tokens
        too_long = [
            (end - start - lag_between(start, end), number)
            for number, (start, end) in enumerate(record.waits)
            if end - start > allowed  # lags are looked up for few of a long run's waits
        ]
        wait, number = max(too_long, default=(0.0, 0))
        if wait > allowed:
            where = "first event" if number == 0 else "next event"
            found.append(Finding("canary stalled", names, f"{record.kind}: {wait:.1f} s for the {where}"))
    return found


def phase_findings(phases: Sequence[Phase]) -> list[Finding]:
    """Return server errors for bad input, and ejections caused by it."""
    found = []
    for phase in phases:
        for answer, count in phase.unexpected.items():
            found.append(Finding("bad answer", phase.name, f"{count} x {answer}"))
        if phase.ejections and not phase.kills:
            found.append(Finding("ejection", phase.name, f"{phase.ejections:g} replicas ejected"))
    return found


def gauge_findings(gauges: Mapping[str, float]) -> list[Finding]:
    """Return the gauges that did not return to zero."""
    return [
        Finding("gauge not zero", "at the end", f"{name} is {value:g}")
        for name, value in gauges.items()
        if value
    ]


def leftover_findings(commands: Sequence[str]) -> list[Finding]:
    """Return the processes that outlived the one that started them."""
    return [Finding("process left", "at the end", command) for command in commands]


def median_slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil-Sen estimate: the median slope over all pairs of points, which single allocator steps do not
    change."""
    return statistics.median(
        (after - before) / (later - earlier)
        for (earlier, before), (later, after) in combinations(points, 2)
        if later > earlier
    )


def memory_growth(points: Sequence[tuple[float, float]], attacks: int) -> float | None:
    """Return the bytes by which a process grew after its warm-up; None if it has too few samples.

    Args:
        points: (time, bytes) after each attack.
        attacks: number of attacks in one rotation.
    """
    if len(points) < MEMORY_ROTATIONS * attacks:
        return None
    warm = _warm(points)
    return median_slope(warm) * (warm[-1][0] - warm[0][0])


def _warm(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[int(MEMORY_WARM_UP_SHARE * len(points)) :]


def memory_findings(samples: Mapping[str, Sequence[tuple[float, float]]], attacks: int) -> list[Finding]:
    """Return the processes that kept growing."""
    found = []
    for name, points in samples.items():
        growth = memory_growth(points, attacks)
        if growth is None:
            continue
        allowed = max(MEMORY_GROWTH_BYTES, MEMORY_GROWTH_SHARE * _warm(points)[0][1])
        if growth > allowed:
            text = f"{name} grew by {growth / 2**20:.0f} MiB to {points[-1][1] / 2**20:.0f}"
            found.append(Finding("memory grows", "whole run", text))
    return found
