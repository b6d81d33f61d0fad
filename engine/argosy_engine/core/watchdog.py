"""Watchdog: finds requests that nothing moves any more, so that the core can fail them instead of keeping them.

A request moves when its tokens, its computed tokens or its status change. Standing still for a good reason does not
count: the core's loop may be busy elsewhere (loading weights, say), and a prompt or a preempted request may wait for
its turn for as long as others move. Others move when their tokens do: that requests arrive, or leave, moves nobody.
What remains is a fault of ours, which should cost this request and be counted.

A core whose loop itself hangs has no watchdog here: its heartbeats end, and `/health` turns red.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from argosy_engine.core.request import BLOCKED, Request, RequestStatus

CHECK_INTERVAL_S = 5.0
"""Between two looks at all requests; a look costs a microsecond for each."""


class _Mark:
    """What a request looked like, and for how long it has."""

    __slots__ = ("position", "still_s")

    def __init__(self, position: tuple[int, ...]) -> None:
        self.position = position
        self.still_s = 0.0


class Watchdog:
    """
    Args:
        timeout_s: how long a request may stand still; 0: for ever.
        clock: monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._checked_at = clock()
        self._marks: dict[str, _Mark] = {}
        self._num_computed = 0

    @property
    def is_due(self) -> bool:
        return self._clock() - self._checked_at >= CHECK_INTERVAL_S

    def check(self, requests: Iterable[Request], num_computed: int = 0) -> list[str]:
        """The requests that have stood still for too long; to be called when it `is_due`.

        Args:
            num_computed: tokens computed so far for any request, those included that came and went between two looks.
        """
        now = self._clock()
        # Longer gaps are time in which the loop did something else.
        elapsed = min(now - self._checked_at, 2 * CHECK_INTERVAL_S)
        self._checked_at = now
        marks, before = dict[str, _Mark](), self._marks
        has_moved, self._num_computed = num_computed > self._num_computed, num_computed
        standing: list[tuple[Request, _Mark]] = []
        for request in requests:
            position = _position(request)
            mark = before.get(request.request_id)
            if mark is None:
                mark = _Mark(position)
            elif mark.position != position:
                has_moved = has_moved or _has_grown(mark.position, position)
                mark = _Mark(position)
            else:
                standing.append((request, mark))
            marks[request.request_id] = mark
        self._marks = marks
        for request, mark in standing:
            is_decoding = request.status is RequestStatus.RUNNING and request.has_first_token
            if not has_moved or is_decoding or request.status in BLOCKED:
                mark.still_s += elapsed
        if not self.timeout_s:
            return []
        return [request.request_id for request, mark in standing if mark.still_s >= self.timeout_s]

    def still_s(self, request_id: str) -> float:
        """Seconds for which the request has stood still, as far as they count."""
        mark = self._marks.get(request_id)
        return mark.still_s if mark is not None else 0.0


def _position(request: Request) -> tuple[int, ...]:
    return request.num_tokens, request.num_computed_tokens, request.status, request.num_preemptions


def _has_grown(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether there are more tokens or more of them are computed."""
    return now[0] > before[0] or now[1] > before[1]
