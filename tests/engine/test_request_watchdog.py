"""The watchdog fails requests without progress, unless they wait for a good reason. The clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest

from argosy_engine.config import EngineArgs
from argosy_engine.core.engine_core import CHECK_INTERVAL_S, EngineCore, Watchdog
from argosy_engine.core.request import Request, RequestStatus
from argosy_engine.messages import EngineCoreRequest, ErrorKind, FinishReason
from argosy_engine.params import SamplingParams
from fake_executor import BLOCK, FakeExecutor

TIMEOUT_S = 60.0


class Watched:
    """Requests by name, and a watchdog whose time passes by `after`."""

    def __init__(self, *names: str) -> None:
        self.now = 1000.0
        self.watchdog = Watchdog(TIMEOUT_S, lambda: self.now)
        self.requests = {name: request(name) for name in names}
        self.num_arrived = self.num_computed = self.leaving = 0

    def after(
        self, seconds: float, moving: str = "", arriving: int = 0, leaving: int = 0, short: int = 0
    ) -> list[str]:
        """The requests found stalled by the end of this time.

        Args:
            moving: the request that gets tokens.
            arriving: requests that arrive between two looks.
            leaving: how many of them have left by the next look.
            short: requests that come, get a token, and end between two looks.
        """
        stalled: list[str] = []
        for _ in range(round(seconds / CHECK_INTERVAL_S)):
            self.now += CHECK_INTERVAL_S
            if moving:
                self.requests[moving].append_output(1)
            self._leave()
            for _ in range(arriving):
                self.num_arrived += 1
                self.requests[f"new {self.num_arrived}"] = request(f"new {self.num_arrived}")
            self.leaving = leaving
            self.num_computed += short
            stalled = self.watchdog.check(self.requests.values(), self.num_computed)
        return stalled

    def _leave(self) -> None:
        for name in [name for name in self.requests if name.startswith("new")][: self.leaving]:
            del self.requests[name]


def request(name: str, **changed: Any) -> Request:
    made = Request(EngineCoreRequest(name, [1] * 5, SamplingParams(max_tokens=8), 0.0), BLOCK, True)
    made.status = RequestStatus.RUNNING
    return made


def test_a_request_that_stands_still_is_found_in_time() -> None:
    watched = Watched("a")
    assert watched.after(TIMEOUT_S) == []
    assert watched.after(2 * CHECK_INTERVAL_S) == ["a"]


def test_a_request_that_moves_is_left_alone() -> None:
    watched = Watched("a")
    assert watched.after(100 * TIMEOUT_S, moving="a") == []


def test_a_decoding_request_is_found_although_others_move() -> None:
    watched = Watched("a", "b")
    watched.requests["a"].has_first_token = True
    assert watched.after(2 * TIMEOUT_S, moving="b") == ["a"]


@pytest.mark.parametrize(
    ("status", "has_first_token"),
    [(RequestStatus.WAITING, False), (RequestStatus.RUNNING, False), (RequestStatus.PREEMPTED, True)],
)
def test_a_request_waits_for_its_turn_as_long_as_others_move(
    status: RequestStatus, has_first_token: bool
) -> None:
    watched = Watched("a", "b")
    watched.requests["a"].status = status
    watched.requests["a"].has_first_token = has_first_token
    assert watched.after(100 * TIMEOUT_S, moving="b") == []
    assert watched.after(2 * TIMEOUT_S) == ["a", "b"]


@pytest.mark.parametrize("leaving", [0, 3])
@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED])
def test_a_request_is_found_although_others_arrive_and_leave(status: RequestStatus, leaving: int) -> None:
    """A scheduler that moves nothing used to go unseen for as long as clients came."""
    watched = Watched("a")
    watched.requests["a"].status = status
    assert "a" in watched.after(2 * TIMEOUT_S, arriving=3, leaving=leaving)


def test_a_preemption_is_no_progress() -> None:
    watched = Watched("a", "b")
    watched.requests["a"].status = RequestStatus.WAITING
    stalled: list[str] = []
    for _ in range(30):
        watched.requests["b"].num_preemptions += 1
        stalled = watched.after(CHECK_INTERVAL_S)
    assert stalled == ["a"]


def test_a_request_waits_for_its_turn_while_short_ones_come_and_go() -> None:
    """No look sees any of them twice."""
    watched = Watched("a")
    watched.requests["a"].status = RequestStatus.WAITING
    assert watched.after(100 * TIMEOUT_S, arriving=3, leaving=3, short=3) == []


def test_a_blocked_request_is_found_although_others_move() -> None:
    watched = Watched("a", "b")
    watched.requests["a"].status = RequestStatus.WAITING_FOR_GRAMMAR
    assert watched.after(2 * TIMEOUT_S, moving="b") == ["a"]


def test_time_in_which_the_loop_was_elsewhere_does_not_count() -> None:
    """Weights that are loaded for ten minutes are no reason to fail what came before."""
    watched = Watched("a")
    watched.after(CHECK_INTERVAL_S)
    watched.now += 600.0
    assert watched.watchdog.check(watched.requests.values()) == []


def test_without_a_timeout_nothing_is_failed() -> None:
    watched = Watched("a")
    watched.watchdog.timeout_s = 0.0
    assert watched.after(100 * TIMEOUT_S) == []
    assert watched.watchdog.still_s("a") > TIMEOUT_S


def test_a_request_that_the_core_lost_sight_of_is_answered_and_counted() -> None:
    """As if a fault had left it out of every queue."""
    now = 1000.0
    core = EngineCore(EngineArgs.of(model="builtin://tiny", block_size=BLOCK), FakeExecutor())
    core.watchdog = Watchdog(TIMEOUT_S, lambda: now)
    core.add_request(EngineCoreRequest("lost", [1] * 5, SamplingParams(max_tokens=4), 0.0))
    core.scheduler.requests["lost"].status = RequestStatus.WAITING_FOR_GRAMMAR
    core.scheduler.waiting.remove(core.scheduler.requests["lost"])
    core.scheduler.blocked["lost"] = core.scheduler.requests["lost"]
    core.structured.is_waiting_for = lambda request_id: True  # type: ignore[method-assign]
    for _ in range(20):
        assert not core.has_work
        now += CHECK_INTERVAL_S
        core.tick()
        if core.has_work:
            break
    outputs = core.step()
    (output,) = outputs.outputs
    assert output.finish_reason is FinishReason.ERROR
    assert output.error_kind is ErrorKind.INTERNAL
    assert "no progress" in (output.error or "")
    assert outputs.stats is not None
    assert outputs.stats.num_stalled == 1
    assert core.stats().num_stalled == 0
    core.scheduler.check()


class Rig:
    """A core whose watchdog's time passes by `after`, and to which requests keep coming."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.core = EngineCore(EngineArgs.of(model="builtin://tiny", block_size=BLOCK), FakeExecutor())
        self.core.watchdog = Watchdog(TIMEOUT_S, lambda: self.now)
        self.num_added = 0
        self.errors: dict[str, str] = {}

    def add(self) -> str:
        self.num_added += 1
        request_id = str(self.num_added)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        self.core.add_request(EngineCoreRequest(request_id, [1] * 5, params, 0.0))
        return request_id

    def after(self, seconds: float) -> None:
        """Adds a request and makes a few steps, every second."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.add()
            self.core.tick()
            for _ in range(3):
                outputs = self.core.step().outputs if self.core.has_work else []
                self.errors |= {output.request_id: output.error for output in outputs if output.error}


def test_a_scheduler_that_admits_no_request_is_detected_although_requests_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.core.scheduler, "max_num_seqs", 0)
    first = rig.add()
    rig.after(2 * TIMEOUT_S)
    assert "no progress" in rig.errors[first]
    monkeypatch.undo()
    rig.errors.clear()
    rig.after(3)
    assert not rig.errors, "those that came a moment ago"
    rig.core.scheduler.check()


def test_short_requests_are_progress_for_one_that_waits() -> None:
    rig = Rig()
    waits = rig.add()
    rig.core.scheduler.waiting.remove(rig.core.scheduler.requests[waits])  # its turn never comes
    rig.after(4 * TIMEOUT_S)
    assert not rig.errors
