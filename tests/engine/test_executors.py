"""Clients and executors: one contract, and how they fail, in every combination."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import EngineArgs, LLMEngine
from argosy_engine.core.proc.core_client import InprocClient, SyncMPClient
from argosy_engine.errors import ConfigError, EngineDead, UtilityFailed
from argosy_engine.executor.multiproc_executor import MultiprocExecutor
from argosy_engine.executor.uniproc_executor import worker_class
from argosy_engine.messages import CollectiveRpc
from argosy_engine.osproc import wait_readable
from engine_contract import (
    FAKE_TOKENS,
    FOREVER,
    GREEDY,
    check_engine,
    finish,
    generate,
    is_in_this_process,
    worker_pids,
)
from engine_processes import worker_path

LAYOUTS: dict[str, dict[str, Any]] = {
    "a worker process": {"distributed_executor_backend": "mp"},
    "two of a tensor-parallel group": {"tensor_parallel_size": 2},
    "two pipeline stages": {"pipeline_parallel_size": 2},
    "two stages of two": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "a worker in the core process": {"distributed_executor_backend": "uni"},
}


@pytest.fixture(autouse=True, scope="module")
def bare_workers() -> Iterator[None]:
    with worker_path(is_bare=True):
        yield


@contextmanager
def engine(*, multiprocess: bool = False, **flags: Any) -> Iterator[LLMEngine]:
    made = LLMEngine.from_engine_args(
        EngineArgs.of(
            model="builtin://tiny", device="cpu", dtype="float32", threads=1, num_gpu_blocks_override=512,
            worker_cls="probe_worker.ProbeWorker", **flags,
        ),
        multiprocess=multiprocess,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


def test_one_process() -> None:
    with engine() as made:
        assert is_in_this_process(made)
        check_engine(made, generate(made))


@pytest.mark.parametrize(
    ("layout", "multiprocess"),
    [
        ("a worker process", True),
        ("two of a tensor-parallel group", True),
        ("two pipeline stages", False),
        ("two stages of two", False),
        ("a worker in the core process", True),
        pytest.param("a worker process", False, marks=pytest.mark.full),
        pytest.param("two of a tensor-parallel group", False, marks=pytest.mark.full),
        pytest.param("two pipeline stages", True, marks=pytest.mark.full),
        pytest.param("two stages of two", True, marks=pytest.mark.full),
    ],
)
def test_several_processes(layout: str, multiprocess: bool) -> None:
    flags = LAYOUTS[layout]
    num_workers = flags.get("tensor_parallel_size", 1) * flags.get("pipeline_parallel_size", 1)
    with engine(multiprocess=multiprocess, **flags) as made:
        check_engine(made, FAKE_TOKENS, num_workers)
        assert os.getpid() not in worker_pids(made)
        if multiprocess:
            assert isinstance(made.client, SyncMPClient)
            is_alone = flags.get("distributed_executor_backend") == "uni"
            assert (made.client.pid in worker_pids(made)) == is_alone


def test_a_killed_worker_ends_the_engine() -> None:
    with engine(distributed_executor_backend="mp") as made:
        (worker,) = worker_pids(made)
        made.add_request("x", "Once", FOREVER)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            finish(made)


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_killed_core_ends_the_engine_and_its_workers(backend: str) -> None:
    with engine(multiprocess=True, distributed_executor_backend=backend) as made:
        assert isinstance(made.client, SyncMPClient)
        (worker,) = worker_pids(made)
        worker_end = os.pidfd_open(worker)
        try:
            made.add_request("x", "Once", FOREVER)
            made.step()
            os.kill(made.client.pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match="killed by SIGKILL"):
                finish(made)
            assert wait_readable([worker_end], timeout_s=60), "the worker lives on"
            with pytest.raises(EngineDead):
                made.add_request("y", "Once", GREEDY)
            with pytest.raises(EngineDead):
                made.collective_rpc("echo")
        finally:
            os.close(worker_end)


def test_workers_know_their_rank_and_the_tightest_says_how_many_blocks_there_are(tmp_path: Path) -> None:
    args = EngineArgs.of(
        model="builtin://tiny",
        device="cpu",
        dtype="float32",
        threads=1,
        worker_cls="probe_worker.UnequalWorker",
    )
    executor = MultiprocExecutor(args, world_size=3)
    try:
        assert executor.start().memory.num_blocks == 312
        assert executor.collective_rpc(CollectiveRpc("place", kwargs={"base": 0})) == [[0, 3], [1, 3], [2, 3]]
        check_late_answers(executor, tmp_path / "pipe")
    finally:
        executor.shutdown()


def check_late_answers(executor: MultiprocExecutor, pipe: Path) -> None:
    """A worker's answer that arrives after the timeout is discarded."""
    os.mkfifo(pipe)
    with pytest.raises(UtilityFailed, match="worker 0 has not answered within"):
        executor.collective_rpc(CollectiveRpc("open_pipe", timeout=0.05, args=[str(pipe)]))
    with pipe.open("wb"):
        answers = executor.collective_rpc(CollectiveRpc("place", kwargs={"base": 10}))
    assert answers == [[10, 3], [11, 3], [12, 3]]


@pytest.mark.parametrize("start", [InprocClient, SyncMPClient])
def test_a_start_that_fails_says_why(start: Callable[[EngineArgs], object]) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        start(EngineArgs.of(model="/nonexistent"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.Worker", "No module named 'nowhere'"),
        ("Worker", "give package.module.Class"),
        ("probe_worker.Missing", "has no attribute"),
        ("probe_worker.NoWorker", "is not a subclass"),
        ("os.getcwd", "is not a subclass"),
    ],
)
def test_a_worker_class_must_be_one(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker_class(path)


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, argosy_engine; argosy_engine.EngineArgs; "
        "import argosy_engine.core.proc.core_client, argosy_engine.core.engine_core; "
        "import argosy_engine.executor.multiproc_executor; "
        "argosy_engine.LLMEngine; argosy_engine.AsyncLLM; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
