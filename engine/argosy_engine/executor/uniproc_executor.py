"""UniprocExecutor: runs one worker in the core's own process, by direct calls. Suitable for one device."""

from __future__ import annotations

from typing import Any

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds, Round, rendezvous_url
from argosy_engine.errors import UtilityFailed
from argosy_engine.executor.abstract import PendingOutput
from argosy_engine.executor.worker_class import public_method, worker_class
from argosy_engine.messages.collective_rpc import CollectiveRpc
from argosy_engine.messages.load_step import OnLoadStep, ignore_step
from argosy_engine.messages.scheduler_output import SchedulerOutput
from argosy_engine.messages.worker_info import WorkerInfo


class UniprocExecutor:
    """Executor of one worker in the core's own process.

    Args:
        lockstep: of an engine core that shares experts with others.
        on_load_step: see `make_executor`.
    """

    def __init__(
        self,
        args: EngineArgs,
        lockstep: LockstepEnds | None = None,
        on_load_step: OnLoadStep = ignore_step,
    ) -> None:
        make = worker_class(args.worker_cls)
        if lockstep is None:
            self._worker = make(args)
        else:
            init_method = rendezvous_url(lockstep.rendezvous)
            self._worker = make(args, init_method=init_method, data_rank=lockstep.rank)
        self._worker.on_load_step = on_load_step

    def start(self) -> WorkerInfo:
        return self._worker.start()

    def execute(self, step: SchedulerOutput) -> PendingOutput:
        return self._worker.execute(step)

    def lend_experts(self, step: Round) -> None:
        self._worker.lend_experts(step)

    def collective_rpc(self, call: CollectiveRpc) -> list[Any]:
        function = public_method(self._worker, call.method)
        try:
            return [function(*call.args, **call.kwargs)]
        except Exception as error:
            raise UtilityFailed(f"{call.method} failed: {type(error).__name__}: {error}") from error

    def check_health(self) -> None: ...

    def shutdown(self) -> None:
        self._worker.shutdown()
