"""WorkerProcess: a worker's own process, `python -m argosy_engine.executor.worker_process NAME URL ...`

Arguments: name, how the workers find each other (`Rendezvous.init_method`, `own_host`), rank, world size, the parent's
process id, data-parallel rank, index among the workers of this machine or -1, and descriptors: that of
`Rendezvous.store`, then the broadcast queue's.

It reads calls from the broadcast queue and answers over its socket. Steps overlap: this thread launches the next one
while another waits for the tokens of the last (`AnswerQueue`). It ends with the core: a thread waits until the other
end of the socket closes, and the kernel kills the process if that thread cannot run (`osproc`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import Round
from argosy_engine.distributed.parallel_config import is_first, name_process
from argosy_engine.errors import ConfigError, UtilityFailed
from argosy_engine.executor.broadcast import BroadcastReader, MessageStream, ReaderEnds
from argosy_engine.executor.worker_protocol import (
    CALL,
    DIED,
    DONE,
    EXECUTE,
    FAILED,
    LEND,
    PROGRESS,
    MessageReader,
    MessageWriter,
    WorkerFailure,
    failure_of,
    join_network,
)
from argosy_engine.messages import CollectiveRpc, GrammarBitmask, LoadStep, SchedulerOutput
from argosy_engine.osproc import describe_on_signal, die_with_parent, dump_stacks_on_signal, paused_collector
from argosy_protocol.program.process import configure_logging

if TYPE_CHECKING:
    from argosy_engine.worker.pending_step import PendingStep
    from argosy_engine.worker.worker import Worker

logger = logging.getLogger("argosy.worker")


_PROGRESS_S = 0.5
"""Minimum interval between two messages on the progress of a phase of the load."""


class AnswerQueue:
    """Answers of one worker, sent by a thread.

    They are sent in the order of the core's calls, each once it is known: the thread waits for the steps' tokens, so
    that the worker takes the next call meanwhile.

    Args:
        rank: the worker's, for the log.
        stream: where the answers go; only the thread writes to it.
    """

    def __init__(self, rank: int, stream: MessageWriter) -> None:
        self._rank = rank
        self._stream = stream
        self._encode = msgspec.msgpack.Encoder().encode
        self._told: tuple[str, float] = "", 0.0
        self._queue: queue.Queue[Callable[[], bytes | None]] = queue.Queue()
        threading.Thread(target=self._send, daemon=True, name="answers").start()

    def put_step(self, wait: Callable[[], Any], *, is_answered: bool) -> None:
        """Answer with the output of a launched step. A step that fails ends the process.

        Args:
            wait: waits for the end of the step and returns its output.
            is_answered: whether the core waits for this worker's output; otherwise only a failure is sent.
        """

        def answer() -> bytes | None:
            output = wait()
            return DONE + self._encode(output) if is_answered else None

        self._queue.put(answer)

    def put_progress(self, step: LoadStep) -> None:
        """Tell the core how far the load is: every phase, and of a phase as much as it needs to know."""
        phase, told_at = self._told
        now = time.monotonic()
        if step.phase == phase and now - told_at < _PROGRESS_S:
            return
        self._told = step.phase, now
        message = PROGRESS + self._encode(step)
        self._queue.put(lambda: message)

    def put_result(self, result: Any) -> None:
        """Answer with the result of a call.

        Raises:
            TypeError: the result cannot be encoded.
        """
        message = DONE + self._encode(result)
        self._queue.put(lambda: message)

    def put_failure(self, error: Exception) -> None:
        """Answer with the error of a call, which does not affect the worker."""
        message = FAILED + self._encode(self._describe(error))
        self._queue.put(lambda: message)

    def join(self) -> None:
        """Wait until everything is answered."""
        self._queue.join()

    def die(self, error: Exception) -> NoReturn:
        """Answer everything before, tell why this process ends, and end it."""

        def answer() -> bytes:
            raise error

        self._queue.put(answer)
        self._queue.join()  # the thread ends the process
        os._exit(1)

    def _send(self) -> None:
        while True:
            answer = self._queue.get()
            try:
                message = answer()
                if message is not None:
                    self._stream.send(message)
            except Exception as error:
                with contextlib.suppress(OSError):  # the core has ended
                    self._stream.send(DIED + self._encode(failure_of(error)))
                os._exit(1)
            self._queue.task_done()

    def _describe(self, error: Exception) -> WorkerFailure:
        if isinstance(error, (ConfigError, UtilityFailed)):  # the message is meant for the caller
            return WorkerFailure(str(error), isinstance(error, ConfigError))
        logger.error("a call of worker %d failed", self._rank, exc_info=error)
        return WorkerFailure(f"{type(error).__name__}: {error}")


def main() -> None:
    name, init_method, own_host, *numbers = sys.argv[1:]
    name_process(name)
    configure_logging("INFO" if is_first(name) else "WARNING", process=name)
    dump_stacks_on_signal()
    # Ctrl-C goes to the whole process group, but the core decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, world_size, parent, data_rank, local_rank, store_fd, *ends = map(int, numbers)
    die_with_parent(parent)
    describe_on_signal(f"argosy engine {name}", lambda: f"rank {rank} of {world_size}; its stacks are above")
    reader = BroadcastReader(ReaderEnds(*ends))
    threading.Thread(target=_exit_with_core, args=(reader.socket.fileno(),), daemon=True, name="core").start()
    stream = MessageStream(reader.socket)
    process = WorkerProcess(
        rank,
        world_size,
        reader,
        stream,
        init_method,
        data_rank,
        local_rank=None if local_rank < 0 else local_rank,
        own_host=own_host,
        store_fd=store_fd,
    )
    process.serve()


def _exit_with_core(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


class WorkerProcess:
    """Serves the core's calls in a worker's process.

    Args:
        rank, world_size, init_method, data_rank, local_rank: see `Worker`.
        reader: gives the core's messages.
        stream: takes the answers.
        own_host, store_fd: see `Rendezvous`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        reader: MessageReader,
        stream: MessageWriter,
        init_method: str,
        data_rank: int = 0,
        local_rank: int | None = None,
        own_host: str = "",
        store_fd: int = -1,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._init_method = init_method
        self._data_rank = data_rank
        self._local_rank = local_rank
        self._own_host = own_host
        self._store_fd = store_fd
        self._store: object = None
        self._reader = reader
        self._answers = AnswerQueue(rank, stream)

    def serve(self) -> NoReturn:
        """Answer calls until the core ends or a step fails, either of which ends the process."""
        try:
            args = msgspec.msgpack.decode(self._reader.get()[1:], type=EngineArgs)
            worker = self._start(args)
            self._serve(worker, is_answered=self._rank == args.parallel_config.output_rank)
        except Exception as error:
            self._answers.die(error)

    def _start(self, args: EngineArgs) -> Worker:
        with paused_collector():
            from argosy_engine.executor.uniproc_executor import worker_class

            make = worker_class(args.worker_cls)
        gc.freeze()  # what is imported stays: the collector need not look at it again and again
        if self._own_host:
            url = urlsplit(self._init_method)
            assert url.hostname is not None
            assert url.port is not None
            self._store = join_network(url.hostname, url.port, self._own_host, self._store_fd)
        worker = make(
            args,
            self._rank,
            self._world_size,
            self._init_method,
            data_rank=self._data_rank,
            local_rank=self._local_rank,
        )
        worker.on_load_step = self._answers.put_progress
        self._answers.put_result(worker.start())
        return worker

    def _serve(self, worker: Worker, *, is_answered: bool) -> NoReturn:
        """Launch steps and run calls, as they come.

        Args:
            is_answered: whether the core takes this worker's outputs.

        Raises:
            Exception: a step failed to launch.
        """
        steps = msgspec.msgpack.Decoder(SchedulerOutput)
        grammars = msgspec.msgpack.Decoder(GrammarBitmask | None)
        calls = msgspec.msgpack.Decoder(CollectiveRpc)
        rounds = msgspec.msgpack.Decoder(Round)
        awaiting: PendingStep | None = None
        while True:
            message = self._reader.get()
            kind, payload = message[:1], memoryview(message)[1:]
            if kind == CALL:
                self._call(worker, calls.decode(payload))
            elif kind == LEND:
                worker.lend_experts(rounds.decode(payload))
            elif kind == EXECUTE:
                step = steps.decode(payload)
                pending = worker.execute(step)
                if step.awaits_grammar:
                    awaiting = pending
                else:
                    self._answers.put_step(pending.wait, is_answered=is_answered)
            else:
                assert awaiting is not None
                awaiting.sample(grammars.decode(payload))
                self._answers.put_step(awaiting.wait, is_answered=is_answered)
                awaiting = None

    def _call(self, worker: Worker, call: CollectiveRpc) -> None:
        from argosy_engine.executor.uniproc_executor import public_method

        self._answers.join()  # the method finds no step in flight
        try:
            self._answers.put_result(public_method(worker, call.method)(*call.args, **call.kwargs))
        except Exception as error:
            self._answers.put_failure(error)


if __name__ == "__main__":
    main()
