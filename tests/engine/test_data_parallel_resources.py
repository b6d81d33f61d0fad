"""Resources of data-parallel ranks: GPUs, cores and memory are divided between them."""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

import pytest

from argosy_engine import EngineArgs
from argosy_engine.api.doctor import diagnose
from argosy_engine.api.doctor import main as doctor
from argosy_engine.errors import ConfigError
from argosy_engine.sizing import resources as rank_resources
from argosy_engine.sizing.resources import DeviceMemory, check_gpus, rank_args, rank_environment, visible_gpus

GIB = 1 << 30


def args(**fields: Any) -> EngineArgs:
    return EngineArgs.of(model="builtin://tiny", **fields)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = ["0", "1", "GPU-c", "3"]
    monkeypatch.setattr(rank_resources, "visible_gpus", lambda: found)
    return found


def test_each_rank_sees_its_gpus_only(gpus: list[str]) -> None:
    environments = [rank_environment(args(data_parallel_size=4), rank) for rank in range(4)]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == gpus
    assert all(environment["PATH"] == os.environ["PATH"] for environment in environments)


def test_too_few_gpus_are_refused_and_none_means_a_cpu(gpus: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"needs 5 GPUs, one for each worker, and 4 are visible; use a smaller"
    ):
        check_gpus(args(data_parallel_size=5))
    with pytest.raises(ConfigError, match="use a smaller --tensor-parallel-size or --data-parallel-size, or"):
        check_gpus(args(data_parallel_size=3, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"needs 8 GPUs.*smaller --tensor-parallel-size, or --device cpu"):
        check_gpus(args(tensor_parallel_size=8))
    assert check_gpus(args(data_parallel_size=5, device="cpu")) == []
    gpus.clear()
    assert rank_environment(args(data_parallel_size=5), 4) == os.environ


@pytest.mark.parametrize(("cores", "most"), [(1, 8), (16, 64)])
def test_far_more_workers_than_cores_are_refused_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, cores: int, most: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert check_gpus(args(data_parallel_size=most, device="cpu")) == []
    assert check_gpus(args(data_parallel_size=most // 4, pipeline_parallel_size=4, device="cpu")) == []
    refusal = f"needs {most + 1} workers, .* at most {most}; use a smaller --data-parallel-size$"
    with pytest.raises(ConfigError, match=refusal):
        check_gpus(args(data_parallel_size=most + 1, device="cpu"))
    with pytest.raises(ConfigError, match="--pipeline-parallel-size or --data-parallel-size"):
        diagnose(args(data_parallel_size=1024, pipeline_parallel_size=4, device="cpu"))


def test_one_core_keeps_the_environment(gpus: list[str]) -> None:
    assert rank_environment(args(), 0) == os.environ


def test_without_a_driver_no_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert visible_gpus() == []


def test_visible_gpus_are_those_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlShutdown(self) -> int:
            return 0

        def nvmlDeviceGetCount_v2(self, count: Any) -> int:
            ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 3
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    for named, visible in (
        (None, ["0", "1", "2"]),
        ("", []),
        ("2, MIG-7", ["2", "MIG-7"]),
        ("1,-1,2", ["1"]),
    ):
        if named is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible_gpus() == visible


def test_ranks_share_the_cores_unless_threads_are_given() -> None:
    cores = len(os.sched_getaffinity(0))
    assert rank_args(args()).threads is None
    assert rank_args(args(data_parallel_size=2)).threads == max(1, cores // 2)
    assert rank_args(args(data_parallel_size=1000)).threads == 1
    assert rank_args(args(data_parallel_size=2, threads=7)).threads == 7


def test_ranks_on_a_cpu_share_its_memory_and_a_gpu_belongs_to_one() -> None:
    def blocks(device: str, size: int) -> int:
        memory = DeviceMemory(device, "test", 2 * GIB, 2 * GIB)
        diagnosis = diagnose(args(data_parallel_size=size, max_num_seqs=4096, device="cpu"), memory)
        assert diagnosis.budget is not None
        return diagnosis.budget.num_blocks

    assert blocks("cpu", 4) < blocks("cpu", 2) < blocks("cpu", 1)
    assert 4 * blocks("cpu", 4) <= blocks("cpu", 1)
    assert blocks("cuda", 4) == blocks("cuda", 1)


def test_doctor_shows_the_budget_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["builtin://tiny", "--device", "cpu"]
    assert doctor([*flags, "-dp", "2"]) == 0
    assert "each of 2 data-parallel ranks:" in capsys.readouterr().out
    assert doctor([*flags, "-dp", "2", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["data_parallel_size"] == 2
    assert doctor(flags) == 0
    assert "data-parallel" not in capsys.readouterr().out
