"""Worker subclasses for tests of `--worker-cls`."""

from __future__ import annotations

import os

from msgspec import structs

from argosy_engine.messages.worker_info import WorkerInfo
from argosy_engine.worker.worker import Worker


class ProbeWorker(Worker):
    def echo(self, *values: object) -> list[object]:
        return [os.getpid(), *values]

    def place(self, *, base: int) -> list[int]:
        return [base + self.rank, self.world_size]

    def open_pipe(self, path: str) -> str:
        """Block until another process opens the other end."""
        with open(path, "rb"):
            return "opened"

    def fail(self) -> None:
        raise RuntimeError("as asked")

    def holds_memory(self) -> bool:
        return self._runner is not None


class UnequalWorker(ProbeWorker):
    """A worker whose rank r has room for 512 - 100 * r blocks."""

    def start(self) -> WorkerInfo:
        self.args = structs.replace(self.args, num_gpu_blocks_override=512 - 100 * self.rank)
        return super().start()


class NoWorker:
    pass
