"""StepsInFlight: steps that are scheduled but not booked yet, oldest first; one, or two with async scheduling.

A request may end, or a new one may take its id, while a step that it is part of still runs. What such a step brings
for it is stale and nobody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from argosy_engine.worker.step import SchedulerOutput


class StepsInFlight:
    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, set[str]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: SchedulerOutput) -> None:
        self._steps.append((step, set()))

    def pop(self, step: SchedulerOutput) -> Collection[str]:
        """Ends a step, and gives up older ones, which were never computed; the requests for which it is stale."""
        stale = self.stale(step)
        while self._steps and self._steps.popleft()[0] is not step:
            pass
        return stale

    def stale(self, step: SchedulerOutput) -> Collection[str]:
        """The requests for which the step is stale."""
        return next(stale for known, stale in self._steps if known is step)

    def __contains__(self, request_id: str) -> bool:
        """Whether a step may still bring something for the request."""
        return any(
            request_id in step.num_scheduled_tokens and request_id not in stale for step, stale in self._steps
        )

    def forget(self, request_id: str) -> None:
        """The request that has this id now wants nothing of what is under way."""
        for step, stale in self._steps:
            if request_id in step.num_scheduled_tokens:
                stale.add(request_id)

    def forget_all(self) -> list[str]:
        """Nobody wants what is under way; the requests whose slots these steps were to free."""
        for step, stale in self._steps:
            stale.update(step.num_scheduled_tokens)
        return [request_id for step, _ in self._steps for request_id in step.finished_request_ids]
