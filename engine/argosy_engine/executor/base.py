"""Executor: the core's handle on its workers. Knows how they run, not what they compute."""

from __future__ import annotations

from typing import Protocol

from argosy_engine.worker.step import ModelRunnerOutput, SchedulerOutput
from argosy_engine.worker.worker import WorkerInfo


class Executor(Protocol):
    def start(self) -> WorkerInfo:
        """Loads the model, sizes and allocates the KV cache.

        Raises:
            ConfigError: the model or a flag cannot work; the message names the remedy.
        """
        ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput: ...

    def shutdown(self) -> None: ...
