"""UniprocExecutor: the worker lives in the core's own process, as direct calls. Right for one device."""

from __future__ import annotations

from argosy_engine.config import EngineArgs
from argosy_engine.worker.step import ModelRunnerOutput, SchedulerOutput
from argosy_engine.worker.worker import Worker, WorkerInfo


class UniprocExecutor:
    def __init__(self, args: EngineArgs) -> None:
        self._worker = Worker(args)

    def start(self) -> WorkerInfo:
        return self._worker.start()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker.execute(step)

    def shutdown(self) -> None:
        self._worker.shutdown()
