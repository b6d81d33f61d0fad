"""Workers for `--worker-cls`."""

from __future__ import annotations

import os

from argosy_engine.worker.worker import Worker


class ProbeWorker(Worker):
    def echo(self, *values: object) -> list[object]:
        return [os.getpid(), *values]

    def fail(self) -> None:
        raise RuntimeError("as asked")

    def holds_memory(self) -> bool:
        return self._runner is not None


class NoWorker:
    pass
