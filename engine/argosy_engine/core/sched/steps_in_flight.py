"""StepsInFlight: steps that are scheduled but whose output is not processed yet, oldest first.

There is at most one, two with async scheduling, and one per stage with pipeline parallelism. A request may end, and a
new one may take its id, while a step that computes it still runs. The output of that step for this id is then stale and
must be dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from argosy_engine.messages.scheduler_output import SchedulerOutput


class StepsInFlight:
    """Queue of the steps whose output is not processed yet, with the requests for which they are stale."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, set[str]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: SchedulerOutput) -> None:
        self._steps.append((step, set()))

    def pop(self, step: SchedulerOutput) -> Collection[str]:
        """Remove a step and all older ones, which were never computed; return the ids for which it is stale."""
        stale = self.stale(step)
        while self._steps and self._steps.popleft()[0] is not step:
            pass
        return stale

    def stale(self, step: SchedulerOutput) -> Collection[str]:
        """Return the ids of the requests for which the step's output must be dropped."""
        return next(stale for known, stale in self._steps if known is step)

    def __contains__(self, request_id: str) -> bool:
        """Whether a step in flight may still produce output for the request."""
        return any(
            request_id in step.num_scheduled_tokens and request_id not in stale for step, stale in self._steps
        )

    def forget(self, request_id: str) -> None:
        """Mark the steps in flight as stale for a request that has ended."""
        for step, stale in self._steps:
            if request_id in step.num_scheduled_tokens:
                stale.add(request_id)

    def forget_all(self) -> list[str]:
        """Mark the steps in flight as stale for all requests; return the ids whose slots they were to free."""
        for step, stale in self._steps:
            stale.update(step.num_scheduled_tokens)
        return [request_id for step, _ in self._steps for request_id in step.finished_request_ids]
