"""A fault in one request's grammar fails that request only."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from argosy_engine import LLM, SamplingParams, StructuredOutputsParams
from argosy_engine.config import EngineArgs
from argosy_engine.core.engine_core import EngineCore, Watchdog
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest, ErrorKind, FinishReason
from argosy_engine.structured.compile_queue import CompileQueue, Grammar
from argosy_engine.structured.grammar_state import GrammarState
from argosy_engine.structured.manager import GrammarRequest, StructuredOutputManager
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from fake_executor import BLOCK, FakeExecutor

CHOICES = {"a": "apple", "b": "banana", "c": "cherry"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM("builtin://tiny", dtype="float32", threads=1, max_num_seqs=16, max_model_len=256)
    yield engine
    engine.close()


def ask_all(llm: LLM) -> dict[str, EngineCoreOutput]:
    """Three requests with a grammar each, in one batch; their last outputs."""
    last: dict[str, EngineCoreOutput] = {}
    names = {}
    for name, choice in CHOICES.items():
        params = SamplingParams(
            structured_outputs=StructuredOutputsParams(choice=(choice,)), temperature=0.0, max_tokens=40
        )
        (request,) = llm.input_processor.process_inputs(llm.renderer.render_text("Fruit:"), params)
        names[request.request_id] = name
        llm.client.add_request(request)
    while llm.client.has_work:
        for output in llm.client.step().outputs:
            if output.finish_reason is not None:
                last[names[output.request_id]] = output
    return last


class StateOfB(GrammarState):
    """A matcher; the one of `banana` is recognised by its first token."""

    def __init__(self, grammar: Any, *rest: Any) -> None:
        super().__init__(grammar, *rest)
        self.is_b = "banana" in str(grammar.grammar).replace('" "', "")


def broken(method: str, fault: Callable[[], None]) -> type[GrammarState]:
    """A matcher that fails for `banana` only, in one of its methods."""

    def failing(self: StateOfB, *args: Any) -> Any:
        if self.is_b:
            fault()
        return getattr(GrammarState, method)(self, *args)

    return type("Broken", (StateOfB,), {method: failing})


class NoStateForB(StateOfB):
    def __init__(self, grammar: Any, *rest: Any) -> None:
        super().__init__(grammar, *rest)
        if self.is_b:
            raise RuntimeError("no matcher")


def native_fault() -> None:
    raise RuntimeError("native fault")


def takes_seconds() -> None:
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1_500_000)  # without the interpreter, as native matchers


FAULTS = {
    "no state": (NoStateForB, ErrorKind.INTERNAL, "could not follow"),
    "filling a mask": (broken("fill", native_fault), ErrorKind.INTERNAL, "could not follow"),
    "accepting a token": (broken("accept", native_fault), ErrorKind.INTERNAL, "could not follow"),
    "a mask takes seconds": (broken("fill", takes_seconds), ErrorKind.INVALID_GRAMMAR, "takes too long"),
    "a token takes seconds": (broken("accept", takes_seconds), ErrorKind.INVALID_GRAMMAR, "takes too long"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_of_the_batch_are_answered(
    llm: LLM, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, kind, says = FAULTS[fault]
    monkeypatch.setattr("argosy_engine.structured.manager.GrammarState", state)
    with caplog.at_level(logging.WARNING):
        last = ask_all(llm)
    assert {name: output.finish_reason for name, output in last.items()} == {
        "a": FinishReason.STOP,
        "b": FinishReason.ERROR,
        "c": FinishReason.STOP,
    }
    assert last["b"].error_kind is kind
    assert says in (last["b"].error or "")
    assert "the KV cache is rebuilt" not in caplog.text
    monkeypatch.undo()
    assert all(output.finish_reason is FinishReason.STOP for output in ask_all(llm).values())
    assert llm.client.call_utility("check")


@pytest.mark.parametrize(("cost_s", "fails"), [(0.2, True), (0.02, False)])
def test_of_grammars_too_slow_together_the_most_expensive_fails(
    llm: LLM, cost_s: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Expensive(StateOfB):
        def take_cpu_s(self) -> float:
            return cost_s if self.is_b else 0.01

    monkeypatch.setattr("argosy_engine.structured.manager.GrammarState", Expensive)
    last = ask_all(llm)
    assert {name: output.finish_reason is FinishReason.ERROR for name, output in last.items()} == {
        "a": False,
        "b": fails,
        "c": False,
    }
    if fails:
        assert last["b"].error_kind is ErrorKind.BUSY


class NeverCompiles:
    """A backend whose compilations neither end nor fail."""

    def __init__(self) -> None:
        self.num_killed = 0

    def new_compilation(self) -> NeverCompiles:
        return self

    def run(self, spec: GrammarSpec) -> Any:
        raise AssertionError("its thread is never started")

    def kill(self) -> None:
        self.num_killed += 1

    def lower_priority(self) -> None: ...

    def close(self) -> None: ...


class CompilesAtOnce(NeverCompiles):
    def run(self, spec: GrammarSpec) -> Any:
        return Grammar(cast("Any", SimpleNamespace(text=spec.text)), 1)


@pytest.mark.parametrize(
    ("cost_s", "left"),
    [(0.009, 33), (0.0002, 256), (0.04, 7)],
    ids=["bearable alone", "usual", "expensive"],
)
def test_a_batch_of_grammars_is_bounded_however_little_each_uses(
    cost_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 256 requests with a grammar of these costs a step, as many go on as fit into one step."""
    manager = manager_of_costs(monkeypatch)
    add(manager, [cost_s] * 256)
    failures = manager.accept({request_id: [1] for request_id in manager.request_ids})
    assert len(failures) == 256 - left
    assert all(failure.is_overload for failure in failures.values())
    manager.close()


