"""Clients and executors: the same tokens, utility calls and failures in every combination."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from argosy_engine import EngineArgs, LLMEngine, SamplingParams
from argosy_engine.core.proc.core_client import InprocClient, SyncMPClient
from argosy_engine.errors import ConfigError, EngineAsleep, EngineDead, InvalidRequest, UtilityFailed
from argosy_engine.executor.multiproc_executor import MultiprocExecutor
from argosy_engine.executor.worker_class import worker_class
from argosy_engine.messages.collective_rpc import CollectiveRpc
from argosy_engine.osproc.child_process import wait_readable

PROMPTS = ["Once upon a time", "The sea", "One, two, three,"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FOREVER = GREEDY.replace(max_tokens=4000)
"""Does not end before its process is killed, however late the test gets to it."""


@pytest.fixture(autouse=True)
def worker_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent / "support"), prepend=os.pathsep)


@contextmanager
def engine(*, multiprocess: bool = False, backend: str = "uni") -> Iterator[LLMEngine]:
    made = LLMEngine.from_engine_args(
        EngineArgs.of(
            model="builtin://tiny", device="cpu", dtype="float32", threads=1, num_gpu_blocks_override=512,
            distributed_executor_backend=backend, worker_cls="probe_worker.ProbeWorker",
        ),
        multiprocess=multiprocess,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


def tokens(engine: LLMEngine) -> dict[str, list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY)
    return finish(engine)


def finish(engine: LLMEngine) -> dict[str, list[int]]:
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {out.request_id: out.token_ids for out in engine.step() if out.finished}
    return finished


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, list[int]]]:
    """Tokens of the plainest combination; also where `LLMEngine` itself is tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "support"))
        with engine() as plain:
            found = tokens(plain)
            assert {len(ids) for ids in found.values()} == {GREEDY.max_tokens}
            check_requests(plain)
            check_calls(plain)
            check_sleep(plain, found)
            yield found


def check_requests(engine: LLMEngine) -> None:
    engine.add_request("a", "Once", GREEDY)
    with pytest.raises(InvalidRequest, match="'a' is running"):
        engine.add_request("a", "Twice", GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add_request("b", [], GREEDY)
    engine.add_request("b", [5, 6], GREEDY.replace(n=2))
    engine.step()
    engine.abort_request(["a", "unknown"])
    seen: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == "b"
            assert len(output.token_ids) >= len(seen)
            seen = list(output.token_ids)
    assert len(seen) == GREEDY.max_tokens
    assert output.finished
    assert output.outputs[1].token_ids == seen
    engine.add_request("a", "Once", GREEDY)  # the id is free again
    engine.abort_request("a")
    assert engine.step() == []


def check_calls(engine: LLMEngine) -> None:
    ((pid, *values),) = engine.collective_rpc("echo", args=["x", 1, {"y": [2.5, None]}])
    assert values == ["x", 1, {"y": [2.5, None]}]
    assert (pid == os.getpid()) == isinstance_uni(engine)
    assert engine.collective_rpc("place", timeout=60, kwargs={"base": 7}) == [[7, 1]]
    with pytest.raises(UtilityFailed, match="unexpected keyword argument 'floor'"):
        engine.collective_rpc("place", kwargs={"floor": 7})
    for timeout in (0, -1.0, float("nan"), ["x"]):
        with pytest.raises(UtilityFailed, match="timeout is a number of seconds"):
            engine.collective_rpc("echo", timeout)  # type: ignore[arg-type]
    for method, message in (
        ("fail", "as asked"),
        ("_load", "no method"),
        ("nothing", "no method"),
        ("args", "no method"),
    ):
        with pytest.raises(UtilityFailed, match=message):
            engine.collective_rpc(method)
    with pytest.raises(UtilityFailed, match="unknown utility"):
        engine.client.call_utility("__class__")


def isinstance_uni(engine: LLMEngine) -> bool:
    from argosy_engine.executor.uniproc_executor import UniprocExecutor

    return isinstance(engine.client, InprocClient) and isinstance(
        engine.client.core.executor, UniprocExecutor
    )


def check_sleep(engine: LLMEngine, expected: dict[str, list[int]]) -> None:
    engine.add_request("busy", "Once", GREEDY)
    engine.step()
    with pytest.raises(UtilityFailed, match="requests are running"):
        engine.sleep()
    engine.abort_request("busy")
    with pytest.raises(UtilityFailed, match="no sleep level 3"):
        engine.sleep(3)
    for level in (1, 2):
        engine.sleep(level)
        assert engine.collective_rpc("holds_memory") == [False]
        with pytest.raises(EngineAsleep, match=r"wake_up\(\) of an LLM or POST /wake_up"):
            engine.add_request("asleep", "Once", GREEDY)
        engine.wake_up()
        assert engine.collective_rpc("holds_memory") == [True]
        assert tokens(engine) == expected


def test_worker_processes_give_the_same_tokens(expected: dict[str, list[int]]) -> None:
    with engine(backend="mp") as made:
        assert tokens(made) == expected
        check_calls(made)
        made.sleep()
        made.wake_up()
        assert tokens(made) == expected
        ((pid,),) = made.collective_rpc("echo")
        made.add_request("x", "Once", FOREVER)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            finish(made)


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


def test_a_core_process_gives_the_same_tokens(expected: dict[str, list[int]]) -> None:
    with engine(multiprocess=True) as made:
        assert isinstance(made.client, SyncMPClient)
        assert tokens(made) == expected
        check_calls(made)
        made.add_request("x", "Once", FOREVER)
        os.kill(made.client.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            finish(made)


def test_workers_end_with_the_core_that_is_killed() -> None:
    with engine(multiprocess=True, backend="mp") as made:
        assert isinstance(made.client, SyncMPClient)
        ((worker,),) = made.collective_rpc("echo")
        assert worker != made.client.pid
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
