"""Executor: the core's handle on its workers. Knows how they run, not what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from argosy_engine.worker.info import WorkerInfo
from argosy_engine.worker.step import GrammarBitmask, ModelRunnerOutput, SchedulerOutput


class PendingOutput(Protocol):
    """A step that was launched. Steps end in the order in which they were launched."""

    def sample(self, grammar: GrammarBitmask | None) -> None:
        """The mask of a step that awaits one; for no other, and before the next step is launched."""
        ...

    def get(self) -> ModelRunnerOutput:
        """Waits for the step's end.

        Raises:
            EngineDead: a worker's process ended, or the step failed in it.
        """
        ...


class Executor(Protocol):
    def start(self) -> WorkerInfo:
        """Loads the model, sizes and allocates the KV cache.

        Raises:
            ConfigError: the model or a flag cannot work; the message names the remedy.
            EngineDead: a worker's process ended.
        """
        ...

    def execute(self, step: SchedulerOutput) -> PendingOutput:
        """Launches a step.

        Raises:
            EngineDead: a worker's process ended, or the step failed in it.
        """
        ...

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a public method of every worker; the results by rank. Arguments and results are msgpack values.

        Args:
            timeout: how long to wait for the answers; the call itself goes on. A worker in the core's own process
                cannot be left waiting for: there it has no effect.

        Raises:
            UtilityFailed: there is no such method, it failed in a worker, or its time is up.
            EngineDead: a worker's process ended.
        """
        ...

    def shutdown(self) -> None: ...
