"""WorkerProcess: a worker's own process, `python -m argosy_engine.executor.worker_process NAME URL ...`

Arguments: name, how the workers find each other (`Rendezvous.init_method`, `own_host`), rank, world size, the parent's
process id, data-parallel rank, index among the workers of this machine or -1, and descriptors: that of
`Rendezvous.store`, then the broadcast queue's.

It reads calls from the broadcast queue and answers over its socket. Steps overlap: this thread launches the next one
while another waits for the tokens of the last (`AnswerQueue`). It ends with the core: a thread waits until the other
end of the socket closes, and the kernel kills the process if that thread cannot run (`osproc.child_process`). A message
is one byte for its kind, then msgpack.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import Round
from argosy_engine.distributed.process_name import is_first, name_process
from argosy_engine.executor.answer_queue import AnswerQueue
from argosy_engine.executor.broadcast import BroadcastReader, MessageStream, ReaderEnds
from argosy_engine.executor.rendezvous import join_network
from argosy_engine.executor.worker_messages import CALL, EXECUTE, LEND, MessageReader, MessageWriter
from argosy_engine.messages.collective_rpc import CollectiveRpc
from argosy_engine.messages.scheduler_output import GrammarBitmask, SchedulerOutput
from argosy_engine.osproc.child_process import die_with_parent
from argosy_engine.osproc.collector import paused_collector
from argosy_engine.osproc.debug_signal import describe_on_signal, dump_stacks_on_signal
from argosy_protocol.program.log_format import configure_logging

if TYPE_CHECKING:
    from argosy_engine.worker.pending_step import PendingStep
    from argosy_engine.worker.worker import Worker


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
            from argosy_engine.executor.worker_class import worker_class

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
        from argosy_engine.executor.worker_class import public_method

        self._answers.join()  # the method finds no step in flight
        try:
            self._answers.put_result(public_method(worker, call.method)(*call.args, **call.kwargs))
        except Exception as error:
            self._answers.put_failure(error)


if __name__ == "__main__":
    main()
