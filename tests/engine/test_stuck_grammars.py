"""Grammar steps that do not return: how many may be stuck, and what happens to requests beyond that."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from argosy_engine.structured.compile_queue import CompileQueue, Grammar
from argosy_engine.structured.manager import (
    MAX_STUCK,
    MAX_STUCK_RUNNING,
    GrammarRequest,
    StructuredOutputManager,
)
from argosy_engine.structured.structured_outputs_params import GrammarSpec

STEP_CPU_S = 0.01


class Matcher:
    """In place of `GrammarState`: that of a grammar that begins with `stuck` does not come back before `release`."""

    release = threading.Event()

    def __init__(self, grammar: Any, *rest: Any) -> None:
        self._is_stuck = grammar.text.startswith("stuck")
        self.is_terminated = self.is_too_slow = False
        self._is_measured = False

    def fill(self, bitmask: Any, row: int) -> None:
        if not self._is_measured:
            self._is_measured = True  # before its first step
        elif self._is_stuck and not self.release.is_set():
            ends = time.thread_time() + 2 * STEP_CPU_S
            while time.thread_time() < ends:
                pass  # uses up its time
            self.release.wait(60)

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, count: int) -> None: ...

    def take_cpu_s(self) -> float:
        return 0.0


class Compilation:
    def run(self, spec: GrammarSpec) -> Any:
        return Grammar(cast("Any", SimpleNamespace(text=spec.text)), 1)

    def kill(self) -> None: ...

    def lower_priority(self) -> None: ...


class Backend:
    def new_compilation(self) -> Compilation:
        return Compilation()

    def close(self) -> None: ...


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[StructuredOutputManager]:
    monkeypatch.setattr("argosy_engine.structured.manager.GrammarState", Matcher)
    Matcher.release = threading.Event()
    queue = CompileQueue(Backend(), num_threads=1)
    made = StructuredOutputManager(queue, 64, (2,), max_step_cpu_s=STEP_CPU_S)
    gc.disable()  # a collection may take longer than a step may, if there are many objects of other tests
    yield made
    gc.enable()
    Matcher.release.set()
    made.close()


def add(manager: StructuredOutputManager, *texts: str) -> list[str]:
    """Requests with these grammars; their ids."""
    request_ids = [f"{number} {text}" for number, text in enumerate(texts)]
    for request_id, text in zip(request_ids, texts, strict=True):
        manager.add(request_id, GrammarRequest(GrammarSpec("grammar", text)))
    while manager.is_waiting:
        manager.wait(30)
        assert all(compiled.failure is None for compiled in manager.take_compiled())
    return request_ids


def test_requests_with_the_grammar_of_stuck_ones_fail_and_others_continue(
    manager: StructuredOutputManager, caplog: pytest.LogCaptureFixture
) -> None:
    request_ids = add(manager, *["stuck"] * 30, *["quick"] * 3)
    _, failures = manager.bitmask(request_ids)
    assert manager.num_stuck == MAX_STUCK
    assert set(failures) == set(request_ids[:30])
    assert sum(failure.is_overload for failure in failures.values()) == 30 - MAX_STUCK
    assert "5 stuck" in caplog.text
    assert manager.bitmask(request_ids[30:])[1] == {}
    assert manager.accept({request_id: [1] for request_id in request_ids[30:]}) == {}


def test_no_more_threads_are_stuck_than_may_be(manager: StructuredOutputManager) -> None:
    texts = [f"stuck {number}" for number in range(MAX_STUCK_RUNNING + 4)]
    request_ids = add(manager, "quick", *texts, "quick")
    _, failures = manager.bitmask(request_ids)
    assert manager.num_stuck == MAX_STUCK_RUNNING
    assert set(failures) == set(request_ids[1:]), "the first was not affected"
    assert failures[request_ids[-1]].is_overload
    assert not failures[request_ids[1]].is_overload
    assert manager.bitmask(request_ids[:1])[1][request_ids[0]].is_overload


def test_all_is_well_again_when_the_threads_are_free(manager: StructuredOutputManager) -> None:
    add(manager, *["stuck"] * 10)
    manager.bitmask(manager.request_ids)
    Matcher.release.set()
    while manager.num_stuck:
        time.sleep(0)
    (request_id,) = add(manager, "stuck")
    assert manager.bitmask([request_id])[1] == {}


def test_nobody_waits_while_a_compiled_grammar_is_still_to_be_followed(
    manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.add("a", GrammarRequest(GrammarSpec("grammar", "quick")))
    manager.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr("argosy_engine.structured.manager.REPLAY_SLICE_S", 0.0)
        assert manager.take_compiled() == [], "there was no time for it"
    assert manager.is_waiting
    manager.wait()  # without a timeout
    (compiled,) = manager.take_compiled()
    assert compiled.failure is None
