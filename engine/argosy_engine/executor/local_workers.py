"""LocalWorkers: the worker processes of one machine, and the ways to and from them.

Workers are fresh interpreters, because a process with threads must not fork, and nothing is pickled. A message is
broadcast once to all of them; each answers over a socket of its own, whose end is the worker's.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.distributed.process_name import worker_name
from argosy_engine.executor.broadcast import BroadcastWriter
from argosy_engine.executor.rendezvous import Rendezvous
from argosy_engine.osproc.child_process import EXIT_TIMEOUT_S, describe_exit, end_child, parent_argument


class LocalWorkers:
    """Processes of some workers of an engine core.

    Args:
        config: parallel sizes, for the workers' names.
        ranks: the workers of this machine.
        world_size: number of workers of the engine core.
    """

    def __init__(self, config: ParallelConfig, ranks: range, world_size: int) -> None:
        self._config = config
        self._ranks = ranks
        self._world_size = world_size
        self._queue = BroadcastWriter(len(ranks))
        self.sockets = self._queue.sockets
        """The workers' answers, by rank; the first is that of the first rank on this machine."""
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, rendezvous: Rendezvous, data_rank: int = 0) -> None:
        """Start the processes. The first message must be `INIT`."""
        safe_path = ["-P"] if sys.flags.safe_path else []
        for index, ends in enumerate(self._queue.ends):
            rank = self._ranks[index]
            local_rank = index if len(self._ranks) < self._world_size else -1
            store = rendezvous.store if rank == 0 else -1
            module = ["-m", "argosy_engine.executor.worker_process"]
            texts = (worker_name(self._config, rank), rendezvous.init_method, rendezvous.own_host)
            numbers = (rank, self._world_size, parent_argument(), data_rank, local_rank, store)
            ring = (*ends.fds, ends.num_chunks, ends.chunk_bytes)
            self._processes.append(
                subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                    [sys.executable, *safe_path, *module, *texts, *map(str, (*numbers, *ring))],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(*rendezvous.inherited, *([] if store < 0 else [store]), *ends.fds),
                )
            )
        self._queue.close_reader_ends()

    def put(self, message: bytes) -> None:
        """Send a message to every worker.

        Raises:
            EngineDead: a worker has ended.
        """
        self._queue.put(message)

    def pid(self, rank: int) -> int:
        return self._processes[rank - self._ranks.start].pid

    def describe_exit(self, rank: int) -> str:
        """Wait for the exit of a worker whose socket is closed, and describe it."""
        process = self._processes[rank - self._ranks.start]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_TIMEOUT_S)
        return describe_exit(process.poll())

    def shutdown(self) -> None:
        """End the workers. May be called twice."""
        self._queue.close()  # they exit when their sockets close
        for rank, process in zip(self._ranks, self._processes, strict=False):
            end_child(process, worker_name(self._config, rank))
        self._processes = []
