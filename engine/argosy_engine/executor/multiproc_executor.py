"""MultiprocExecutor: runs every worker in its own process and sends all of them the same calls.

A call is broadcast once to all ranks; answers come back per rank, in the order of the calls. The end of a worker is
detected on its socket, whichever worker the core waits for, and its last message says why it ended; workers end with
the core. They find each other by a memory file. Design: vLLM's `MultiprocExecutor`.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds, rendezvous_url
from argosy_engine.distributed.process_name import worker_name
from argosy_engine.errors import EngineDead, EngineError
from argosy_engine.executor.broadcast import MessageStream
from argosy_engine.executor.local_workers import LocalWorkers
from argosy_engine.executor.remote_executor import RemoteExecutor
from argosy_engine.executor.rendezvous import Rendezvous
from argosy_engine.executor.worker_death import WorkerEnd, death_of
from argosy_engine.executor.worker_messages import DIED, FAILED, INIT, WorkerFailure
from argosy_engine.messages.load_step import OnLoadStep, ignore_step
from argosy_engine.messages.worker_info import WorkerInfo

ROOT_CAUSE_S = 0.25
"""How long to wait for the ends of other workers when one has failed: a worker whose peer has died fails with an error
of its own, which is not the reason."""


class MultiprocExecutor(RemoteExecutor):
    """Executor with one process per worker.

    Args:
        args: arguments of the engine.
        world_size: number of workers.
        lockstep: of an engine core that shares experts with others.
        elsewhere: sockets with the answers of the last ranks, whose processes are not this executor's.
        on_load_step: see `make_executor`.
    """

    def __init__(
        self,
        args: EngineArgs,
        world_size: int = 1,
        lockstep: LockstepEnds | None = None,
        elsewhere: Sequence[socket.socket] = (),
        on_load_step: OnLoadStep = ignore_step,
    ) -> None:
        super().__init__(args, world_size, on_load_step)
        self._lockstep = lockstep
        local = range(world_size - len(elsewhere))
        self._workers = LocalWorkers(args.parallel_config, local, world_size)
        self._sockets = [*self._workers.sockets, *elsewhere]
        self._answers = [MessageStream(stream) for stream in self._sockets]
        self._ranks = {stream.fileno(): rank for rank, stream in enumerate(self._sockets)}
        self._pollers = [self._poller(rank) for rank in range(world_size)]
        self._ends = self._poller()
        self._loaded: list[bytes | None] = [None] * world_size
        """Answers to `INIT` that were received, but not taken yet."""
        self._death: EngineError | None = None

    def start(self) -> WorkerInfo:
        if self._lockstep is None:
            file, data_rank = os.memfd_create("argosy-rendezvous", os.MFD_CLOEXEC), 0
        else:
            file, data_rank = os.dup(self._lockstep.rendezvous), self._lockstep.rank
        self._workers.start(Rendezvous(rendezvous_url(file), inherited=(file,)), data_rank)
        os.close(file)
        self._send(INIT + self._encode(self._args))
        return self._worker_info()

    def shutdown(self) -> None:
        """End the workers. May be called twice."""
        self._workers.shutdown()

    def check_health(self) -> None:
        if self._ends.poll(0):
            raise self._dead()

    def _send(self, message: bytes) -> None:
        try:
            self._workers.put(message)
        except EngineDead:
            raise self._dead() from None

    def _worker_info(self) -> WorkerInfo:
        self._wait_for_loads()
        return super()._worker_info()

    def _wait_for_loads(self) -> None:
        """Receive the answer to `INIT` of every worker, and meanwhile the progress of all.

        They may wait for each other.

        Raises:
            ConfigError, EngineDead: as `_answer`.
        """
        poller = select.poll()
        for stream in self._sockets:
            poller.register(stream, select.POLLIN | select.POLLRDHUP)
        while None in self._loaded:
            for fd, event in poller.poll():
                if not event & select.POLLIN:
                    raise self._dead()
                rank = self._ranks[fd]
                message = self._answers[rank].receive()
                if message is None or message[:1] == DIED:
                    raise self._dead({rank: message})
                if not self._is_progress(message):
                    self._loaded[rank] = message
                    poller.modify(fd, select.POLLRDHUP)

    def _answer(self, rank: int, deadline: float | None = None) -> memoryview | WorkerFailure:
        message, self._loaded[rank] = self._loaded[rank], None
        while message is None:
            timeout_ms = None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000
            events = self._pollers[rank].poll(timeout_ms)
            if not events:
                raise TimeoutError
            if any(not event & select.POLLIN for _, event in events):
                raise self._dead()
            received = self._answers[rank].receive()
            if received is None or received[:1] == DIED:
                raise self._dead({rank: received})
            if self._is_progress(received):
                continue
            if self._num_late[rank]:
                self._num_late[rank] -= 1
                continue
            message = received
        if message[:1] == FAILED:
            return msgspec.msgpack.decode(message[1:], type=WorkerFailure)
        return memoryview(message)[1:]

    def _poller(self, awaited: int | None = None) -> select.poll:
        """Make a poller that reports an answer of the awaited worker, or the end of any worker."""
        poller = select.poll()
        for rank, stream in enumerate(self._sockets):
            poller.register(stream, select.POLLRDHUP | (select.POLLIN if rank == awaited else 0))
        return poller

    def _dead(self, received: Mapping[int, bytes | None] | None = None) -> EngineError:
        """Return the error that says why workers have ended: that some were killed, else why they failed.

        Args:
            received: rank -> last message, of a worker whose last message has been received.
        """
        if self._death is None:
            last = self._last_messages(dict(received or {}))
            self._death = death_of([self._end(rank, message) for rank, message in sorted(last.items())])
        return self._death

    def _end(self, rank: int, message: bytes | None) -> WorkerEnd:
        who = self._who(rank)
        if message is None or message[:1] != DIED:
            return WorkerEnd(who, self._describe_exit(rank), None)
        return WorkerEnd(who, "", msgspec.msgpack.decode(message[1:], type=WorkerFailure))

    def _last_messages(self, last: dict[int, bytes | None]) -> dict[int, bytes | None]:
        """Return the last messages of the workers that have ended, by rank, adding to those that are known.

        Once one was killed, no more is awaited.
        """
        deadline = time.monotonic() + ROOT_CAUSE_S
        poller = self._poller()
        for rank in last:
            poller.unregister(self._sockets[rank])
        while len(last) < self._world_size:
            has_failed = all(message is not None and message[:1] == DIED for message in last.values())
            events = poller.poll(max(deadline - time.monotonic(), 0.0) * 1000 if has_failed else 0)
            if not events:
                break
            for fd, _ in events:
                poller.unregister(fd)
                rank = self._ranks[fd]
                last[rank] = None
                while (message := self._answers[rank].receive()) is not None:
                    last[rank] = message
        return last

    def _who(self, rank: int) -> str:
        return f"{worker_name(self._args.parallel_config, rank)} (process {self._workers.pid(rank)})"

    def _describe_exit(self, rank: int) -> str:
        return self._workers.describe_exit(rank)
