"""Workers for `--worker-cls`."""

from __future__ import annotations

import os
import sys

from msgspec import structs

from argosy_engine.worker.info import WorkerInfo
from argosy_engine.worker.worker import Worker


class ProbeWorker(Worker):
    def echo(self, *values: object) -> list[object]:
        return [os.getpid(), *values]

    def fail(self) -> None:
        raise RuntimeError("as asked")

    def holds_memory(self) -> bool:
        return self._runner is not None


class UnequalWorker(Worker):
    """Of a worker process: rank r has room for 512 - 100 * r blocks."""

    def start(self) -> WorkerInfo:
        self.args = structs.replace(self.args, num_gpu_blocks_override=512 - 100 * int(sys.argv[1]))
        return super().start()


class NoWorker:
    pass
