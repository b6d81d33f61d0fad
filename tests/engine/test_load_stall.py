"""A load that stalls ends the engine, which says where; one that advances may take any time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from argosy_engine import EngineArgs
from argosy_engine.api.serve import GRACE_S, StartWatch
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.core.proc.core_client import SyncMPClient
from argosy_engine.core.proc.core_handle import LoadWatch
from argosy_engine.errors import LoadStalled
from argosy_engine.executor.factory import make_executor
from argosy_engine.messages import LoadStep
from processes import Server, children, descendants, free_port, is_alive, wait_until

pytestmark = pytest.mark.timeout(240)

STALL_S = 0.5
PROGRAM = str(Path(__file__).parent.parent / "support" / "stalling_serve.py")


def args(**fields: object) -> EngineArgs:
    return EngineArgs.of(
        model="builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=16, **fields
    )


def test_a_load_that_advances_is_never_stalled() -> None:
    now = 0.0
    watch = LoadWatch(10.0, clock=lambda: now)
    for second in range(0, 100_000, 9):
        now = float(second)
        assert not watch.is_stalled
        watch.advanced(LoadStep("weights", second, 100_000))
    now += 9.5
    assert watch.remaining_s == 0.5
    now += 0.5
    assert watch.is_stalled
    assert "no progress for 10 s (weights, 99 %)" in str(watch.stalled())


def test_zero_waits_for_ever() -> None:
    now = 0.0
    watch = LoadWatch(0.0, clock=lambda: now)
    now = 1e9
    assert watch.remaining_s is None
    assert not watch.is_stalled


@pytest.mark.parametrize("fields", [{}, {"tensor_parallel_size": 2}], ids=["core", "workers"])
def test_a_load_tells_its_phases_and_bytes(fields: dict[str, object]) -> None:
    steps: list[LoadStep] = []
    executor = make_executor(args(**fields), on_load_step=steps.append)
    try:
        executor.start()
    finally:
        executor.shutdown()
    phases = [step.phase for step in steps]
    world_size = fields.get("tensor_parallel_size", 1)
    assert [phases.count(phase) for phase in ("device", "config", "kv cache")] == [world_size] * 3
    read = [step for step in steps if step.phase == "weights"]
    assert len(read) >= world_size
    if not fields:  # workers tell of every phase, and of one as much as is needed
        assert read[-1].num_done == read[-1].num_total > 0
        assert [step.num_done for step in read] == sorted(step.num_done for step in read)


def test_an_offline_engine_raises_and_leaves_no_process(
    bare_workers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(children(os.getpid()))
    hangs_since: list[float] = []

    def note(step: LoadStep) -> None:
        if step.phase == "probe":
            hangs_since.append(time.monotonic())

    def clock() -> float:
        """Stand still until the worker hangs, however long the imports take."""
        return time.monotonic() - hangs_since[0] if hangs_since else 0.0

    with pytest.raises(LoadStalled, match=r"no progress for 0.5 s \(probe, 40 %\)"):
        SyncMPClient(
            args(worker_cls="probe_worker.HangingWorker", distributed_executor_backend="mp"),
            watch=LoadWatch(STALL_S, note, clock),
        )
    assert time.monotonic() - hangs_since[0] >= STALL_S
    assert set(children(os.getpid())) <= before  # other tests' processes may end meanwhile
    assert "probe_worker.py" in capfd.readouterr().err  # the stacks


def test_a_start_that_ends_in_time_is_left_alone() -> None:
    with StartWatch(3600.0, 4) as watch:
        watch.advanced(LoadStep("tokenizer"))
    assert not [thread for thread in threading.enumerate() if thread.name == "start watch"]


@contextmanager
def stalling(model: Path | str, phase: str, gate: Path, grace_s: float, *flags: str) -> Iterator[Server]:
    """A server whose load counts as stalled `STALL_S` after the phase has begun and the gate exists."""
    port, log = free_port(), gate.parent / "log"
    command = [sys.executable, "-P", PROGRAM, phase, str(gate), str(grace_s), str(model), *flags]
    command += ["--port", str(port), "--device", "cpu", "--load-stall-timeout", str(STALL_S)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        yield Server(process, port, log)
    finally:
        process.kill()
        process.wait()


def test_a_server_ends_if_its_tokenizer_cannot_be_read(bare_workers: None, tmp_path: Path) -> None:
    """Its cores are ready by then, and its event loop hangs."""
    model = tmp_path / "model"
    shutil.copytree(resolve_model("builtin://tiny"), model, copy_function=shutil.copy)
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")  # of which nobody opens the other end
    gate = tmp_path / "gate"
    gate.touch()
    with stalling(model, "tokenizer", gate, 0.2) as server:
        assert server.process.wait(200) == 4
    log = server.log.read_text()
    assert "most recent call first" in log  # the stacks
    last = log.strip().splitlines()[-1]
    assert last.startswith(
        "argosy serve: the load of the model has stalled: no progress for 0.5 s (tokenizer)"
    )


def test_a_server_ends_with_stacks_and_an_exit_code(bare_workers: None, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    flags = ("--worker-cls", "probe_worker.HangingWorker")
    statuses = set()

    def has_begun() -> bool:
        assert server.process.poll() is None, server.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{server.url}/ready")
            assert answer.status_code == 503
            statuses.add(str(answer.json()["status"]))
        return "loading the model: probe, 40 %" in statuses

    with stalling("builtin://tiny", "probe", gate, GRACE_S, *flags) as server:
        wait_until(has_begun, "the phase that hangs", 200.0, interval_s=0.25)
        gate.touch()
        assert server.process.wait(200) == 4
    log = server.log.read_text()
    assert "most recent call first" in log  # the stacks
    assert "probe_worker.py" in log
    last = log.strip().splitlines()[-1]
    assert last.startswith(
        "argosy serve: the load of the model has stalled: no progress for 0.5 s (probe, 40 %)"
    )
    assert "--load-stall-timeout" in last


def test_a_server_that_is_stopped_during_its_load_ends_at_once(bare_workers: None, tmp_path: Path) -> None:
    """Not when its load ends, or has stalled: its pod would hold a device for so long."""
    flags = ("--worker-cls", "probe_worker.HangingWorker")
    # the gate is never there: the load never counts as stalled
    with stalling("builtin://tiny", "probe", tmp_path / "gate", GRACE_S, *flags) as server:

        def hangs() -> bool:
            assert server.process.poll() is None, server.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return "probe, 40 %" in httpx.get(f"{server.url}/ready").text
            return False

        wait_until(hangs, "the phase that hangs", 200.0, interval_s=0.25)
        below = descendants(server.process.pid)
        assert below
        server.process.terminate()
        assert server.process.wait(200) == 0, server.log.read_text()
        wait_until(lambda: not any(map(is_alive, below)), "its processes to end", 30.0)
