"""An executor whose workers are threads of this process, which exchange tensors directly (`thread_ranks`).

The workers are the real ones, with a model. For what they compute together; processes and their connections are tried
with one model of each layout, and without a model (`bare_worker`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.distributed.parallel_state import Communicator, LocalCommunicator, ParallelState
from argosy_engine.errors import UtilityFailed
from argosy_engine.executor.abstract import check_same_model
from argosy_engine.executor.uniproc_executor import public_method, worker_class
from argosy_engine.messages import (
    CollectiveRpc,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
)
from thread_ranks import ThreadCommunicator, ThreadGroup


class ThreadGroups:
    """`LaunchedGroups` of one rank."""

    def __init__(self, config: ParallelConfig, rank: int, groups: dict[tuple[int, ...], ThreadGroup]) -> None:
        self.launch = SimpleNamespace(local_rank=rank, local_world_size=config.world_size)
        self._config = config
        self._rank = rank
        self._groups = groups

    def parallel_state(self, device: torch.device) -> ParallelState:
        config = self._config
        return ParallelState(
            config,
            self._rank,
            tensor=self._join(config.tensor_groups()),
            pipeline=self._join(config.pipeline_groups()),
            world=self._join([list(range(config.world_size))]),
            device=device,
            leave=lambda: None,
        )

    def _join(self, groups: list[list[int]]) -> Communicator:
        (ranks,) = [tuple(ranks) for ranks in groups if self._rank in ranks]
        if len(ranks) == 1:
            return LocalCommunicator()
        return ThreadCommunicator(self._groups[ranks], ranks.index(self._rank))


class ThreadExecutor:
    """Executor with one thread per worker."""

    def __init__(self, args: EngineArgs) -> None:
        config = args.parallel_config
        self._turn = threading.Lock()
        groups = {
            tuple(ranks): ThreadGroup(len(ranks), self._turn)
            for ranks in (*config.tensor_groups(), *config.pipeline_groups(), range(config.world_size))
        }
        self.workers: list[Any] = [
            worker_class(args.worker_cls)(
                args,
                rank,
                config.world_size,
                launched=ThreadGroups(config, rank, groups),  # type: ignore[arg-type]
            )
            for rank in range(config.world_size)
        ]
        self._threads = [ThreadPoolExecutor(1) for _ in self.workers]
        self._output_rank = config.output_rank
        self._encode = msgspec.msgpack.Encoder().encode

    def start(self) -> WorkerInfo:
        infos: list[WorkerInfo] = self._results(lambda worker: worker.start())
        check_same_model(infos)
        return infos[0]

    def execute(self, step: SchedulerOutput) -> PendingThreads:
        message = self._encode(step)  # every worker has its own copy
        decode = msgspec.msgpack.Decoder(SchedulerOutput).decode
        return PendingThreads(self, self.call(lambda worker: worker.execute(decode(message))))

    def call(self, function: Callable[[Any], Any]) -> list[Future[Any]]:
        """Call a function of every worker in its thread."""

        def run(worker: Any) -> Any:
            with self._turn:
                return function(worker)

        return [
            thread.submit(run, worker) for thread, worker in zip(self._threads, self.workers, strict=True)
        ]

    def collective_rpc(self, call: CollectiveRpc) -> list[Any]:
        try:
            return self._results(lambda worker: public_method(worker, call.method)(*call.args, **call.kwargs))
        except Exception as error:
            raise UtilityFailed(f"{call.method} failed: {error}") from error

    def check_health(self) -> None: ...

    def shutdown(self) -> None:
        self._results(lambda worker: worker.shutdown())
        for thread in self._threads:
            thread.shutdown()

    def output(self, outputs: list[ModelRunnerOutput]) -> ModelRunnerOutput:
        return outputs[self._output_rank]

    def _results(self, function: Callable[[Any], Any]) -> list[Any]:
        return [future.result() for future in self.call(function)]


class PendingThreads:
    """`PendingOutput` of a step of all workers."""

    def __init__(self, executor: ThreadExecutor, steps: list[Future[Any]]) -> None:
        self._executor = executor
        self._steps = steps

    def sample(self, grammar: GrammarBitmask | None) -> None:
        steps = dict(zip(self._executor.workers, self._steps, strict=True))
        self._executor.call(lambda worker: steps[worker].result().sample(grammar))

    def get(self) -> ModelRunnerOutput:
        return self._executor.output([step.result().wait() for step in self._steps])


@contextmanager
def thread_workers() -> Iterator[None]:
    """Let the engines that are made until the block ends, with their core in this process, have thread workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("argosy_engine.executor.factory.make_executor", ThreadExecutor)
        yield
