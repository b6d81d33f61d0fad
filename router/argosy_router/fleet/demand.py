"""Recent demand of one service: times to first token of the last minute.

Owns: the counts by bucket, in slices of a few seconds. Must not know: queues, replicas, clocks.
Invariant: memory is bounded by the number of slices, whatever the number of requests.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from argosy_protocol.load_report import TTFT_BOUNDS_S, TTFT_WINDOW_S

SLICES: Final = 6
"""The window moves in steps of a sixth, so that a burst leaves it within ten seconds of its age."""
_SLICE_S: Final = TTFT_WINDOW_S / SLICES


class Demand:
    """Times to first token of one service, as the operator's autoscaler needs them."""

    __slots__ = ("_slices", "held_until")

    def __init__(self) -> None:
        self._slices: dict[int, list[int]] = {}
        """number of the slice -> answers per bucket"""
        self.held_until = 0.0
        """When requests were last held for want of a replica; earlier ones are not counted."""

    def observe_ttft(self, seconds: float, started: float, now: float) -> None:
        """Count an answer that began `seconds` after its request, which arrived at `started`."""
        if started < self.held_until:
            return
        number = int(now / _SLICE_S)
        counts = self._slices.get(number)
        if counts is None:
            self._forget(number)
            counts = self._slices[number] = [0] * (len(TTFT_BOUNDS_S) + 1)
        counts[bisect_left(TTFT_BOUNDS_S, seconds)] += 1

    def ttft_counts(self, now: float) -> tuple[int, ...]:
        """Answers of the window per bucket; empty if there were none."""
        self._forget(int(now / _SLICE_S))
        if not self._slices:
            return ()
        return tuple(sum(column) for column in zip(*self._slices.values(), strict=True))

    def _forget(self, number: int) -> None:
        """Drop the slices that have left the window when `number` is the current one."""
        for past in [past for past in self._slices if past <= number - SLICES]:
            del self._slices[past]
