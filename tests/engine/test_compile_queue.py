"""The queue, deadlines, shares and cache of grammar compilations, with a backend that the test holds back and a clock
that the test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from argosy_engine.structured.compile_queue import (
    EXPIRED_S,
    MAX_QUEUED_PER_KEY,
    MIN_LONG,
    QUANTUM_S,
    TICK_S,
    BackendUnavailable,
    CompileQueue,
    NoGrammar,
    start_thread,
)
from argosy_engine.structured.structured_outputs_params import GrammarSpec


class FakeBackend:
    """Grammars are their own text; those that begin with `slow` take until `release` or until they are killed."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.compiled: list[str] = []
        self.killed: list[str] = []
        self.lowered: list[str] = []
        self.is_broken = False
        self.num_warm_ups = 0
        self.begun = threading.Semaphore(0)
        """Counts calls that have begun, each in a thread of its own."""
        self.ended = threading.Semaphore(0)

    def warm_up(self) -> None:
        self.num_warm_ups += 1
        self.begun.release()
        is_broken = self.is_broken
        self.ended.release()
        if is_broken:
            raise BackendUnavailable("no more processes")

    def new_compilation(self) -> FakeCompilation:
        if self.is_broken:
            raise OSError("no more processes")
        return FakeCompilation(self)

    def close(self) -> None: ...


class FakeCompilation:
    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self._is_killed = False
        self._may_end = threading.Event()
        self._text = ""

    def run(self, spec: GrammarSpec) -> Any:
        self._text = spec.text
        self._backend.compiled.append(spec.text)
        self._backend.begun.release()
        if spec.text.startswith("slow") and not self._backend.released.is_set():
            self._may_end.wait()
            self._backend.killed.append(spec.text)
            self._backend.ended.release()
            raise BackendUnavailable("killed")
        if spec.text == "bad":
            raise RuntimeError("[10:11:12] /native/parser.cc:1: Rule x is not defined")
        return SimpleNamespace(num_bytes=100, text=spec.text)

    def kill(self) -> None:
        self._may_end.set()

    def lower_priority(self) -> None:
        self._backend.lowered.append(self._text)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Waiter:
    """Collects one answer."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self._done = threading.Event()

    def __call__(self, result: Any) -> None:
        self.results.append(result)
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Any:
        assert self._done.wait(30), "no answer"
        assert len(self.results) == 1, "more than one answer"
        return self.results[0]


class Rig:
    """A compile queue whose time passes by `after`. Each of its threads has begun before anything else happens."""

    def __init__(self, num_threads: int = 1, **options: Any) -> None:
        self.backend = FakeBackend()
        self.clock = Clock()
        options = {"start_thread": self._start_thread, **options}
        self.queue = CompileQueue(
            self.backend, num_threads=num_threads, deadline_s=30.0, clock=self.clock, **options
        )

    def _start_thread(self, target: Callable[[], None]) -> None:
        start_thread(target)
        assert self.backend.begun.acquire(timeout=30)

    def submit(self, text: str, key: str = "", urgency: int = 0) -> Waiter:
        """Asks for a grammar; the request's id is its text, key and urgency."""
        waiter = Waiter()
        request_id = f"{text}{key}{urgency or ''}"
        grammar = self.queue.submit(request_id, GrammarSpec("grammar", text), waiter, key, urgency)
        if grammar is not None:
            waiter(grammar)
        return waiter

    def compile(self, text: str) -> Any:
        return self.submit(text).wait()

    def after(self, seconds: float) -> None:
        """Lets time pass, in ticks."""
        ends = self.clock.now + seconds
        while self.clock.now < ends:
            self.clock.now = min(self.clock.now + TICK_S, ends)
            self.queue.tick()


def test_equal_grammars_are_compiled_once_and_kept_within_the_cache() -> None:
    limit = 350
    rig = Rig(num_threads=2, cache_bytes=limit)
    for text in ("a", "b", "c"):
        assert rig.compile(text).text == text
    assert rig.compile("a").text == "a"  # used last
    assert rig.compile("d").text == "d"  # evicts b
    assert rig.backend.compiled == ["a", "b", "c", "d"]
    assert (rig.queue.num_cached, rig.queue.cached_bytes) == (3, 300)
    assert rig.compile("b").text == "b"
    assert rig.backend.compiled == ["a", "b", "c", "d", "b"]
    for number in range(50):
        rig.compile(f"n{number}")
        assert rig.queue.cached_bytes <= limit


def test_grammar_errors_do_not_contain_native_source_locations() -> None:
    rig = Rig()
    assert rig.compile("bad") == NoGrammar("the grammar does not compile: Rule x is not defined")
    assert rig.compile("good").text == "good"


