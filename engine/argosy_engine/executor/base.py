"""Executor: the core's handle on its workers. Knows how they run, not what they compute."""

from __future__ import annotations

from collections.abc import Sequence
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

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Calls a public method of every worker; the results by rank. Arguments and results are msgpack values.

        Raises:
            UtilityFailed: there is no such method, or it failed in a worker.
            EngineDead: a worker's process ended.
        """
        ...

    def shutdown(self) -> None: ...
