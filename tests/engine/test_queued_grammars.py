"""Compiled grammars that requests hold: their memory is bounded, and each request gets its turn."""

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
from argosy_engine.structured.compile_queue import MAX_RESUMED, CompileQueue, Grammar, HeldGrammars
from argosy_engine.structured.manager import CopiedGrammars, GrammarRequest, StructuredOutputManager
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from fake_executor import BLOCK, FakeExecutor


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def test_grammars_that_fit_are_held_and_the_others_follow_by_turns_of_their_tenants() -> None:
    queued = HeldGrammars(max_waiting_bytes=100)
    assert queued.admit("huge", "a", spec("huge"), 1000), "one alone may be of any size"
    assert queued.admit("equal", "a", spec("huge"), 1000), "equal ones count once"
    assert queued.waiting.bytes.total == 1000
    for number in range(3):
        assert not queued.admit(f"a{number}", "a", spec(f"a{number}"), 60)
    assert not queued.admit("b", "b", spec("b"), 40)
    assert queued.resume() is None
    queued.release("huge")
    assert queued.resume() is None, "the other one still holds it"
    queued.release("equal")
    assert [queued.resume() for _ in range(3)] == ["a0", "b", None]
    assert queued.admit("a0", "a", spec("a0"), 60), "it has its room"
    assert queued.waiting.bytes.total == 100
    assert not queued.admit("small", "c", spec("small"), 0), "those that wait are not overtaken"
    queued.release("a1")
    queued.release("b")
    assert queued.resume() is None, "a2 is next and needs more"
    queued.release("a0")
    assert [queued.resume() for _ in range(3)] == ["a2", "small", None]


def test_few_grammars_are_compiled_again_at_the_same_time() -> None:
    queued = HeldGrammars(max_waiting_bytes=100)
    queued.admit("first", "", spec("first"), 100)
    for number in range(2 * MAX_RESUMED):
        queued.admit(str(number), "", spec(str(number)), 1)
    queued.release("first")
    resumed = [queued.resume() for _ in range(MAX_RESUMED + 1)]
    assert resumed == [*map(str, range(MAX_RESUMED)), None]
    queued.admit("0", "", spec("0"), 1)
    assert queued.resume() == str(MAX_RESUMED)


def test_a_more_urgent_request_gets_the_room_of_the_newest_of_the_least_urgent() -> None:
    queued = HeldGrammars(max_waiting_bytes=100)
    for name, size, urgency in [("usual", 30, 0), ("old", 30, 10), ("new", 30, 10), ("later", 10, 5)]:
        assert queued.admit(name, "a", spec(name), size, urgency)
    assert not queued.admit("equal", "a", spec("equal"), 10, 10)
    assert queued.displace() == [], "equally urgent ones keep theirs"
    assert not queued.admit("huge", "b", spec("huge"), 71, 0)
    assert queued.displace() == [], "all that are less urgent have 70"
    assert not queued.admit("urgent", "b", spec("urgent"), 25, -1)
    assert queued.displace() == ["new"]
    assert (queued.displace(), queued.resume()) == ([], "urgent")
    queued.release("huge")
    queued.release("usual")
    assert [queued.resume() for _ in range(2)] == ["equal", None], "new comes after it, and does not fit"
    queued.release("old")
    assert queued.resume() == "new"
    assert queued.admit("new", "a", spec("new"), 30, 10)
    assert queued.waiting.bytes.total == 25 + 10 + 10 + 30


def test_what_is_compiled_again_is_not_displaced() -> None:
    queued = HeldGrammars(max_waiting_bytes=100)
    queued.admit("first", "a", spec("first"), 100, 10)
    queued.admit("again", "a", spec("again"), 100, 10)
    queued.release("first")
    assert queued.resume() == "again"
    queued.admit("urgent", "a", spec("urgent"), 100, 0)
    assert queued.displace() == []
    assert queued.admit("again", "a", spec("again"), 100, 10)
    assert queued.displace() == ["again"]


