"""StepCosts: decides which requests fail when the grammars of one step take too long together.

All streams wait for the bitmasks of a step. What a request costs is known from its last step; newcomers are measured
one by one before their first step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

MAX_TOTAL_CPU_S = 0.1
"""Limit on the CPU time of all grammars in one step: a dozen grammars that are bearable alone would together stall all
streams. Beyond the limit the most expensive request fails, one per step, until the rest fits."""
MIN_BLAMED_CPU_S = 0.01
"""CPU time that a request must have used to fail by `MAX_TOTAL_CPU_S`: no request of a large batch of usual grammars
should."""
MAX_STALL_CPU_S = 0.3
"""Limit on the CPU time of all grammars in one step that holds however little each request uses, because hundreds of
requests below `MIN_BLAMED_CPU_S` would together stall all streams for seconds. Beyond it the most expensive requests
fail at once, as many as it takes. A thousand usual grammars need a third of it."""


class StepCosts:
    """CPU time of grammars in seconds, by request id."""

    def __init__(self) -> None:
        self._cpu_s: dict[str, float] = {}
        """Of the last step, or of the measurement before the first one."""
        self._newcomers: set[str] = set()
        """Requests that are measured, but had no step yet."""

    def add_newcomer(self, request_id: str, cpu_s: float) -> None:
        self._cpu_s[request_id] = cpu_s
        self._newcomers.add(request_id)

    def forget(self, request_id: str) -> None:
        self._cpu_s.pop(request_id, None)
        self._newcomers.discard(request_id)

    def newcomers_without_room(self, request_ids: Sequence[str]) -> Collection[str]:
        """Return the newcomers to fail because a step of these requests would take longer than `MAX_STALL_CPU_S`.

        Those that have begun are not affected, and the most expensive newcomers fail first.
        """
        newcomers = self._newcomers.intersection(request_ids) if self._newcomers else ()
        if not newcomers:
            return ()
        self._newcomers.difference_update(newcomers)
        left_s = sum(self._cpu_s.get(request_id, 0.0) for request_id in request_ids)
        refused = set[str]()
        for request_id in sorted(newcomers, key=self._cpu_s.__getitem__, reverse=True):
            if left_s <= MAX_STALL_CPU_S:
                break
            refused.add(request_id)
            left_s -= self._cpu_s[request_id]
        return refused

    def too_slow_together(self, costs: Mapping[str, float]) -> list[str]:
        """Take note of the costs of a step; return the requests to fail because of their sum, nearly always none."""
        self._cpu_s |= costs
        left_s = sum(costs.values())
        if left_s <= MAX_TOTAL_CPU_S:
            return []
        failed: list[str] = []
        for request_id, cost_s in sorted(costs.items(), key=lambda item: item[1], reverse=True):
            is_blamed = not failed and cost_s >= MIN_BLAMED_CPU_S
            if not is_blamed and left_s <= MAX_STALL_CPU_S:
                break
            failed.append(request_id)
            left_s -= cost_s
        return failed
