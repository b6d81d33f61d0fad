"""Which executor `--distributed-executor-backend` means."""

from __future__ import annotations

from argosy_engine.config import EngineArgs
from argosy_engine.executor.base import Executor


def make_executor(args: EngineArgs) -> Executor:
    """
    Raises:
        ConfigError: `--worker-cls` is not a worker, or the system lacks what the backend needs.
    """
    if args.distributed_executor_backend == "mp":
        from argosy_engine.executor.multiproc import MultiprocExecutor

        return MultiprocExecutor(args)
    from argosy_engine.executor.uniproc import UniprocExecutor

    return UniprocExecutor(args)
