"""MultiprocExecutor: runs every worker in its own process and sends all of them the same calls.

A call is broadcast once to all ranks; answers come back per rank, in the order of the calls. The end of a worker is
detected on its socket, whichever worker the core waits for, and its last message says why it ended; workers end with
the core. They find each other by a memory file. Design: vLLM's `MultiprocExecutor`.

Calls and the order of answers are in `RemoteExecutor`, which the executor of Ray's actors shares; the processes of one
machine are `LocalWorkers`, which those of other machines are as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds, Round, rendezvous_url
from argosy_engine.distributed.parallel_config import ParallelConfig, worker_name
from argosy_engine.errors import EngineDead, EngineError, UtilityFailed
from argosy_engine.executor.abstract import check_same_model
from argosy_engine.executor.broadcast import BroadcastWriter, MessageStream
from argosy_engine.executor.worker_protocol import (
    CALL,
    DIED,
    EXECUTE,
    FAILED,
    INIT,
    LEND,
    PROGRESS,
    SAMPLE,
    Rendezvous,
    WorkerEnd,
    WorkerFailure,
    death_of,
)
from argosy_engine.messages import (
    CollectiveRpc,
    GrammarBitmask,
    LoadStep,
    ModelRunnerOutput,
    OnLoadStep,
    SchedulerOutput,
    WorkerInfo,
    ignore_step,
)
from argosy_engine.osproc import EXIT_TIMEOUT_S, describe_exit, end_child, parent_argument


class PendingAnswer:
    """`PendingOutput` of a step that was sent to the workers."""

    def __init__(self, executor: RemoteExecutor) -> None:
        self._executor = executor
        self.output: ModelRunnerOutput | None = None

    def sample(self, grammar: GrammarBitmask | None) -> None:
        self._executor.sample(grammar)

    def get(self) -> ModelRunnerOutput:
        while self.output is None:
            self._executor.receive()
        return self.output


class RemoteExecutor(ABC):
    """Executor of workers in other processes: calls to all ranks (`worker_protocol`), and answers in their order.

    A subclass starts the workers, carries messages to and from them, and says why one has ended.

    Args:
        args: arguments of the engine.
        world_size: number of workers.
        on_load_step: see `make_executor`.
    """

    def __init__(self, args: EngineArgs, world_size: int, on_load_step: OnLoadStep = ignore_step) -> None:
        self._args = args
        self._world_size = world_size
        self._on_load_step = on_load_step
        self._load_steps = msgspec.msgpack.Decoder(LoadStep)
        self._output_rank = args.parallel_config.output_rank
        self._encode = msgspec.msgpack.Encoder().encode
        self._outputs = msgspec.msgpack.Decoder(ModelRunnerOutput)
        self._pending: deque[PendingAnswer] = deque()
        """Steps that are not answered yet, oldest first."""
        self._num_late = [0] * world_size
        """Per rank, the number of answers to discard, because their call has timed out."""

    @abstractmethod
    def start(self) -> WorkerInfo: ...

    @abstractmethod
    def check_health(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @abstractmethod
    def _send(self, message: bytes) -> None:
        """Send a message to every worker.

        Raises:
            EngineDead: a worker has ended.
        """

    @abstractmethod
    def _answer(self, rank: int, deadline: float | None = None) -> memoryview | WorkerFailure:
        """Wait for a worker's next answer, discarding those to calls that have timed out.

        Args:
            deadline: by `time.monotonic()`.

        Raises:
            ConfigError: a worker cannot start.
            EngineDead: this or another worker ended first.
            TimeoutError: the deadline has passed.
        """

    def execute(self, step: SchedulerOutput) -> PendingAnswer:
        self._send(EXECUTE + self._encode(step))
        pending = PendingAnswer(self)
        self._pending.append(pending)
        return pending

    def sample(self, grammar: GrammarBitmask | None) -> None:
        self._send(SAMPLE + self._encode(grammar))

    def lend_experts(self, step: Round) -> None:
        self._send(LEND + self._encode(step))

    def receive(self) -> None:
        """Wait for the answer to the oldest step.

        Raises:
            EngineDead: see `Executor.execute`.
        """
        self._pending.popleft().output = self._outputs.decode(_payload(self._answer(self._output_rank)))

    def collective_rpc(self, call: CollectiveRpc) -> list[Any]:
        while self._pending:  # answers come in the order of the calls
            self.receive()
        method, timeout = call.method, call.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        self._send(CALL + self._encode(call))
        answers: list[memoryview | WorkerFailure] = []
        try:
            for rank in range(self._world_size):
                answers.append(self._answer(rank, deadline))  # noqa: PERF401 (keeps those before a timeout)
        except TimeoutError:
            late = len(answers)
            for rank in range(late, self._world_size):
                self._num_late[rank] += 1
            raise UtilityFailed(f"{method}: worker {late} has not answered within {timeout:g} s") from None
        for rank, answer in enumerate(answers):
            if isinstance(answer, WorkerFailure):
                raise UtilityFailed(f"{method} failed in worker {rank}: {answer.message}")
        return [msgspec.msgpack.decode(_payload(answer)) for answer in answers]

    def _is_progress(self, message: bytes) -> bool:
        """Return whether a worker's message is no answer, but tells how far its load is, which is noted."""
        if message[:1] != PROGRESS:
            return False
        self._on_load_step(self._load_steps.decode(memoryview(message)[1:]))
        return True

    def _worker_info(self) -> WorkerInfo:
        """Wait until all workers have loaded the model.

        Raises:
            ConfigError: a worker cannot start, or one has loaded another model than worker 0.
            EngineDead: a worker ended.
        """
        answers = [self._answer(rank) for rank in range(self._world_size)]
        infos = [msgspec.msgpack.decode(_payload(answer), type=WorkerInfo) for answer in answers]
        check_same_model(infos)
        # A block id is used on every rank, so the rank with the least memory determines the number of blocks.
        tightest = min(infos, key=lambda info: info.memory.num_blocks)
        return msgspec.structs.replace(infos[0], memory=tightest.memory)


def _payload(answer: memoryview | WorkerFailure) -> memoryview:
    assert isinstance(answer, memoryview)
    return answer


class LocalWorkers:
    """Processes of some workers of an engine core.

    Workers are fresh interpreters, because a process with threads must not fork, and nothing is pickled. A message is
    broadcast once to all of them; each answers over a socket of its own, whose end is the worker's.

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
