"""Divisions of a model among workers and machines: which the engine supports, told in terms of its flags."""

from __future__ import annotations

from typing import Protocol

from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.errors import ConfigError

REQUEST_STALL_TIMEOUT = 300.0
"""Seconds; longer than any step or grammar compilation takes, so only requests that are stuck reach it."""


class ParallelFlags(Protocol):
    """The flags that have a say in it; `EngineArgs` has them."""

    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def async_scheduling(self) -> bool | None: ...
    @property
    def enable_dbo(self) -> bool: ...
    @property
    def distributed_executor_backend(self) -> str | None: ...
    @property
    def executor_backend(self) -> str: ...
    @property
    def parallel_config(self) -> ParallelConfig: ...
    @property
    def request_stall_timeout(self) -> float: ...


def check_parallel_flags(args: ParallelFlags) -> None:
    """Reject layouts that are not supported.

    Raises:
        ConfigError: a parallel size is not, or not by this executor.
    """
    if args.async_scheduling and args.pipeline_parallel_size > 1:
        raise ConfigError(
            "--async-scheduling needs --pipeline-parallel-size 1: the steps of a pipeline overlap without it"
        )
    if args.enable_dbo:
        raise ConfigError(
            "--enable-dbo is not supported: it hides the transfers of tokens between machines, and cores that "
            "share experts are on one machine, where its two half batches would read the experts twice; leave it "
            "out"
        )
    world_size = args.parallel_config.world_size
    if args.distributed_executor_backend == "uni" and world_size > 1:
        raise ConfigError(
            f"--distributed-executor-backend uni runs one worker, and {world_size} are needed; use mp"
        )
    if args.executor_backend == "external_launcher" and args.request_stall_timeout not in (
        0.0,
        REQUEST_STALL_TIMEOUT,
    ):
        raise ConfigError(
            "--request-stall-timeout cannot be used with --distributed-executor-backend external_launcher: the "
            "copies of the program have no common time, so no request is failed for its age; leave it out"
        )
    if args.parallel_config.shares_experts and args.executor_backend not in ("uni", "mp"):
        raise ConfigError(
            f"--enable-expert-parallel with --data-parallel-size {args.data_parallel_size} needs "
            f"--distributed-executor-backend mp, not {args.executor_backend}: cores that share experts agree on "
            "their steps on one machine"
        )
    _check_nodes(args)


def _check_nodes(args: ParallelFlags) -> None:
    """Reject a division among machines that is not supported.

    Raises:
        ConfigError: the workers cannot be divided, this machine is none of them, or another flag forbids it.
    """
    if args.node_rank >= args.nnodes:
        raise ConfigError(
            f"--node-rank {args.node_rank} needs --nnodes {args.node_rank + 1} or more: ranks begin with 0"
        )
    if args.nnodes == 1:
        return
    world_size = args.parallel_config.world_size
    if world_size % args.nnodes:
        raise ConfigError(
            f"--nnodes {args.nnodes} must divide the number of workers equally, and --tensor-parallel-size times "
            f"--pipeline-parallel-size is {world_size}"
        )
    if args.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {args.nnodes} needs --data-parallel-size 1: an engine's cores are processes of one "
            "machine; run one service per machine behind the router"
        )
    if args.executor_backend != "mp":
        raise ConfigError(
            f"--nnodes {args.nnodes} needs --distributed-executor-backend mp, not {args.executor_backend}: Ray "
            "and torchrun know the machines themselves"
        )
