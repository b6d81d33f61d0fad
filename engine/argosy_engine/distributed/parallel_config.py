"""ParallelConfig: into how many parts a model is divided, and which part a rank has. No torch.

The ranks of an engine core are numbered as vLLM numbers them: those of one tensor-parallel group are contiguous, so
that they are neighbours on a machine; pipeline stages follow each other.

Processes have vLLM's names in logs, messages and lists of processes. `EngineCore` and `Worker` are followed by their
place in each dimension that has several: `EngineCore_DP1`, `Worker_TP0`, `Worker_DP1_PP0_TP1`. The API server has no
name; if it has several processes, those that the first one starts are `ApiServer_1`, `ApiServer_2` and so on.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct


class RankPlacement(NamedTuple):
    """Where a rank is in each dimension."""

    tensor: int
    pipeline: int


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """Sizes of the parallel dimensions, as the flags `--tensor-parallel-size` and its neighbours give them."""

    tensor: int = 1
    """Ranks that share every layer."""
    pipeline: int = 1
    """Stages that the layers are divided into."""
    data: int = 1
    """Engine cores, each with all of the above."""
    enable_expert_parallel: bool = False
    """Whether the ranks that share a layer divide its experts among them, rather than every expert. Then the engine
    cores share them, too, and every core needs all others to compute a step."""
    nodes: int = 1
    """Machines that the workers are divided among equally, in the order of their ranks."""

    @property
    def world_size(self) -> int:
        """Workers of one engine core."""
        return self.tensor * self.pipeline

    @property
    def num_workers(self) -> int:
        """Workers of all engine cores."""
        return self.data * self.world_size

    @property
    def local_workers(self) -> int:
        """Workers of all engine cores on one machine."""
        return self.num_workers // self.nodes

    def ranks_of(self, node: int) -> range:
        """Return the ranks of the workers on a machine, of an engine with one core."""
        return range(node * self.local_workers, (node + 1) * self.local_workers)

    @property
    def shares_experts(self) -> bool:
        """Whether the experts of a layer are divided among the workers of all engine cores."""
        return self.enable_expert_parallel and self.data > 1

    @property
    def expert_size(self) -> int:
        """Workers among which the experts of a layer are divided, if whole experts are."""
        return self.tensor * self.data

    @property
    def group_size(self) -> int:
        """Workers that compute together, so that each needs the others: those of one engine core, or of all cores."""
        return self.num_workers if self.shares_experts else self.world_size

    def group_rank(self, rank: int, data_rank: int) -> int:
        """Return the rank of a core's worker among those that compute together: cores are contiguous."""
        return data_rank * self.world_size + rank if self.shares_experts else rank

    @property
    def output_rank(self) -> int:
        """The worker whose output an engine core takes: the first of those that compute the last layers."""
        return (self.pipeline - 1) * self.tensor

    def placement(self, rank: int) -> RankPlacement:
        """Return where a worker of one engine core is."""
        assert 0 <= rank < self.world_size
        stage, place = divmod(rank, self.tensor)
        return RankPlacement(tensor=place, pipeline=stage)

    def tensor_groups(self) -> list[list[int]]:
        """Return the ranks of each tensor-parallel group, among those that compute together: one per pipeline stage."""
        size = self.tensor
        return [list(range(first, first + size)) for first in range(0, self.group_size, size)]

    def pipeline_groups(self) -> list[list[int]]:
        """Return the ranks that hold the same part of successive stages, in the order of the stages."""
        return [
            list(range(core + place, core + self.world_size, self.tensor))
            for core in range(0, self.group_size, self.world_size)
            for place in range(self.tensor)
        ]

    def data_groups(self) -> list[list[int]]:
        """Return the ranks of all engine cores that hold the same part of the layers but other experts."""
        return [list(range(place, self.group_size, self.world_size)) for place in range(self.world_size)]


_MAX_TITLE = 15
_name = ""


def core_name(config: ParallelConfig, data_rank: int) -> str:
    return "EngineCore" + (f"_DP{data_rank}" if config.data > 1 else "")


def api_server_name(index: int) -> str:
    """Return the name of an API process, counted from 1, that the first one has started."""
    return f"ApiServer_{index}"


def worker_name(config: ParallelConfig, rank: int) -> str:
    """Return the name of a worker of the engine core that runs in this process."""
    parts = ["Worker", *_name.split("_")[1:]]
    if rank < config.world_size:
        place = config.placement(rank)
        parts += [f"PP{place.pipeline}"] if config.pipeline > 1 else []
        parts += [f"TP{place.tensor}"] if config.tensor > 1 else []
    else:  # a worker class of the user, on more ranks than the model is divided into
        parts.append(f"rank{rank}")
    return "_".join(parts)


def is_first(name: str) -> bool:
    """Whether a process says what all others of its kind would say as well: of several only the first does."""
    return all(part.endswith("0") and not part[-2].isdigit() for part in name.split("_")[1:])


def process_name() -> str:
    """Return this process's name; empty in the API server, and in a process with a core of its own."""
    return _name


def name_process(name: str) -> None:
    """Name this process. The system shows as much of it as fits (`ps -o comm`); the command line has all of it."""
    global _name
    _name = name
    title = name if len(name) <= _MAX_TITLE else name.partition("_")[2]
    with contextlib.suppress(OSError):  # another system than Linux
        Path("/proc/self/comm").write_text(title[:_MAX_TITLE], encoding="ascii")
