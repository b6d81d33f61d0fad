"""Worker subclasses for tests of `--worker-cls`.

In processes whose worker is that of `bare_worker`, those that need no model are subclasses of it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from argosy_engine.errors import ConfigError
from argosy_engine.messages import LoadStep, ModelRunnerOutput, SchedulerOutput, WorkerInfo
from argosy_engine.worker.worker import Worker

if TYPE_CHECKING:
    from argosy_engine.worker.pending_step import PendingStep


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

    def num_blocks(self) -> int:
        return self._budget.num_blocks


class MeetingWorker(ProbeWorker):
    """A worker that meets the others when it has woken up, as those do that capture graphs."""

    has_started = False

    def start(self) -> WorkerInfo:
        info = super().start()
        self.has_started = True
        return info

    def move_model(self, rank: int, path: str) -> str:
        """Let one rank look for its model in another folder, and return the one before."""
        before = str(self._path)
        if self.rank == rank:
            self._path = Path(path)
        return before

    def sleep_alone(self, rank: int) -> None:
        if self.rank == rank:
            self.sleep(1)

    def _graph_sizes(self) -> list[int]:
        if self.has_started:
            self._parallel.least(1)
        return []


class UnequalWorker(ProbeWorker):
    """A worker whose rank r has room for 512 - 100 * r blocks."""

    def start(self) -> WorkerInfo:
        self.args = structs.replace(self.args, num_gpu_blocks_override=512 - 100 * self.rank)
        return super().start()


class OtherWeightsWorker(ProbeWorker):
    """A worker whose rank 1 loads other dummy weights than the others."""

    def start(self) -> WorkerInfo:
        self.args = structs.replace(self.args, seed=self.rank)
        return super().start()


class FailsOnOneCoreWorker(Worker):
    """A worker that does not start on the second of the cores that share experts, while the others wait for it."""

    def start(self) -> WorkerInfo:
        if self.data_rank == 1:
            raise ConfigError("not on this core")
        threading.Event().wait()
        raise AssertionError


class FailsLateWorker(ProbeWorker):
    """A worker whose rank 1 loads the model and then cannot start."""

    def start(self) -> WorkerInfo:
        info = super().start()
        if self.rank == 1:
            raise ConfigError("as asked")
        return info


class ScriptedWorker(ProbeWorker):
    """A worker whose steps do what the first id that they release says, if it is `WHEN:WHAT:ARGUMENT`.

    WHEN is `launch`, or `end`, which is when the step's tokens are awaited.
    """

    def execute(self, step: SchedulerOutput) -> Any:
        if not step.finished_request_ids or step.finished_request_ids[0].count(":") != 2:
            return super().execute(step)
        when, what, argument = step.finished_request_ids[0].split(":")
        if when == "launch":
            self.act(what, argument)
        return ScriptedStep(self, when, what, argument)

    def act(self, what: str, argument: str) -> None:
        if what == "fail" and self.rank == int(argument):
            raise RuntimeError("as asked")
        if what == "open":
            self.open_pipe(argument)
        elif what == "tell":
            with open(argument, "wb"):
                pass
        elif what == "lose" and self.rank:
            with open(argument, "wb") as pipe:
                # Of the highest number: the kernel closes it last, and the peer fails when this end is known.
                fcntl.fcntl(pipe, fcntl.F_DUPFD, 512)
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "lose":
            with open(argument, "rb") as pipe:
                pipe.read()
            raise RuntimeError("the peer is gone")


class ScriptedStep:
    def __init__(self, worker: ScriptedWorker, when: str, what: str, argument: str) -> None:
        self._worker = worker
        self._script = when, what, argument

    def wait(self) -> ModelRunnerOutput:
        when, what, argument = self._script
        if when == "end":
            self._worker.act(what, argument)
        return ModelRunnerOutput([what], [[]])


class OutOfMemoryWorker(ProbeWorker):
    """A worker whose rank `seed` has no memory for its third step."""

    num_steps = 0

    def execute(self, step: SchedulerOutput) -> PendingStep:
        import torch

        self.num_steps += 1
        if self.num_steps == 3 and self.rank == self.args.seed:
            raise torch.OutOfMemoryError("as asked")
        return super().execute(step)


class KilledWorker(ProbeWorker):
    """A worker whose rank 1 is killed by its third step."""

    num_steps = 0

    def execute(self, step: SchedulerOutput) -> PendingStep:
        self.num_steps += 1
        if self.num_steps == 3 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(step)


class OtherTokensWorker(ProbeWorker):
    """A worker whose rank 1 samples other tokens than the others."""

    def execute(self, step: SchedulerOutput) -> PendingStep:
        pending = super().execute(step)
        if self.rank == 1:
            output = pending.get()
            output.sampled_token_ids = [[token + 1 for token in each] for each in output.sampled_token_ids]
        return pending


class NoWorker:
    pass


class LongReasonWorker(ProbeWorker):
    """A worker that cannot start with seed 1, and whose every step fails, for reasons of `REASON_LENGTH` characters."""

    REASON_LENGTH = 1 << 24

    def start(self) -> WorkerInfo:
        if self.args.seed == 1:
            raise ConfigError("x" * self.REASON_LENGTH)
        return super().start()

    def execute(self, step: SchedulerOutput) -> Any:
        raise RuntimeError("x" * self.REASON_LENGTH)


class HangingWorker(Worker):
    """A worker that hangs while it loads, and holds the interpreter's lock, as in a read of a mapped file."""

    def start(self) -> WorkerInfo:
        import ctypes
        import time

        self.on_load_step(LoadStep("probe", 2, 5))
        time.sleep(1)  # its process can tell of the progress so far
        while True:  # a signal interrupts it
            ctypes.PyDLL(None).sleep(3600)