def test_equal_grammars_asked_for_together_are_compiled_once() -> None:
    rig = Rig()
    first = rig.submit("slow")
    others = [Waiter() for _ in range(4)]
    for number, waiter in enumerate(others):
        assert rig.queue.submit(str(number), GrammarSpec("grammar", "slow"), waiter) is None
    rig.after(31)
    assert {waiter.wait() for waiter in (first, *others)} == {first.wait()}
    assert rig.backend.compiled == ["slow"]


@pytest.mark.parametrize("failing", ["thread", "backend"])
def test_a_failed_start_fails_its_request_only(failing: str) -> None:
    """One failed start used to keep its place for ever: with one compile thread, every later grammar waited."""
    is_failing = True

    def start(target: Callable[[], None]) -> None:
        if is_failing and failing == "thread":
            raise RuntimeError("can't start new thread")
        start_thread(target)

    rig = Rig(start_thread=start)
    rig.backend.is_broken = failing == "backend"
    for number in range(3):
        refused = rig.compile(f"first {number}")
        assert refused.is_overload
        assert "not available" in refused.reason
    is_failing = rig.backend.is_broken = False
    assert rig.compile("later").text == "later"
    assert rig.compile("first 0").text == "first 0"
    assert (rig.queue.num_running, rig.queue.num_queued) == (0, 0)


def test_the_deadline_counts_from_submission_whatever_has_not_begun_yet() -> None:
    rig = Rig(start_thread=lambda target: None)  # the backend's import never comes to an end
    waiters = [rig.submit(text) for text in ("slow a", "slow b")]
    rig.after(29.5)
    assert not any(waiter.is_done for waiter in waiters)
    rig.after(1.0)
    for waiter in waiters:
        assert "did not compile within 30 s" in waiter.wait().reason


def test_a_compilation_past_its_deadline_is_killed_and_not_tried_again() -> None:
    rig = Rig()
    waiter = rig.submit("slow")
    rig.after(31)
    assert "did not compile within" in waiter.wait().reason
    assert rig.backend.ended.acquire(timeout=30)
    assert rig.backend.killed == ["slow"]
    assert rig.compile("quick").text == "quick"
    assert "did not compile within" in rig.compile("slow").reason
    assert rig.backend.compiled == ["slow", "quick"]


def test_a_grammar_that_did_not_compile_in_time_is_tried_again_later() -> None:
    """The machine may have been busy then."""
    rig = Rig()
    rig.submit("slow")
    rig.after(31)
    rig.backend.released.set()
    rig.clock.now += EXPIRED_S / 2
    assert "did not compile within" in rig.compile("slow").reason
    rig.clock.now += EXPIRED_S / 2
    assert rig.compile("slow").text == "slow"


def test_a_compilation_without_waiting_requests_is_killed() -> None:
    rig = Rig()
    running, queued, later = rig.submit("slow a"), rig.submit("slow b"), rig.submit("quick")
    rig.queue.cancel("slow b")
    rig.queue.cancel("slow a")
    assert later.wait().text == "quick"
    assert rig.backend.ended.acquire(timeout=30)
    assert rig.backend.compiled == ["slow a", "quick"], "what nobody waits for is not begun"
    assert not running.is_done
    assert not queued.is_done
    assert rig.queue.num_running == 0


def test_a_compilation_continues_while_a_request_waits_for_it() -> None:
    rig = Rig()
    rig.submit("slow")
    other = Waiter()
    rig.queue.submit("other", GrammarSpec("grammar", "slow"), other)
    rig.queue.cancel("slow")
    assert rig.queue.num_running == 1
    rig.queue.cancel("other")
    assert rig.queue.num_running == 0


def test_a_long_compilation_gives_its_slot_to_the_next() -> None:
    rig = Rig()
    long, quick = rig.submit("slow"), rig.submit("quick")
    rig.after(QUANTUM_S + TICK_S)
    assert quick.wait().text == "quick"
    assert rig.backend.lowered == ["slow"]
    assert not long.is_done


def test_keys_take_turns() -> None:
    rig = Rig()
    greedy = [rig.submit(f"slow {number}", key="greedy") for number in range(50)]
    modest = rig.submit("quick", key="modest")
    rig.after(2 * (QUANTUM_S + TICK_S))
    assert modest.wait().text == "quick"
    assert not greedy[-1].is_done


@pytest.mark.parametrize("leaves", [False, True])
def test_a_queued_compilation_of_two_keys_is_begun_at_the_first_turn_of_either(leaves: bool) -> None:
    """The second key's request used to wait for its turn among all of the first key's."""
    rig = Rig()
    for number in range(50):
        rig.submit(f"slow {number}", key="greedy")
    first, second = rig.submit("shared", key="greedy"), rig.submit("shared", key="modest")
    if leaves:
        rig.queue.cancel("sharedgreedy")
    rig.after(2 * (QUANTUM_S + TICK_S))
    assert second.wait().text == "shared"
    assert leaves or first.wait().text == "shared"
    assert rig.backend.compiled.count("shared") == 1


