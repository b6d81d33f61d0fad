"""A call that takes too long is abandoned; the calls after it are still made, and their caller continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from argosy_engine.structured.grammar_state import BoundedThread, TookTooLong


@pytest.fixture
def bounded() -> Iterator[BoundedThread]:
    thread = BoundedThread(cpu_s=0.05)
    yield thread
    thread.close()


def burn_until(event: threading.Event) -> Callable[[], None]:
    def burn() -> None:
        while not event.is_set():
            pass

    return burn


def test_calls_are_made_in_order_and_what_they_raise_is_theirs(bounded: BoundedThread) -> None:
    made: list[int] = []

    def broken() -> None:
        raise KeyError("broken")

    errors = bounded.run([lambda: made.append(0), broken, lambda: made.append(2)])
    assert made == [0, 2]
    assert [(index, type(error)) for index, error in errors.items()] == [(1, KeyError)]
    assert bounded.run([]) == {}


def test_a_call_that_uses_up_its_time_is_given_up(bounded: BoundedThread) -> None:
    made, given_up, stop = list[str](), list[int](), threading.Event()
    errors = bounded.run(
        [lambda: made.append("before"), burn_until(stop), lambda: made.append("after")], given_up.append
    )
    assert made == ["before", "after"]
    assert given_up == [1]
    assert isinstance(errors[1], TookTooLong)
    assert bounded.num_given_up == 1
    assert not bounded.run([lambda: made.append("next")])
    stop.set()
    while bounded.num_given_up:
        time.sleep(0)
    assert made == ["before", "after", "next"]


def test_time_spent_waiting_does_not_count(bounded: BoundedThread) -> None:
    """A thread that does not get the CPU, on a busy machine, is not slow."""
    waits = threading.Event()
    threading.Timer(0.2, waits.set).start()
    assert not bounded.run([lambda: waits.wait(30)])
    assert bounded.num_given_up == 0


def test_many_calls_that_take_too_long_get_less_and_less_time(bounded: BoundedThread) -> None:
    """All of them may come from one client, and all other clients wait for them."""
    # Each call ends once it is abandoned: burning threads that hold the GIL would only slow the test down.
    stops, made = [threading.Event() for _ in range(20)], list[int]()
    calls = [burn_until(stop) for stop in stops]
    errors = bounded.run([*calls, lambda: made.append(0)], lambda index: stops[index].set())
    assert made == [0]
    bounds = [error.cpu_s for error in errors.values() if isinstance(error, TookTooLong)]
    assert len(bounds) == 20
    assert bounds[0] == 0.05
    assert sum(bounds) <= 4 * bounds[0]