def test_grammars_of_running_requests_are_bounded_and_a_tenant_has_its_share() -> None:
    held = HeldGrammars(max_waiting_bytes=1000, max_bytes=100)
    for number in range(3):
        name = f"a{number}"
        assert held.admit(name, "a", spec(name), 25) == (number < 3)
        held.start(name)
    assert held.waiting.bytes.total == 0
    assert not held.admit("a3", "a", spec("a3"), 1), "it has three quarters"
    assert held.admit("b", "b", spec("b"), 20), "others find room, though one waits"
    assert not held.admit("c", "c", spec("c"), 10)
    assert held.displace() == [], "a running request keeps its grammar"
    held.release("a0")
    assert not held.admit("again", "a", spec("a1"), 25), "a3 is not overtaken"
    assert [held.resume() for _ in range(4)] == ["a3", "c", "again", None]
    assert held.all.bytes.total == 25 + 25 + 1 + 20 + 10, "equal ones count once"
    for name in ("a1", "a2", "b", "again", "c", "a3"):
        held.release(name)
    assert held.all.bytes.total == 0
    assert held.admit("huge", "a", spec("huge"), 1000), "one alone may be of any size"


def test_who_holds_a_grammar_no_longer_is_not_charged_for_it() -> None:
    held = HeldGrammars(max_waiting_bytes=1000, max_bytes=100)
    for name, tenant in [("a", "a"), ("b", "b"), ("c", "c")]:
        assert held.admit(name, tenant, spec("shared"), 60)
        held.start(name)
    assert [held.all.bytes.held_by(tenant) for tenant in "abc"] == [60, 0, 0], "equal ones count once"
    held.release("b")
    held.release("a")
    assert [held.all.bytes.held_by(tenant) for tenant in "abc"] == [0, 0, 60]
    assert held.admit("own", "a", spec("own"), 30), "it holds nothing but this"
    assert not held.admit("more", "c", spec("more"), 10), "it holds more than its share"
    held.release("c")
    assert held.all.bytes.total == 30


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "resume", "release", "start", "displace"]),
            st.integers(0, 9),
            st.integers(0, 60),
            st.integers(0, 2),
        )
    )
)
def test_the_bytes_are_those_of_the_grammars_held(events: list[tuple[str, int, int, int]]) -> None:
    queued = HeldGrammars(max_waiting_bytes=100, max_bytes=150)
    held, running, sizes = dict[str, str](), set[str](), dict[str, int]()
    waiting = set[str]()
    for number, (event, choice, size, urgency) in enumerate(events):
        request_id, text = str(choice), str(choice)
        if event == "admit":
            size = sizes.setdefault(text, size)
            if queued.admit(str(number), str(number % 3), spec(text), size, urgency):
                held[str(number)] = text
            else:
                waiting.add(str(number))
        elif event == "resume" and (resumed := queued.resume()) is not None:
            waiting.remove(resumed)
            held[resumed] = str(events[int(resumed)][1])
        elif event == "start" and request_id in held:
            queued.start(request_id)
            running.add(request_id)
        elif event == "displace":
            for displaced in queued.displace():
                assert displaced not in running
                del held[displaced]
                waiting.add(displaced)
        elif event == "release":
            queued.release(request_id)
            held.pop(request_id, None)
            waiting.discard(request_id)
        of_waiting = {text for each, text in held.items() if each not in running}
        assert queued.waiting.bytes.total == sum(sizes[text] for text in of_waiting) <= 100
        assert queued.all.bytes.total == sum(sizes[text] for text in set(held.values())) <= 150
        for shares, ids in ((queued.waiting.bytes, held.keys() - running), (queued.all.bytes, held.keys())):
            charged = [shares.held_by(str(tenant)) for tenant in range(3)]
            assert sum(charged) == shares.total
            for tenant, num_bytes in enumerate(charged):
                own = {held[each] for each in ids if int(each) % 3 == tenant}
                assert num_bytes <= sum(sizes[text] for text in own), "others hold the rest"
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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr("argosy_engine.structured.manager.GrammarState", Matcher)
        settings = {"block_size": BLOCK, "max_num_seqs": 1, "async_scheduling": False, **settings}
        args = EngineArgs.of(model="builtin://tiny", **settings)
        self.core = EngineCore(args, FakeExecutor())
        self.core.structured.close()
        self.backend = Backend()
        queue = CompileQueue(
            self.backend, num_threads=4, cache_bytes=0, start_thread=self.backend.threads.append
        )
        self.core.structured = StructuredOutputManager(queue, self.core.config.vocab_size, (0,))
        self.core.structured.held.waiting.bytes.limit = 200
        self.ended: dict[str, EngineCoreOutput] = {}

    def add(self, *names: str, priority: int = 0, has_grammar: bool = True) -> None:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        for name in names:
            grammar = GrammarRequest(spec(name)) if has_grammar else None
            request = EngineCoreRequest(
                name, [1] * 5, params, 0.0, grammar=grammar, tenant=name[:1], priority=priority
            )
            self.core.add_request(request)

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
    assert rig.core.structured.held.all.bytes.total == 0
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


