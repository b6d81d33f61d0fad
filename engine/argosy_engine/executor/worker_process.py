"""WorkerProcess: a worker's own process, `python -m argosy_engine.executor.worker_process RANK WORLD_SIZE PARENT FD...`

It reads calls from the broadcast queue and answers over its socket. It ends with the core: a thread waits until the
other end of the socket closes, and the kernel kills the process if that thread cannot run (`osproc.child_process`). A
message is one byte for its kind, then msgpack.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError, UtilityFailed
from argosy_engine.executor.broadcast import BroadcastReader, MessageStream, ReaderEnds
from argosy_engine.executor.worker_messages import CALL, DONE, EXECUTE, FAILED, WorkerFailure
from argosy_engine.messages.collective_rpc import CollectiveRpc
from argosy_engine.messages.scheduler_output import GrammarBitmask, SchedulerOutput
from argosy_engine.osproc.child_process import die_with_parent
from argosy_engine.osproc.debug_signal import describe_on_signal, dump_stacks_on_signal
from argosy_protocol.program.log_format import configure_logging

if TYPE_CHECKING:
    from argosy_engine.worker.pending_step import PendingStep

logger = logging.getLogger("argosy.worker")


def main() -> None:
    configure_logging("INFO")
    dump_stacks_on_signal()
    # Ctrl-C goes to the whole process group, but the core decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank, world_size, parent, *ends = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent)
    describe_on_signal("argosy engine worker", lambda: f"rank {rank} of {world_size}; its stacks are above")
    reader = BroadcastReader(ReaderEnds(*ends))
    threading.Thread(target=_exit_with_core, args=(reader.socket.fileno(),), daemon=True, name="core").start()
    WorkerProcess(rank, world_size, reader).serve()


def _exit_with_core(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


class WorkerProcess:
    """Serves the core's calls in a worker's process."""

    def __init__(self, rank: int, world_size: int, reader: BroadcastReader) -> None:
        self._rank = rank
        self._world_size = world_size
        self._reader = reader
        self._answers = MessageStream(reader.socket)
        self._encode = msgspec.msgpack.Encoder().encode

    def serve(self) -> None:
        """Answer calls until the core ends. Returns only if the worker could not start."""
        args = msgspec.msgpack.decode(self._reader.get()[1:], type=EngineArgs)
        try:
            from argosy_engine.executor.worker_class import public_method, worker_class

            worker = worker_class(args.worker_cls)(args, self._rank, self._world_size)
            self._done(worker.start())
        except Exception as error:
            self._fail("start", error)
            return
        steps = msgspec.msgpack.Decoder(SchedulerOutput)
        grammars = msgspec.msgpack.Decoder(GrammarBitmask | None)
        calls = msgspec.msgpack.Decoder(CollectiveRpc)
        awaiting: PendingStep | None = None
        while True:
            message = self._reader.get()
            kind, payload = message[:1], memoryview(message)[1:]
            try:
                if kind == CALL:
                    call = calls.decode(payload)
                    self._done(public_method(worker, call.method)(*call.args, **call.kwargs))
                    continue
                if kind == EXECUTE:
                    step = steps.decode(payload)
                    pending = worker.execute(step)
                    if step.awaits_grammar:
                        awaiting = pending
                        continue
                else:
                    assert awaiting is not None
                    pending, awaiting = awaiting, None
                    pending.sample(grammars.decode(payload))
                output = pending.get()
                if self._rank == 0:
                    self._done(output)
            except Exception as error:
                self._fail("call", error)
                if kind != CALL and self._rank != 0:
                    os._exit(1)  # the core does not wait for this rank's answer, but notices its end

    def _done(self, result: Any) -> None:
        self._answers.send(DONE + self._encode(result))

    def _fail(self, activity: str, error: Exception) -> None:
        if isinstance(error, (ConfigError, UtilityFailed)):  # the message is meant for the caller
            failure = WorkerFailure(str(error), isinstance(error, ConfigError))
        else:
            logger.exception("worker %d failed (%s)", self._rank, activity)
            failure = WorkerFailure(f"{type(error).__name__}: {error}")
        self._answers.send(FAILED + self._encode(failure))


if __name__ == "__main__":
    main()
