"""LaunchEnvironment: what a launcher such as torchrun tells each process that it starts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.errors import ConfigError

_FLAG = "--distributed-executor-backend external_launcher"
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


class LaunchEnvironment(NamedTuple):
    """This process among all that the launcher has started."""

    rank: int
    world_size: int
    """Processes on all machines."""
    local_rank: int
    """Among the processes of this machine; on CUDA the index of this process's GPU."""
    local_world_size: int
    """Processes on this machine; those on all machines, if the launcher does not tell."""


def read_launch(config: ParallelConfig, environment: Mapping[str, str]) -> LaunchEnvironment:
    """Read the launcher's variables.

    Raises:
        ConfigError: one is missing or no number, or there are more or fewer processes than the config needs.
    """
    missing = [name for name in (*_NUMBERS, "MASTER_ADDR") if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{_FLAG} needs environment variables that are not set: {', '.join(missing)}; start the program "
            f"with `torchrun --nproc-per-node {config.num_workers}` or another launcher that sets them, or leave the "
            "flag out"
        )
    rank, world_size, local_rank, _ = (_number(environment, name) for name in _NUMBERS)
    if world_size != config.num_workers:
        raise ConfigError(
            f"{_FLAG}: the launcher has started {world_size} processes (WORLD_SIZE), and {config.num_workers} are "
            f"needed, which is --tensor-parallel-size {config.tensor} x --pipeline-parallel-size {config.pipeline} x "
            f"--data-parallel-size {config.data}; start {config.num_workers}, or change the sizes"
        )
    local_world_size = world_size
    if environment.get("LOCAL_WORLD_SIZE"):
        local_world_size = _number(environment, "LOCAL_WORLD_SIZE")
    if rank >= world_size or local_rank >= local_world_size or local_world_size > world_size:
        raise ConfigError(
            f"{_FLAG}: RANK {rank} of WORLD_SIZE {world_size} and LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE "
            f"{local_world_size} contradict each other; ranks count from 0"
        )
    return LaunchEnvironment(rank, world_size, local_rank, local_world_size)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ConfigError(f"{_FLAG}: the environment variable {name} is a number from 0, not {text!r:.32}")
    return int(text)
