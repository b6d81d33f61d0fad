"""Communicators: every collective between real processes over gloo, in the groups of every dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from argosy_engine.distributed.parallel_config import ParallelConfig, RankPlacement
from argosy_engine.distributed.parallel_state import LocalCommunicator, single_process
from communicator_ranks import collectives, run_ranks


def expected(rank: int, size: int, base: float, dtype: torch.dtype) -> dict[str, Any]:
    """What `collectives` returns, computed from the tensors of all ranks."""
    tensors = [
        (torch.arange(4 * size).view(2, 2 * size) + base + 16 * other).to(dtype) for other in range(size)
    ]
    total = tensors[0].clone()
    for other in tensors[1:]:
        total += other
    columns = slice(2 * rank, 2 * rank + 2)
    results = {
        "all_reduce": total,
        "all_gather": torch.cat(tensors, dim=1),
        "all_gather_rows": torch.cat(tensors, dim=0),
        "all_gather_strided": torch.cat([each.t() for each in tensors], dim=1),
        "reduce_scatter": total[:, columns],
        "reduce_scatter_rows": total.t()[columns],
        "broadcast": tensors[-1],
    }
    if size > 1:
        results["received"] = tensors[rank - 1]
    return {name: tensor.tolist() for name, tensor in results.items()}


CONFIGS = {
    "stages": ParallelConfig(tensor=2, pipeline=2),
    "cores that share experts": ParallelConfig(tensor=2, data=2, enable_expert_parallel=True),
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[dict[str, Any]]]:
    return dict(zip(CONFIGS, run_ranks(*CONFIGS.values()), strict=True))


@pytest.mark.parametrize("layout", CONFIGS)
def test_every_process_gets_the_definition(ranks: dict[str, list[dict[str, Any]]], layout: str) -> None:
    config = CONFIGS[layout]
    for index, got in enumerate(ranks[layout]):
        core, rank = divmod(index, config.world_size)
        placement = config.placement(rank)
        assert got["least"] == [0, 2]
        for name, place, size, base in (
            ("tensor", placement.tensor, config.tensor, 64 * placement.pipeline + 128 * core),
            ("pipeline", placement.pipeline, config.pipeline, 64 * placement.tensor + 128 * core),
            ("data", core, config.data, 64 * rank),
            ("world", index, config.group_size, 0),
        ):
            group: Any = got[name]
            assert (group["rank"], group["size"]) == (place, size)
            for dtype in (torch.float32, torch.bfloat16):
                assert group[str(dtype)] == expected(place, size, base, dtype), (index, name, dtype)


def test_one_process_exchanges_nothing() -> None:
    assert collectives(LocalCommunicator(), 5, torch.float32) == expected(0, 1, 5, torch.float32)
    assert single_process().least(3, -1) == [3, -1]
    x = torch.ones(2, 3)
    assert LocalCommunicator().all_reduce(x) is LocalCommunicator().all_gather(x) is x


def test_ranks_of_a_tensor_group_are_contiguous() -> None:
    config = ParallelConfig(tensor=2, pipeline=3, data=4)
    assert config.world_size == 6
    assert config.tensor_groups() == [[0, 1], [2, 3], [4, 5]]
    assert config.pipeline_groups() == [[0, 2, 4], [1, 3, 5]]
    assert [config.placement(rank) for rank in (0, 3, 4)] == [
        RankPlacement(tensor=0, pipeline=0),
        RankPlacement(tensor=1, pipeline=1),
        RankPlacement(tensor=0, pipeline=2),
    ]


def test_cores_that_share_experts_are_one_group() -> None:
    sizes = {"tensor": 2, "pipeline": 2, "data": 2}
    alone, shared = ParallelConfig(**sizes), ParallelConfig(**sizes, enable_expert_parallel=True)
    assert (alone.group_size, shared.group_size, shared.expert_size) == (4, 8, 4)
    assert (alone.group_rank(3, 1), shared.group_rank(3, 1)) == (3, 7)
    assert shared.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shared.pipeline_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert shared.data_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
