"""RemoteExecutor: what executors of workers in other processes share: calls to all ranks, and answers in their order.

A subclass starts the workers, carries messages to and from them, and says why one has ended.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import Round
from argosy_engine.errors import UtilityFailed
from argosy_engine.executor.same_model import check_same_model
from argosy_engine.executor.worker_messages import CALL, EXECUTE, LEND, PROGRESS, SAMPLE, WorkerFailure
from argosy_engine.messages.collective_rpc import CollectiveRpc
from argosy_engine.messages.load_step import LoadStep, OnLoadStep, ignore_step
from argosy_engine.messages.model_runner_output import ModelRunnerOutput
from argosy_engine.messages.scheduler_output import GrammarBitmask, SchedulerOutput
from argosy_engine.messages.worker_info import WorkerInfo


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
    """Executor that exchanges `worker_messages` with its workers.

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