@pytest.mark.parametrize("is_copied", [False, True])
def test_less_urgent_requests_that_wait_do_not_keep_the_room_from_urgent_ones(
    is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold all of it, and never start, because others that are more urgent keep the slot taken."""
    rig = Core(monkeypatch, scheduling_policy="priority")
    manager = rig.core.structured
    if is_copied:
        rig.core.structured = CopiedGrammars(manager, lambda own: own or b"", is_leader=True)
    rig.add("z0", "z1", has_grammar=False)
    rig.add("a1", "a2", "a3", priority=10)
    rig.step()
    rig.step()
    rig.add("b", priority=-5)
    for number in range(10):
        rig.step()
        rig.core.scheduler.check()
        rig.add(f"y{number}", has_grammar=False)
    assert rig.ended["b"].finish_reason is FinishReason.STOP
    while rig.core.has_work or rig.backend.threads:
        rig.step()
    assert {rig.ended[name].finish_reason for name in ("a1", "a2", "a3")} == {FinishReason.STOP}
    assert manager.held.all.bytes.total == 0


def test_grammars_of_running_requests_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Core(monkeypatch, max_num_seqs=16)
    held = rig.core.structured.held
    held.waiting.bytes.limit, held.all.bytes.limit = 1 << 30, 800
    names = [f"a{number}" for number in range(12)]
    rig.add(*names)
    rig.step()
    assert len(rig.core.scheduler.running) == 6, "three quarters of the room are a tenant's"
    rig.add("b")
    rig.step()
    assert "b" in [each.request_id for each in rig.core.scheduler.running]
    while rig.core.has_work or rig.backend.threads:
        rig.step()
        assert held.all.bytes.total <= 800
    assert {rig.ended[name].finish_reason for name in (*names, "b")} == {FinishReason.STOP}
    assert held.all.bytes.total == 0


def test_usual_grammars_that_always_wait_do_not_keep_others_out() -> None:
    held = HeldGrammars(max_waiting_bytes=100)
    assert held.admit("0", "a", spec("usual"), 40)
    assert not held.admit("large", "b", spec("large"), 80)
    assert not held.admit("small", "c", spec("small"), 1), "those that wait are not overtaken"
    resumed, number = list[str](), 0
    for number in range(1, 20):
        held.admit(str(number), "a", spec("usual"), 40)
        held.start(str(number - 1))
        while (request_id := held.resume()) is not None:
            resumed.append(request_id)
    assert resumed[:2] == ["large", "small"]


def test_a_request_that_has_waited_for_room_may_wait_for_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Core(monkeypatch)
    rig.add("a", "b", "c", "d")
    rig.step()
    core, now = rig.core, 1000.0
    assert core.structured.is_deferred("d")
    core.watchdog = Watchdog(30.0, lambda: now)
    for _ in range(20):
        now += 5.0
        core.tick()
        rig.core.scheduler.requests["a"].num_preemptions += 1  # not stalled
        rig.core.scheduler.requests["b"].num_preemptions += 1
        rig.core.scheduler.requests["c"].num_preemptions += 1
    core.abort_requests(["b"])
    assert not core.structured.is_deferred("d"), "it is compiled again"
    now += 5.0
    core.tick()
    assert "d" in core.scheduler.requests


def test_ever_more_urgent_requests_of_a_tenant_do_not_find_the_queue_empty() -> None:
    class Backend:
        def new_compilation(self):
            return self

        def warm_up(self): ...
        def kill(self): ...
        def close(self): ...

    queue = CompileQueue(Backend(), num_threads=1, start_thread=lambda run: None)
    refused = []
    for number in range(2000):
        queue.submit(str(number), spec(str(number)), refused.append, "a", 5000 - number)
    assert queue.num_queued <= 768
    assert len(refused) >= 900
    num_refused, num_queued = len(refused), queue.num_queued
    queue.submit("b", spec("b"), refused.append, "b", 5000)
    assert (len(refused), queue.num_queued) == (num_refused, num_queued + 1)
