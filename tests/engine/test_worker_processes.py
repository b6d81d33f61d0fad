"""Worker processes: steps overlap, answers keep their order, and the end of any worker ends the engine."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from argosy_engine import EngineArgs, LLMEngine
from argosy_engine.core.proc.core_client import SyncMPClient
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.executor.multiproc_executor import MultiprocExecutor
from argosy_engine.messages import CollectiveRpc, SchedulerOutput, WorkerInfo
from engine_processes import worker_path
from processes import children, is_alive, wait_until, workers

ARGS = {
    "model": "builtin://tiny",
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "num_gpu_blocks_override": 16,
    "distributed_executor_backend": "mp",
    "worker_cls": "probe_worker.ScriptedWorker",
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True, scope="module")
def bare_workers() -> Iterator[None]:
    with worker_path(is_bare=True):
        yield


@contextmanager
def running(world_size: int) -> Iterator[MultiprocExecutor]:
    executor = MultiprocExecutor(EngineArgs.of(**ARGS), world_size)
    try:
        executor.start()
        yield executor
    finally:
        executor.shutdown()


@pytest.fixture(scope="module")
def executor() -> Iterator[MultiprocExecutor]:
    with running(1) as started:
        yield started


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def step(script: str) -> SchedulerOutput:
    return SchedulerOutput([], {}, {}, 0, [script], {})


def test_a_step_is_launched_while_the_one_before_is_awaited(
    executor: MultiprocExecutor, pipe: Path, tmp_path: Path
) -> None:
    launched = tmp_path / "launched"
    os.mkfifo(launched)
    first = executor.execute(step(f"end:open:{pipe}"))
    second = executor.execute(step(f"launch:tell:{launched}"))
    launched.read_bytes()  # until the second is launched
    pipe.write_bytes(b"")  # only now the first may end
    assert first.get().request_ids == ["open"]
    assert second.get().request_ids == ["tell"]


def test_a_call_is_answered_after_the_steps_before_it(executor: MultiprocExecutor, pipe: Path) -> None:
    awaited = executor.execute(step(f"end:open:{pipe}"))
    with ThreadPoolExecutor(1) as thread:
        called = thread.submit(executor.collective_rpc, CollectiveRpc("place", kwargs={"base": 2}))
        pipe.write_bytes(b"")
        assert called.result() == [[2, 1]]
    assert awaited.get().request_ids == ["open"]


@pytest.mark.parametrize("when", ["launch", "end"])
def test_a_failed_step_is_answered_after_the_steps_before_it(when: str, pipe: Path) -> None:
    with running(1) as executor:
        first = executor.execute(step(f"end:open:{pipe}"))
        failing = executor.execute(step(f"{when}:fail:0"))
        after = executor.execute(step("end:nothing:"))
        pipe.write_bytes(b"")
        assert first.get().request_ids == ["open"]
        for pending in (failing, after):
            with pytest.raises(EngineDead, match=r"^Worker \(process \d+\) failed: RuntimeError: as asked$"):
                pending.get()


@pytest.mark.parametrize("when", ["launch", "end"])
def test_a_failure_on_a_rank_that_is_not_awaited_is_the_reason(when: str, pipe: Path) -> None:
    with running(2) as executor:
        executor.execute(step(f"{when}:fail:1"))
        never = executor.execute(step(f"end:open:{pipe}"))
        with pytest.raises(
            EngineDead, match=r"^Worker_rank1 \(process \d+\) failed: RuntimeError: as asked$"
        ):
            never.get()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_any_worker_ends_the_engine(rank: int, pipe: Path) -> None:
    with running(2) as executor:
        ranks = [pid for pid, *_ in executor.collective_rpc(CollectiveRpc("echo"))]
        assert set(ranks) <= set(children(os.getpid()))
        executor.check_health()
        never = executor.execute(step(f"end:open:{pipe}"))
        os.kill(ranks[rank], signal.SIGKILL)
        name = ("Worker", "Worker_rank1")[rank]
        reason = rf"^{name} \(process {ranks[rank]}\) ended: killed by SIGKILL, maybe for lack of memory$"
        with pytest.raises(EngineDead, match=reason):
            never.get()
        for call in (executor.check_health, lambda: executor.collective_rpc(CollectiveRpc("echo"))):
            with pytest.raises(EngineDead, match=reason):
                call()
    assert not set(ranks) & set(children(os.getpid()))


def test_a_worker_that_fails_because_its_peer_was_killed_is_not_the_reason(
    pipe: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(2) as executor:
        never = executor.execute(step(f"end:lose:{pipe}"))
        with pytest.raises(
            EngineDead, match=r"^Worker_rank1 \(process \d+\) ended: killed by SIGKILL"
        ) as caught:
            never.get()
        assert caplog.messages == [str(caught.value)]


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_workers_that_load_different_weights_are_refused(parallel: str) -> None:
    fields = {**ARGS, parallel: 2, "load_format": "dummy", "worker_cls": "probe_worker.OtherWeightsWorker"}
    executor = MultiprocExecutor(EngineArgs.of(**fields), 2)
    try:
        with pytest.raises(ConfigError, match=r"^worker 1 .* their model_fingerprint differs"):
            executor.start()
    finally:
        executor.shutdown()


@pytest.mark.parametrize("where", ["worker", "core"])
def test_a_start_that_fails_in_the_callers_process_leaves_no_worker(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    start = MultiprocExecutor.start

    def start_and_record(executor: MultiprocExecutor) -> WorkerInfo:
        before = children(os.getpid())
        try:
            info = start(executor)
        finally:
            pids.extend(set(children(os.getpid())) - set(before))
        raise ConfigError(f"as asked, once {info.model_path} is loaded")

    monkeypatch.setattr(MultiprocExecutor, "start", start_and_record)
    worker = "FailsLateWorker" if where == "worker" else "ProbeWorker"
    args = EngineArgs.of(**{**ARGS, "tensor_parallel_size": 2, "worker_cls": f"probe_worker.{worker}"})
    with pytest.raises(ConfigError, match="as asked") as caught:
        LLMEngine.from_engine_args(args, multiprocess=False)
    assert len(pids) == 2
    assert caught.value, "its traceback refers to the executor"
    assert not set(pids) & set(children(os.getpid()))


@pytest.mark.parametrize("state", ["new", "sleeping"])
def test_an_idle_core_ends_with_its_worker(state: str, capfd: pytest.CaptureFixture[str]) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.of(**ARGS), multiprocess=True)
    try:
        assert isinstance(engine.client, SyncMPClient)
        core = engine.client.pid
        if state == "sleeping":
            engine.sleep()
        (worker,) = workers(core)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not is_alive(core), "the core to end")
        reason = f"Worker (process {worker}) ended: killed by SIGKILL"
        for call in (engine.reset_prefix_cache, lambda: engine.add_request("a", "Once")):
            with pytest.raises(EngineDead, match=f"^{re.escape(reason)}"):
                call()
        log = capfd.readouterr().err
        assert f"[EngineCore] argosy.executor {reason}" in log
        assert "Traceback" not in log
    finally:
        engine.close()
