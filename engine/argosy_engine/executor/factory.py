"""Factory of the executor that `--distributed-executor-backend` selects."""

from __future__ import annotations

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds
from argosy_engine.executor.abstract import Executor


def make_executor(args: EngineArgs, lockstep: LockstepEnds | None = None) -> Executor:
    """Make the executor, without starting it.

    Args:
        lockstep: of an engine core that shares experts with others.

    Raises:
        ConfigError: `--worker-cls` is not a worker, or the system or the environment does not support the backend.
    """
    if args.executor_backend == "mp":
        from argosy_engine.executor.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(args, args.parallel_config.world_size, lockstep)
    if args.executor_backend == "external_launcher":
        from argosy_engine.executor.external_launcher_executor import ExternalLauncherExecutor

        return ExternalLauncherExecutor(args)
    from argosy_engine.executor.uniproc_executor import UniprocExecutor

    return UniprocExecutor(args, lockstep)