class Matcher:
    """A matcher whose grammar tells how many seconds of CPU time a step takes."""

    def __init__(self, grammar: Any, *_: Any) -> None:
        self.cost_s = float(grammar.text)
        self.is_terminated = self.is_too_slow = False

    def fill(self, bitmask: Any, row: int) -> None: ...

    def rollback(self, count: int) -> None: ...

    def accept(self, token_id: int) -> bool:
        return True

    def take_cpu_s(self) -> float:
        return self.cost_s


def manager_of_costs(monkeypatch: pytest.MonkeyPatch) -> StructuredOutputManager:
    monkeypatch.setattr("argosy_engine.structured.manager.GrammarState", Matcher)
    return StructuredOutputManager(CompileQueue(CompilesAtOnce(), num_threads=1), 64, (2,))


def add(manager: StructuredOutputManager, costs_s: Sequence[float], name: str = "") -> list[str]:
    """Requests whose grammars take so long; their ids."""
    request_ids = [f"{name}{number}" for number in range(len(costs_s))]
    for request_id, cost_s in zip(request_ids, costs_s, strict=True):
        manager.add(request_id, GrammarRequest(GrammarSpec("regex", str(cost_s))))
    while manager.is_waiting:
        manager.wait(30)
        assert not any(compiled.failure for compiled in manager.take_compiled())
    return request_ids


def test_newcomers_do_not_make_their_first_step_longer_than_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their grammars are measured one by one before; those that have begun are not affected."""
    manager = manager_of_costs(monkeypatch)
    begun = add(manager, [0.02] * 5, "begun")
    assert manager.bitmask(begun)[1] == {}
    assert manager.accept({request_id: [1] for request_id in begun}) == {}
    usual, expensive = add(manager, [0.0001] * 20, "usual"), add(manager, [0.07] * 40, "expensive")
    _, failures = manager.bitmask([*expensive, *begun, *usual])
    assert len(failures) == 38, "0.3 s is what a step may take"
    assert failures.keys() < set(expensive)
    assert all(failure.is_overload for failure in failures.values())
    left = [request_id for request_id in manager.request_ids if request_id not in failures]
    assert manager.bitmask(left)[1] == {}, "they are newcomers only once"
    manager.close()


class WaitingCore:
    """A core with one request, whose grammar does not come."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.backend = NeverCompiles()
        self.core = EngineCore(EngineArgs.of(model="builtin://tiny", block_size=BLOCK), FakeExecutor())
        queue = CompileQueue(
            self.backend, num_threads=1, deadline_s=30.0, clock=lambda: self.now, start_thread=lambda _: None
        )
        self.core.structured = StructuredOutputManager(queue, self.core.config.vocab_size, (2,))
        grammar = GrammarRequest(GrammarSpec("regex", "a"))
        params = SamplingParams(max_tokens=4)
        self.core.add_request(EngineCoreRequest("waits", [1] * 5, params, 0.0, grammar=grammar))


def test_a_blocked_request_alone_is_answered_at_its_deadline() -> None:
    """Blocked requests are no work, and an idle core makes no steps."""
    waiting = WaitingCore()
    core = waiting.core
    assert not core.has_work
    waiting.now += 29.0
    core.tick()
    assert not core.has_work
    waiting.now += 2.0
    core.tick()
    assert core.has_work
    (output,) = core.step().outputs
    assert output.finish_reason is FinishReason.ERROR
    assert "30 s" in (output.error or "")
    assert not core.scheduler.has_unfinished_requests
    assert waiting.backend.num_killed == 1


def test_the_compilation_of_a_client_that_left_is_killed() -> None:
    waiting = WaitingCore()
    waiting.core.abort_requests(["waits"])
    assert waiting.backend.num_killed == 1
    assert waiting.core.structured.compile_queue.num_running == 0


def test_a_request_whose_grammar_was_lost_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    waiting = WaitingCore()
    waiting.core.watchdog = Watchdog(300.0, lambda: waiting.now)
    waiting.core.structured.forget(["waits"])
    waiting.now += 10.0
    waiting.core.tick()
    (output,) = waiting.core.step().outputs
    assert output.error_kind is ErrorKind.INTERNAL
    assert "waited for nothing" in caplog.text
