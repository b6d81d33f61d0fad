"""A fault in the bookkeeping is logged and healed: nobody's answer changes, nothing crashes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from argosy_engine.config import EngineArgs, MemoryBudget
from argosy_engine.core.engine_core import EngineCore
from argosy_engine.core.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from argosy_engine.core.request import Request
from argosy_engine.models.config import load_model_config
from argosy_engine.models.source import resolve_model
from argosy_engine.sample.params import SamplingParams
from argosy_engine.worker.info import WorkerInfo
from argosy_engine.worker.kv_cache_interface import FullAttentionSpec, group_layers
from argosy_engine.worker.step import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from scheduler_fakes import FakeWorker, next_token

BLOCK = 4


class FakePending:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def sample(self, grammar: GrammarBitmask | None) -> None:
        raise NotImplementedError

    def get(self) -> ModelRunnerOutput:
        return self._output


class FakeExecutor:
    def __init__(self) -> None:
        self.worker = FakeWorker(BLOCK)

    def start(self) -> WorkerInfo:
        path = resolve_model("builtin://tiny")
        return WorkerInfo(
            model_path=str(path),
            model_fingerprint="",
            config=load_model_config(path),
            device="cpu",
            dtype="float32",
            memory=MemoryBudget(
                device="cpu", total_bytes=1, available_bytes=1, utilization=0.5, weights_bytes=0,
                activation_bytes=0, block_bytes=1, block_size=BLOCK, num_blocks=64,
                request_blocks=16, max_model_len=64,
                limited_by="memory",
            ),
            kv_cache_groups=group_layers([FullAttentionSpec(1)]),
            phases=(),
        )  # fmt: skip

    def execute(self, step: SchedulerOutput) -> FakePending:
        return FakePending(self.worker.execute(step))

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        raise NotImplementedError

    def shutdown(self) -> None: ...


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(request: pytest.FixtureRequest) -> EngineCore:
    args = EngineArgs.of(model="builtin://tiny", block_size=BLOCK, async_scheduling=request.param)
    return EngineCore(args, FakeExecutor())


def add(core: EngineCore, name: str, prompt: list[int]) -> list[int]:
    """Adds a request; returns the answer it must get."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    core.add_request(EngineCoreRequest(name, prompt, params, 0.0))
    tokens = list(prompt)
    for _ in range(8):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


def run(core: EngineCore, received: dict[str, list[int]]) -> list[EngineCoreOutput]:
    """Steps until the core is idle; the last outputs."""
    finished = []
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


def test_what_leaks_is_found_when_the_engine_idles(
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


def test_tokens_booked_before_a_fault_are_delivered(core: EngineCore) -> None:
    expected = {name: add(core, name, [token] * 10) for name, token in (("a", 1), ("b", 2))}
    received: dict[str, list[int]] = {}
    book = core.scheduler._book

    def failing(request: Request, *args: Any) -> EngineCoreOutput:
        if request.request_id == "b":
            core.scheduler._book = book  # type: ignore[method-assign]
            raise RuntimeError("half-way")
        return book(request, *args)

    core.scheduler._book = failing  # type: ignore[method-assign]
    run(core, received)
    assert received == expected