def test_a_compilation_whose_second_key_leaves_waits_for_the_firsts_turn() -> None:
    rig = Rig()
    greedy = [rig.submit(f"slow {number}", key="greedy") for number in range(3)]
    shared = rig.submit("shared", key="greedy")
    rig.submit("shared", key="modest")
    rig.queue.cancel("sharedmodest")
    rig.after(2 * (QUANTUM_S + TICK_S))
    assert not shared.is_done
    rig.after(2 * (QUANTUM_S + TICK_S))
    assert shared.wait().text == "shared"
    assert not greedy[0].is_done


def test_a_key_joins_a_full_queue_but_not_with_a_full_share_of_its_own() -> None:
    rig = Rig()
    for number in range(MAX_QUEUED_PER_KEY + 1):  # one of them runs
        for key in ("first", "second"):
            rig.submit(f"slow {number} {key}", key=key)
    assert rig.submit("slow 9 first", key="second").wait().is_overload
    assert not rig.submit("slow 9 first", key="first").is_done
    assert not rig.submit("slow 9 first", key="third").is_done
    assert not rig.submit("slow 0 first", key="second").is_done, "it runs and takes no place in the queue"


def test_the_key_that_joined_a_greedy_ones_compilation_keeps_it() -> None:
    """It was ended with the greedy key's others, for the greedy key's reason."""
    rig = Rig()
    greedy = [rig.submit(f"slow {number}", key="greedy") for number in range(MIN_LONG)]
    rig.after((MIN_LONG + 1) * QUANTUM_S)
    joined = rig.submit(f"slow {MIN_LONG - 1}", key="modest")
    rig.submit("slow of a third", key="third")
    rig.after(2 * QUANTUM_S)
    assert not joined.is_done
    assert not greedy[MIN_LONG - 1].is_done
    assert greedy[MIN_LONG - 2].wait().is_overload


def test_the_key_with_most_long_compilations_loses_its_newest() -> None:
    rig = Rig()
    greedy = [rig.submit(f"slow {number}", key="greedy") for number in range(MIN_LONG)]
    rig.after((MIN_LONG + 1) * QUANTUM_S)
    assert not any(waiter.is_done for waiter in greedy)
    modest = rig.submit("slow modest", key="modest")
    rig.after(2 * QUANTUM_S)
    assert greedy[-1].wait().is_overload
    assert not modest.is_done
    assert not any(waiter.is_done for waiter in greedy[:-1])


def test_more_urgent_requests_go_first_and_find_a_queue_full_of_others_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of one key, or of all, that could wait kept its urgent ones from being compiled at all."""
    monkeypatch.setattr("argosy_engine.structured.compile_queue.MAX_QUEUED", 4)
    monkeypatch.setattr("argosy_engine.structured.compile_queue.MAX_QUEUED_PER_KEY", 2)
    rig = Rig()
    slow = rig.submit("slow")
    later = [rig.submit(f"later {number}", "ab"[number % 2], 10) for number in range(4)]
    shared = rig.submit("later 3", "c", 5)
    assert rig.submit("latest", "d", 10).wait().is_overload, "the queue is full"
    urgent = [rig.submit(f"urgent {number}", "a") for number in range(2)]
    assert rig.submit("urgent 2", "a").wait().is_overload, "so many may wait of one key"
    rig.backend.released.set()
    rig.queue.cancel("slow")
    for waiter in (*urgent, shared, *later):
        assert waiter.wait().text
    order = ["slow", "urgent 0", "urgent 1", "later 3", "later 0", "later 1", "later 2"]
    assert rig.backend.compiled == order
    assert not slow.is_done


def test_one_key_cannot_fill_the_queue() -> None:
    rig = Rig()
    for number in range(MAX_QUEUED_PER_KEY + 1):  # one of them runs
        rig.submit(f"slow {number}", key="greedy")
    assert rig.submit("slow, one more", key="greedy").wait().is_overload
    assert not rig.submit("slow too", key="modest").is_done


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_backend_is_warmed_up_once_and_its_failure_costs_no_grammar(is_broken: bool) -> None:
    rig = Rig()
    rig.backend.is_broken = is_broken
    rig.queue.warm_up()
    assert rig.backend.ended.acquire(timeout=30)
    rig.queue.warm_up()
    rig.backend.is_broken = False
    assert not isinstance(rig.submit("grammar").wait(), NoGrammar)
    assert rig.backend.num_warm_ups == 1


def test_closing_answers_everyone() -> None:
    rig = Rig()
    waiters = [rig.submit(f"slow {number}") for number in range(3)]
    rig.queue.close()
    assert [waiter.wait() for waiter in waiters] == [NoGrammar("the engine is shutting down", True)] * 3
    assert rig.submit("late").wait().is_overload
