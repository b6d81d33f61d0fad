"""Compiled grammars of requests that wait for a slot: their memory is bounded, and each gets its turn."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, cast
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_engine.config import EngineArgs
from argosy_engine.core.engine_core import EngineCore, Watchdog
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from argosy_engine.params import SamplingParams
from argosy_engine.structured.compile_queue import MAX_RESUMED, CompileQueue, Grammar, QueuedGrammars
from argosy_engine.structured.manager import GrammarRequest, StructuredOutputManager
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from fake_executor import BLOCK, FakeExecutor


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def test_grammars_that_fit_are_held_and_the_others_follow_by_turns_of_their_tenants() -> None:
    queued = QueuedGrammars(max_bytes=100)
    assert queued.admit("huge", "a", spec("huge"), 1000), "one alone may be of any size"
    assert queued.admit("equal", "a", spec("huge"), 1000), "equal ones count once"
    assert queued.num_bytes == 1000
    for number in range(3):
        assert not queued.admit(f"a{number}", "a", spec(f"a{number}"), 60)
    assert not queued.admit("b", "b", spec("b"), 40)
    assert queued.resume() is None
    queued.release("huge")
    assert queued.resume() is None, "the other one still holds it"
    queued.release("equal")
    assert [queued.resume() for _ in range(3)] == ["a0", "b", None]
    assert queued.admit("a0", "a", spec("a0"), 60), "it has its room"
    assert queued.num_bytes == 100
    assert not queued.admit("small", "c", spec("small"), 0), "those that wait are not overtaken"
    queued.release("a1")
    queued.release("b")
    assert queued.resume() is None, "a2 is next and needs more"
    queued.release("a0")
    assert [queued.resume() for _ in range(3)] == ["a2", "small", None]


def test_few_grammars_are_compiled_again_at_the_same_time() -> None:
    queued = QueuedGrammars(max_bytes=100)
    queued.admit("first", "", spec("first"), 100)
    for number in range(2 * MAX_RESUMED):
        queued.admit(str(number), "", spec(str(number)), 1)
    queued.release("first")
    resumed = [queued.resume() for _ in range(MAX_RESUMED + 1)]
    assert resumed == [*map(str, range(MAX_RESUMED)), None]
    queued.admit("0", "", spec("0"), 1)
    assert queued.resume() == str(MAX_RESUMED)


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "resume", "release"]), st.integers(0, 9), st.integers(0, 60))
    )
)
def test_the_bytes_are_those_of_the_grammars_held(events: list[tuple[str, int, int]]) -> None:
    queued, held, sizes = QueuedGrammars(max_bytes=100), dict[str, str](), dict[str, int]()
    waiting = set[str]()
    for number, (event, choice, size) in enumerate(events):
        if event == "admit":
            text = str(choice)
            if queued.admit(str(number), str(choice % 3), spec(text), sizes.setdefault(text, size)):
                held[str(number)] = text
            else:
                waiting.add(str(number))
        elif event == "resume" and (request_id := queued.resume()) is not None:
            waiting.remove(request_id)
            held[request_id] = str(events[int(request_id)][1])
        elif event == "release":
            queued.release(str(choice))
            held.pop(str(choice), None)
            waiting.discard(str(choice))
        assert queued.num_bytes == sum(sizes[text] for text in set(held.values()))
        assert queued.num_bytes <= 100
    for request_id in list(held):
        queued.release(request_id)
    if waiting:
        assert queued.resume() in waiting, "whoever waits gets room in the end"


class Compiled:
    """A compiled grammar."""

    alive: ClassVar[WeakSet[Compiled]] = WeakSet()

    def __init__(self) -> None:
        Compiled.alive.add(self)


class Matcher:
    def __init__(self, grammar: Compiled, *_: Any) -> None:
        self.grammar = grammar
        self.is_terminated = self.is_too_slow = False

    def fill(self, bitmask: Any, row: int) -> None: ...

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, count: int) -> None: ...

    def take_cpu_s(self) -> float:
        return 0.0


class Backend:
    """Compiles when the test runs the threads."""

    def __init__(self) -> None:
        self.threads: list[Callable[[], None]] = []
        self.num_compiled: Counter[str] = Counter()

    def new_compilation(self) -> Backend:
        return self

    def run(self, spec: GrammarSpec) -> Any:
        self.num_compiled[spec.text] += 1
        return Grammar(cast("Any", Compiled()), 100)

    def run_threads(self) -> None:
        while self.threads:
            self.threads.pop(0)()

    def kill(self) -> None: ...

    def lower_priority(self) -> None: ...

    def close(self) -> None: ...


class Core:
    """A core with one slot, whose waiting requests may hold two grammars, and without a cache of grammars."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("argosy_engine.structured.manager.GrammarState", Matcher)
        args = EngineArgs.of(model="builtin://tiny", block_size=BLOCK, max_num_seqs=1, async_scheduling=False)
        self.core = EngineCore(args, FakeExecutor())
        self.core.structured.close()
        self.backend = Backend()
        queue = CompileQueue(
            self.backend, num_threads=4, cache_bytes=0, start_thread=self.backend.threads.append
        )
        self.core.structured = StructuredOutputManager(queue, self.core.config.vocab_size, (0,))
        self.core.structured.queued.max_bytes = 200
        self.ended: dict[str, EngineCoreOutput] = {}

    def add(self, *names: str) -> None:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        for name in names:
            grammar = GrammarRequest(spec(name))
            self.core.add_request(
                EngineCoreRequest(name, [1] * 5, params, 0.0, grammar=grammar, tenant=name[:1])
            )

    def step(self) -> None:
        self.backend.run_threads()
        for output in self.core.step().outputs:
            if output.finish_reason is not None:
                self.ended[output.request_id] = output


def test_requests_that_wait_hold_few_grammars_and_all_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Core(monkeypatch)
    names = [f"{tenant}{number}" for number in range(10) for tenant in "ab"]
    rig.add(*names)
    gc.collect()
    gc.freeze()  # so that the next collections are of what comes now
    for _ in range(8):
        rig.step()
        gc.collect()
        assert len(Compiled.alive) <= 3, "two that wait, and one that runs"
    assert len(rig.ended) < len(names), "most still wait"
    while rig.core.has_work or rig.backend.threads:
        rig.step()
    assert sorted(rig.ended) == sorted(names)
    assert all(output.finish_reason is FinishReason.STOP for output in rig.ended.values())
    assert max(rig.backend.num_compiled.values()) == 2
    assert rig.core.structured.queued.num_bytes == 0
    assert rig.core.structured.request_ids == []


def test_requests_that_are_aborted_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Core(monkeypatch)
    rig.add("runs")
    rig.step()
    rig.add("a", "b", "c", "d")
    rig.step()
    assert [name for name in "abcd" if rig.core.structured.is_deferred(name)] == ["c", "d"]
    rig.core.abort_requests(["a", "c"])
    assert not rig.core.structured.is_deferred("d")
    while rig.core.has_work or rig.backend.threads:
        rig.step()
    assert sorted(rig.ended) == ["b", "d", "runs"]


def test_a_request_that_waits_for_room_is_not_taken_for_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Core(monkeypatch)
    rig.add("a", "b", "c", "d")
    rig.step()
    core, now = rig.core, 1000.0
    deferred = [name for name in "abcd" if core.structured.is_deferred(name)]
    assert deferred
    core.watchdog = Watchdog(30.0, lambda: now)
    while len(core.scheduler.requests) > len(deferred):  # nothing moves, so the others fail
        now += 10.0
        core.tick()
    assert list(core.scheduler.requests) == deferred
