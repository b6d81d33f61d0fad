"""Watchdog: finds requests that make no progress, so that the core can fail them instead of keeping them for ever.

A request makes progress when its tokens, its computed tokens or its status change. Time without progress does not count
if there is a good reason: the core's loop may be busy elsewhere (loading weights, for example), and a request that
waits or is in prefill may have to wait as long as tokens of other requests are computed. Requests that merely arrive or
leave are not progress. What remains is a fault of the engine, which fails this one request and is counted.

The watchdog does not detect a core whose loop hangs: its heartbeats end, and `/health` fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from argosy_engine.core.request import BLOCKED, Request, RequestStatus

CHECK_INTERVAL_S = 5.0
"""Seconds between two checks of all requests; a check costs about a microsecond per request."""


class Progress:
    """Progress of a request at the last check, and for how many seconds it has not changed."""

    __slots__ = ("position", "still_s")

    def __init__(self, position: tuple[int, ...]) -> None:
        self.position = position
        self.still_s = 0.0


class Watchdog:
    """Measures for how long each request has made no progress.

    Args:
        timeout_s: how long a request may make no progress; 0 means no limit.
        clock: returns monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._checked_at = clock()
        self._marks: dict[str, Progress] = {}
        self._num_computed = 0

    @property
    def is_due(self) -> bool:
        return self._clock() - self._checked_at >= CHECK_INTERVAL_S

    def check(self, requests: Iterable[Request], num_computed: int = 0) -> list[str]:
        """Return the ids of the requests that have stalled for too long. Call it when it `is_due`.

        Args:
            requests: all unfinished requests.
            num_computed: tokens computed so far for all requests, including those that came and went between checks.
        """
        now = self._clock()
        # In a longer gap the loop was busy with something else.
        elapsed = min(now - self._checked_at, 2 * CHECK_INTERVAL_S)
        self._checked_at = now
        marks, before = dict[str, Progress](), self._marks
        has_moved, self._num_computed = num_computed > self._num_computed, num_computed
        standing: list[tuple[Request, Progress]] = []
        for request in requests:
            position = _position(request)
            mark = before.get(request.request_id)
            if mark is None:
                mark = Progress(position)
            elif mark.position != position:
                has_moved = has_moved or _has_grown(mark.position, position)
                mark = Progress(position)
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

    def forget(self) -> None:
        """Drop the marks: no request is left. Otherwise those of the last check would stay until the next one."""
        self._marks = {}

    def still_s(self, request_id: str) -> float:
        """Return the seconds without progress that count for this request."""
        mark = self._marks.get(request_id)
        return mark.still_s if mark is not None else 0.0


def _position(request: Request) -> tuple[int, ...]:
    return request.num_tokens, request.num_computed_tokens, request.status, request.num_preemptions


def _has_grown(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether a request has more tokens, or more computed tokens, than before."""
    return now[0] > before[0] or now[1] > before[1]
