"""Factory of the executor that `--distributed-executor-backend` selects."""

from __future__ import annotations

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds
from argosy_engine.errors import ConfigError
from argosy_engine.executor.abstract import Executor
from argosy_engine.messages import OnLoadStep, ignore_step
from argosy_engine.osproc import paused_collector


def make_executor(
    args: EngineArgs, lockstep: LockstepEnds | None = None, on_load_step: OnLoadStep = ignore_step
) -> Executor:
    """Make the executor, without starting it. Imports torch if a worker runs in this process.

    Args:
        lockstep: of an engine core that shares experts with others.
        on_load_step: called while the model is loaded, in any thread.

    Raises:
        ConfigError: `--worker-cls` is not a worker, or the system or the environment does not support the backend, or
            lacks its package.
    """
    if args.node_rank:
        raise ConfigError(
            f"node {args.node_rank} has workers and no engine core: run `argosy serve --headless` on it, and this on "
            "node 0"
        )
    if args.nnodes > 1:
        from argosy_engine.executor.multinode_executor import MultiNodeExecutor

        return MultiNodeExecutor(args, on_load_step)
    if args.executor_backend == "mp":
        from argosy_engine.executor.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(args, args.parallel_config.world_size, lockstep, on_load_step=on_load_step)
    if args.executor_backend == "external_launcher":
        with paused_collector():
            from argosy_engine.executor.external_launcher_executor import ExternalLauncherExecutor

        return ExternalLauncherExecutor(args)
    if args.executor_backend == "ray":
        return _ray_executor(args, on_load_step)
    with paused_collector():
        from argosy_engine.executor.uniproc_executor import UniprocExecutor

    return UniprocExecutor(args, lockstep, on_load_step)


def _ray_executor(args: EngineArgs, on_load_step: OnLoadStep) -> Executor:
    try:
        from argosy_engine.executor.ray_executor import RayExecutor
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("argosy"):
            raise
        raise ConfigError(
            f"--distributed-executor-backend ray needs the package {missing!r}: `pip install '.[ray]'` in the checkout"
        ) from None
    return RayExecutor(args, on_load_step)
