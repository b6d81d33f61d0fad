"""Names of an engine's processes: vLLM's, and what the system shows of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from argosy_engine.distributed.parallel_config import ParallelConfig, core_name, is_first, worker_name

NAMED = (
    "import sys; from argosy_engine.distributed.parallel_config import *; "
    "from argosy_engine.distributed.parallel_config import ParallelConfig; "
    "name_process(sys.argv[1]); print(open('/proc/self/comm').read().strip()); "
    "print(worker_name(ParallelConfig(tensor=2, pipeline=2, data=2), 2))"
)


@pytest.mark.parametrize(
    ("sizes", "core", "worker"),
    [
        ({}, "EngineCore", "Worker"),
        ({"data": 2}, "EngineCore_DP1", "Worker"),
        ({"tensor": 4}, "EngineCore", "Worker_TP1"),
        ({"pipeline": 2}, "EngineCore", "Worker_PP1"),
        ({"pipeline": 2, "tensor": 2}, "EngineCore", "Worker_PP0_TP1"),
    ],
)
def test_a_name_has_the_place_in_each_dimension_with_several(
    sizes: dict[str, int], core: str, worker: str
) -> None:
    config = ParallelConfig(**sizes)
    assert core_name(config, 1) == core
    assert worker_name(config, min(1, config.world_size - 1)) == worker


@pytest.mark.parametrize(
    ("name", "title", "worker"),
    [
        ("EngineCore_DP1", "EngineCore_DP1", "Worker_DP1_PP1_TP0"),
        ("EngineCore_DP1234", "DP1234", "Worker_DP1234_PP1_TP0"),
        ("EngineCore", "EngineCore", "Worker_PP1_TP0"),
    ],
)
def test_workers_have_the_rank_of_their_core_and_the_system_shows_the_name(
    name: str, title: str, worker: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAMED, name], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [title, worker]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Worker", True),
        ("Worker_DP0_PP0_TP0", True),
        ("Worker_DP0_PP1_TP0", False),
        ("Worker_TP10", False),
        ("Worker_DP1_TP0", False),
    ],
)
def test_one_process_says_what_all_would_say(name: str, expected: bool) -> None:
    assert is_first(name) is expected
