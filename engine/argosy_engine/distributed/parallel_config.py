"""ParallelConfig: into how many parts a model is divided, and which part a rank has. No torch.

The ranks of an engine core are numbered as vLLM numbers them: those of one tensor-parallel group are contiguous, so
that they are neighbours on a machine; pipeline stages follow each other.
"""

from __future__ import annotations

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
    """Whether the ranks that share a layer divide its experts among them, rather than every expert."""

    @property
    def world_size(self) -> int:
        """Workers of one engine core."""
        return self.tensor * self.pipeline

    @property
    def num_workers(self) -> int:
        """Workers of all engine cores."""
        return self.data * self.world_size

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
        """Return the ranks of each tensor-parallel group: one per pipeline stage."""
        size = self.tensor
        return [list(range(stage * size, (stage + 1) * size)) for stage in range(self.pipeline)]

    def pipeline_groups(self) -> list[list[int]]:
        """Return the ranks that hold the same part of successive stages, in the order of the stages."""
        return [list(range(place, self.world_size, self.tensor)) for place in range(self.tensor)]
