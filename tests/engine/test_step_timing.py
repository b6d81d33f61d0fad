"""The rates that the engine reports to routers are those at which it computes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from argosy_engine import EngineArgs, LLMEngine, SamplingParams
from argosy_engine.core import engine_core, steps
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.core.steps import StepTiming
from argosy_engine.executor.abstract import Executor, PendingOutput
from argosy_engine.messages import ModelRunnerOutput, SchedulerOutput


def step(*tokens: int) -> SchedulerOutput:
    scheduled = {str(number): count for number, count in enumerate(tokens)}
    return SchedulerOutput([], {}, scheduled, sum(tokens), [], {})


def test_prefill_and_decode_rates_are_measured_separately() -> None:
    timing = StepTiming()
    assert timing.prefill_tokens_per_s == timing.decode_step_s == 0.0
    timing.ended(step(1000), 0.0, 0.5)
    assert (timing.prefill_tokens_per_s, timing.decode_step_s) == (2000.0, 0.0)
    timing.ended(step(1, 1, 1), 0.5, 0.51)
    assert (timing.prefill_tokens_per_s, timing.decode_step_s) == (2000.0, pytest.approx(0.01))
    timing.ended(step(2, 1, 1), 0.51, 9.0)
    timing.ended(step(), 9.0, 10.0)
    assert (timing.prefill_tokens_per_s, timing.decode_step_s) == (2000.0, pytest.approx(0.01))


def test_one_pause_does_not_count_as_step_time() -> None:
    timing = StepTiming()
    now = 0.0
    for seconds in (0.01, 0.02, 12.0, *[0.01] * 5):
        timing.ended(step(1), now, now + seconds)
        now += seconds
    assert timing.longest_step_s == pytest.approx(0.02, rel=0.2)


def test_long_steps_are_known_from_the_second_on_and_forgotten_later() -> None:
    timing = StepTiming()
    timing.ended(step(2000), 0.0, 3.0)
    assert timing.longest_step_s == 0.0, "one step tells nothing yet"
    timing.ended(step(2000), 3.0, 6.0)
    assert timing.longest_step_s == pytest.approx(3.0, rel=0.05)
    for number in range(40_000):
        timing.ended(step(1), 6.0 + 0.01 * number, 6.01 + 0.01 * number)
    assert timing.longest_step_s < 0.2


def test_a_step_waits_for_the_one_before() -> None:
    timing = StepTiming()
    timing.ended(step(1000), 0.0, 1.0)
    timing.ended(step(1000), 0.1, 2.0)
    assert timing.prefill_tokens_per_s == pytest.approx(1000.0)


def test_short_prompts_and_the_ends_of_cached_ones_tell_no_rate() -> None:
    timing = StepTiming()
    for number in range(20):
        timing.ended(step(20), number, number + 0.02)
    assert timing.prefill_tokens_per_s == 0.0, "not the 1000/s that such steps make"
    timing.ended(step(2000), 100.0, 101.0)
    for number in range(200):
        timing.ended(step(20), 200.0 + number, 200.02 + number)
    assert timing.prefill_tokens_per_s == pytest.approx(2000.0)
    for second in range(500, 540):
        timing.ended(step(500), second, second + 1.0)
    assert timing.prefill_tokens_per_s == pytest.approx(500.0, rel=0.01), "it follows a change"


class TimedExecutor:
    """An executor of which each step with tokens takes a second of its own clock."""

    def __init__(self, executor: Executor) -> None:
        self.now = 0.0
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, step: SchedulerOutput) -> PendingOutput:
        return TimedOutput(self, self._executor.execute(step), float(bool(step.num_scheduled_tokens)))


class TimedOutput:
    def __init__(self, executor: TimedExecutor, pending: PendingOutput, seconds: float) -> None:
        self._executor = executor
        self._pending = pending
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def get(self) -> ModelRunnerOutput:
        self._executor.now += self._seconds
        return self._pending.get()


@pytest.mark.parametrize("flags", [{}, {"async_scheduling": True}, {"distributed_executor_backend": "mp"}])
def test_an_engine_tells_the_time_it_takes(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step as it is told without smoothing. All of the time is steps, and none counts twice."""
    monkeypatch.setattr(steps, "KEPT", 0.0)
    told, ended = list[float](), StepTiming.ended

    def noted(timing: StepTiming, step: SchedulerOutput, launched_s: float, ended_s: float) -> None:
        ended(timing, step, launched_s, ended_s)
        if step.total_num_scheduled_tokens > 1:
            told.append(step.total_num_scheduled_tokens / timing.prefill_tokens_per_s)
        elif step.total_num_scheduled_tokens:
            told.append(timing.decode_step_s)

    monkeypatch.setattr(StepTiming, "ended", noted)
    args = EngineArgs.of(model="builtin://tiny", device="cpu", dtype="float32", threads=1, **flags)
    engine = LLMEngine.from_engine_args(args)
    try:
        assert isinstance(engine.client, InprocClient)
        core = engine.client.core
        executor = TimedExecutor(core.executor)
        core.executor = executor  # type: ignore[assignment]
        clock = SimpleNamespace(perf_counter=lambda: executor.now, monotonic=time.monotonic)
        monkeypatch.setattr(engine_core, "time", clock)
        prompt = [7 + number % 500 for number in range(1500)]
        engine.add_request("0", prompt, SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0))
        while engine.has_unfinished_requests():
            engine.step()
        stats = core.stats()
        assert told == [1.0] * 8
        assert executor.now == 8.0
        assert stats.prefill_tokens_per_s == len(prompt)
        assert stats.decode_step_s == 1.0
    finally:
        engine.close()
