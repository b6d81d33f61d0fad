"""Resources of a data-parallel rank: its share of the machine's GPUs, cores and memory. No torch.

Rank r of an engine with `world_size` workers per core gets the GPUs [r * world_size, (r + 1) * world_size) of those
that are visible. On a CPU all workers of all ranks share cores and memory equally.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.sizing.device import DeviceMemory, visible_gpus

MIN_CPU_WORKERS = 8
CPU_WORKERS_PER_CORE = 4
"""On a CPU an engine may have so many workers for each core that it may use, and at least `MIN_CPU_WORKERS`."""
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def rank_args(args: EngineArgs) -> EngineArgs:
    """Return the arguments of each rank: with its share of the cores, unless the number of threads is given."""
    if args.data_parallel_size == 1 or args.threads is not None:
        return args
    num_workers = args.parallel_config.num_workers
    return msgspec.structs.replace(args, threads=max(1, len(os.sched_getaffinity(0)) // num_workers))


def rank_environment(args: EngineArgs, rank: int) -> Mapping[str, str]:
    """Return the environment of a rank's processes, in which torch sees the rank's GPUs only.

    Raises:
        ConfigError: there are GPUs, but fewer than workers.
    """
    gpus = check_gpus(args)
    if not gpus:
        return os.environ
    own = gpus[rank * args.parallel_config.world_size : (rank + 1) * args.parallel_config.world_size]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def check_gpus(args: EngineArgs) -> list[str]:
    """Return the GPUs to divide between the workers of all ranks on this machine; empty on a CPU, for one worker, or if
    a Ray cluster places the workers.

    Raises:
        ConfigError: there are GPUs, but fewer than workers; or there is none, and far more workers than cores.
    """
    num_workers = args.parallel_config.local_workers
    if args.parallel_config.num_workers == 1 or (
        args.executor_backend == "ray" and os.environ.get("RAY_ADDRESS")
    ):
        return []
    gpus = [] if args.device == "cpu" else visible_gpus()
    here = f" on node {args.node_rank}" if args.nnodes > 1 else ""
    flags = [f"--{name.replace('_', '-')}" for name in _SIZES if getattr(args, name) > 1]
    most = max(MIN_CPU_WORKERS, CPU_WORKERS_PER_CORE * len(os.sched_getaffinity(0)))
    if not gpus and args.device != "cuda" and num_workers > most:
        raise ConfigError(
            f"the engine needs {num_workers} workers{here}, and this machine's CPU takes at most {most}; use a smaller "
            f"{' or '.join(flags)}"
        )
    if gpus and len(gpus) < num_workers:
        raise ConfigError(
            f"the engine needs {num_workers} GPUs{here}, one for each worker, and {len(gpus)} are visible; use a "
            f"smaller {' or '.join(flags)}, or --device cpu"
        )
    return gpus


def worker_memory(args: EngineArgs, memory: DeviceMemory) -> DeviceMemory:
    """Return the memory that a worker may plan with: on a CPU an equal share of what is available, else its GPU's."""
    num_workers = args.parallel_config.local_workers
    if memory.device != "cpu" or num_workers == 1:
        return memory
    return msgspec.structs.replace(memory, available_bytes=memory.available_bytes // num_workers)
