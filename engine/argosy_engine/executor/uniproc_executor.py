"""UniprocExecutor: runs one worker in the core's own process, by direct calls. Suitable for one device.

It loads the class that `--worker-cls` names (`worker_class`), some of whose methods may be called remotely
(`public_method`), as other executors do.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds, Round, rendezvous_url
from argosy_engine.errors import ConfigError, UtilityFailed
from argosy_engine.executor.abstract import PendingOutput
from argosy_engine.messages import (
    CollectiveRpc,
    OnLoadStep,
    SchedulerOutput,
    WorkerInfo,
    ignore_step,
)
from argosy_engine.worker.worker import Worker


def worker_class(path: str) -> type[Worker]:
    """Return `Worker` for `auto`, or import the subclass of `Worker` at `package.module.Class`.

    The path comes from whoever starts the engine, never from a client.

    Raises:
        ConfigError: the class cannot be imported, or is not a subclass of `Worker`.
    """
    if path == "auto":
        return Worker
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--worker-cls {path}: {error}; give package.module.Class") from None
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError(f"--worker-cls {path} is not a subclass of argosy_engine.worker.worker.Worker")
    return found


def public_method(worker: Worker, name: str) -> Callable[..., Any]:
    """Return a bound method of the worker.

    Raises:
        UtilityFailed: the method does not exist or is not public.
    """
    method = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(method):
        raise UtilityFailed(f"workers have no method {name[:64]!r}")
    return method


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
