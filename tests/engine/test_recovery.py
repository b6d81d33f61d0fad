"""The core recovers from a fault in its bookkeeping: it logs the fault, no answer changes, nothing crashes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from argosy_engine.config import EngineArgs
from argosy_engine.core.engine_core import EngineCore
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.core.request import Request
from argosy_engine.core.state_dump import describe
from argosy_engine.errors import EngineDead
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, SchedulerOutput
from argosy_engine.params import SamplingParams
from fake_executor import BLOCK, FakeExecutor
from fake_worker import continuation


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(request: pytest.FixtureRequest) -> EngineCore:
    args = EngineArgs.of(model="builtin://tiny", block_size=BLOCK, async_scheduling=request.param)
    return EngineCore(args, FakeExecutor())


def add(core: EngineCore, name: str, prompt: list[int]) -> list[int]:
    """Adds a request; returns the answer it must get."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    core.add_request(EngineCoreRequest(name, prompt, params, 0.0))
    return continuation(prompt, 8)


def run(core: EngineCore, received: dict[str, list[int]]) -> list[EngineCoreOutput]:
    """Steps until the core is idle; the last outputs."""
    finished: list[EngineCoreOutput] = []
    for _ in range(100):
        if not core.has_work:
            return finished
        for output in core.step().outputs:
            received.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                finished.append(output)
    pytest.fail("the core does not come to an end")


def lose_a_block(core: EngineCore) -> None:
    core.scheduler.running[0].block_ids[0].pop()


def lose_a_reference(core: EngineCore) -> None:
    core.kv.pool.blocks[core.scheduler.running[0].block_ids[0][-1]].ref_count = 0


@pytest.mark.parametrize("damage", [lose_a_block, lose_a_reference])
def test_running_requests_are_recomputed_and_answered_as_if_nothing_happened(
    core: EngineCore, damage: Callable[[EngineCore], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected = {name: add(core, name, [token] * 10) for name, token in (("a", 1), ("b", 2))}
    received: dict[str, list[int]] = {}
    for output in core.step().outputs:
        received[output.request_id] = list(output.new_token_ids)
    damage(core)
    with caplog.at_level(logging.ERROR):
        finished = run(core, received)
        core.check_when_idle()
    assert received == expected
    assert [output.finish_reason for output in finished] == [FinishReason.LENGTH] * 2
    assert "the KV cache is rebuilt" in caplog.text
    core.scheduler.check()
    assert add(core, "c", [1] * 10) == expected["a"]
    assert run(core, received)
    assert received["c"] == expected["a"]


def test_leaked_blocks_are_found_when_the_engine_idles(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    add(core, "a", [1] * 10)
    run(core, {})
    core.kv.pool.allocate(1)
    core.check_when_idle()
    assert "the KV cache is rebuilt" in caplog.text
    assert core.kv.usage == 0.0
    caplog.clear()
    core.check_when_idle()
    assert not caplog.text


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> InprocClient:
    monkeypatch.setattr("argosy_engine.executor.factory.make_executor", lambda args: FakeExecutor())
    monkeypatch.setattr("argosy_engine.core.proc.core_client.CHECK_INTERVAL_S", 3600.0)
    return InprocClient(EngineArgs.of(model="builtin://tiny", block_size=BLOCK))


def test_a_core_in_process_is_checked_when_it_idles(
    client: InprocClient, caplog: pytest.LogCaptureFixture
) -> None:
    add(client.core, "a", [1] * 10)
    client.step()
    client.core.kv.pool.allocate(1)
    while client.has_work:
        client.step()
    assert "the KV cache is rebuilt" in caplog.text
    assert client.core.kv.usage == 0.0
    client.core.scheduler.check = lambda: pytest.fail("again, so soon")  # type: ignore[method-assign]
    add(client.core, "b", [1] * 10)
    while client.has_work:
        client.step()


def test_a_core_that_dies_in_process_says_what_it_was_doing(
    client: InprocClient, caplog: pytest.LogCaptureFixture
) -> None:
    add(client.core, "a", [1] * 10)
    client.core.executor.is_asleep = True  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        client.step()
    assert "state of the engine core at its end" in caplog.text
    assert "a: " in caplog.text


def test_a_fault_that_comes_back_at_once_ends_in_errors_not_in_a_loop(core: EngineCore) -> None:
    add(core, "a", [1] * 10)

    def broken(*_: object) -> None:
        raise KeyError("bookkeeping")

    core.kv.admit = broken  # type: ignore[assignment]
    core.step()
    core.step()
    (output,) = core.step().outputs
    assert output.finish_reason is FinishReason.ERROR
    assert "could not keep track" in (output.error or "")
    assert not core.scheduler.has_unfinished_requests


def test_tokens_processed_before_a_fault_are_delivered(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: add(core, name, [token] * 10) for name, token in (("a", 1), ("b", 2))}
    received: dict[str, list[int]] = {}
    append_output, failed = Request.append_output, list[str]()

    def fail_once(request: Request, token_id: int) -> None:
        if request.request_id == "b" and not failed:
            failed.append(request.request_id)
            raise RuntimeError("half-way")
        append_output(request, token_id)

    monkeypatch.setattr(Request, "append_output", fail_once)
    run(core, received)
    assert failed
    assert received == expected


def test_slots_of_finished_requests_are_freed_after_a_fault_in_the_step_that_frees_them(
    core: EngineCore,
) -> None:
    add(core, "ends", [1] * 10)
    run(core, {})
    expected, received = add(core, "a", [2] * 10), dict[str, list[int]]()
    schedule = core.scheduler.schedule

    def fail_once() -> SchedulerOutput:
        core.scheduler.schedule = schedule  # type: ignore[method-assign]
        schedule()
        raise RuntimeError("the planned step is lost")

    core.scheduler.schedule = fail_once  # type: ignore[method-assign]
    run(core, received)
    assert received["a"] == expected
    add(core, "b", [3])
    core.step()
    assert isinstance(core.executor, FakeExecutor)
    assert set(core.executor.worker.rows) <= {"a", "b"}


def test_a_dying_core_describes_every_step_in_flight(core: EngineCore) -> None:
    add(core, "a", [1] * 10)
    core.step()
    assert isinstance(core.executor, FakeExecutor)
    core.executor.is_dead = True
    with pytest.raises(EngineDead):
        core.step()
    name = next(iter(core.scheduler.requests))
    steps = describe(core).split("last step: ")[1:]
    assert len(steps) == (2 if core.config.async_scheduling else 1)
    assert all(f"{name}: " in step for step in steps)
