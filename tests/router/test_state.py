"""Load account, health, retry budget, event cutter, usage finder, deadlines: the small state machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from argosy_router.config import ClientLimits
from argosy_router.fleet.health.ejection_limits import may_eject
from argosy_router.fleet.health.replica_health import (
    BASE_EJECTION_S,
    CONSECUTIVE_FAILURES,
    MAX_EJECTION_S,
    ReplicaHealth,
)
from argosy_router.fleet.load_account import LoadAccount
from argosy_router.http.client import ClientConnection
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.errors import ConnectFailed
from argosy_router.http.pool import ConnectionPool
from argosy_router.http.sse import MAX_EVENT_BYTES, EventCutter, EventTooLarge
from argosy_router.http.tls import ClientTls
from argosy_router.proxy.resilience.retry_budget import MAX_CREDIT, RetryBudget
from argosy_router.proxy.upstream.usage_scan import find_usage

# load


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["charge", "first", "release", "report"]))))
def test_every_charge_is_discharged_once(steps: list[tuple[int, str]]) -> None:
    account = LoadAccount()
    charges = {}
    for number, step in steps:
        if step == "charge" and number not in charges:
            charges[number] = account.charge(100 + number)
        elif step == "report":
            account.report(requests=number, tokens=number * 50)
        elif number in charges:
            charge = charges[number]
            charge.first_token() if step == "first" else charge.release()
        assert account.inflight >= 0
        assert account.inflight_tokens >= 0
    for charge in charges.values():
        charge.release()
        charge.release()
    assert (account.inflight, account.inflight_tokens) == (0, 0)


def test_own_dispatches_count_before_and_after_a_report() -> None:
    account = LoadAccount()
    account.report(requests=3, tokens=1000)
    first = account.charge(500)
    assert (account.queued_tokens, account.requests) == (1500, 4)
    account.report(requests=4, tokens=1400)  # the replica has it now, and has begun
    assert (account.queued_tokens, account.requests) == (1400, 4)
    first.first_token()
    assert (account.queued_tokens, account.requests) == (900, 4)
    first.release()
    assert (account.queued_tokens, account.requests) == (900, 3)
    account.forget()
    assert (account.queued_tokens, account.requests) == (0, 0)


# health


def test_ejection_backs_off_and_a_probe_decides() -> None:
    health = ReplicaHealth()
    for _ in range(CONSECUTIVE_FAILURES - 1):
        assert not health.failed(0.0, may_eject=True)
    assert health.failed(0.0, may_eject=True)
    assert not health.admits(0.5)
    now, pauses = 0.0, []
    for _ in range(7):
        pause = 0.0
        while not health.admits(now + pause):
            pause += 0.5
        now += pause
        pauses.append(pause)
        health.dispatched(now)
        assert not health.admits(now), "one probe at a time"
        assert health.failed(now, may_eject=True)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert pauses[0] == BASE_EJECTION_S
    assert pauses[-1] == MAX_EJECTION_S
    now += 30
    health.dispatched(now)
    health.abandoned()
    assert health.admits(now), "a probe that tells nothing is released"
    assert health.succeeded()
    assert not health.is_ejected


def test_one_refused_connection_ejects() -> None:
    health = ReplicaHealth()
    assert health.failed(0.0, may_eject=True, refused=True)
    assert health.is_ejected


@pytest.mark.parametrize(
    ("replicas", "ejected", "allowed"),
    [(1, 0, False), (2, 0, True), (2, 1, False), (3, 1, False), (4, 1, True)],
)
def test_at_most_half_and_never_the_last(replicas: int, ejected: int, allowed: bool) -> None:
    fleet = [ReplicaHealth() for _ in range(replicas)]
    for health in fleet[:ejected]:
        health.failed(0.0, may_eject=True, refused=True)
    assert may_eject(fleet) is allowed
    assert fleet[-1].failed(0.0, refused=True, may_eject=may_eject(fleet)) is allowed


# retry budget


def test_the_budget_is_a_fifth_of_requests_and_a_floor() -> None:
    budget = RetryBudget(0.0)
    assert sum(budget.spend(0.0) for _ in range(1000)) == MAX_CREDIT
    for _ in range(50):
        budget.earn()
    assert sum(budget.spend(0.0) for _ in range(1000)) in (9, 10)  # a fifth of 50, floats
    assert sum(budget.spend(1.0) for _ in range(1000)) in (10, 11)


# events


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["data: a\n\n", "data: b\r\n\r\n", ": ping\n\n", "data: c\ndata: d\n\n", "data: e\r\r"]
        )
    ),
    st.text(alphabet="ab: \n", max_size=8),
    st.integers(1, 9),
)
def test_events_are_cut_at_blank_lines_only(events: list[str], rest: str, step: int) -> None:
    stream = ("".join(events) + rest).encode()
    cutter = EventCutter()
    forwarded = b""
    for start in range(0, len(stream), step):
        piece = cutter.feed(stream[start : start + step])
        forwarded += piece
        if piece:
            assert piece.endswith((b"\n\n", b"\n\r\n", b"\r\r"))
    assert forwarded + cutter.tail == stream
    assert len(forwarded) >= len("".join(events)) - 2  # a CR may still become a CRLF


def test_an_endless_event_is_refused() -> None:
    cutter = EventCutter()
    for _ in range(MAX_EVENT_BYTES // 65536):
        assert cutter.feed(b"x" * 65536) == b""
    with pytest.raises(EventTooLarge):
        cutter.feed(b"x")


# usage

USAGE = b'"usage": {"prompt_tokens": 12, "total_tokens": 20, "prompt_tokens_details": {"cached_tokens": 8}}'


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b"{" + USAGE + b"}", (12, 8, 0)),
        (b'{"usage":{"prompt_tokens":3}}', (3, 0, 0)),
        (b'{"usage":null}', None),
        (b'{"choices":[]}', None),
        (b'data: {"choices":[{"text":"\\"usage\\": {\\"prompt_tokens\\": 99}"}]}', None),
        (b"data: {" + USAGE + b"}\n\ndata: [DONE]\n\n", (12, 8, 0)),
        (b"", None),
    ],
)
def test_usage_is_found_at_the_end(tail: bytes, expected: tuple[int, int, int] | None) -> None:
    usage = find_usage(tail)
    assert (usage and (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)) == expected


# deadlines


async def test_deadlines_move_cheaply_and_fire_once() -> None:
    loop = asyncio.get_running_loop()
    wheel = TimerWheel(loop, tick_s=0.005)
    fired: list[str] = []
    done = asyncio.Event()

    def fire(name: str) -> None:
        fired.append(name)
        if len(fired) == 2:
            done.set()

    late, early, never = (Deadline(wheel, partial(fire, name)) for name in ("late", "early", "never"))
    late.set(0.01)
    never.set(0.02)
    early.set(10.0)
    early.set(0.015)  # moved forward
    late.set(0.05)  # moved back
    never.clear()
    started = loop.time()
    async with asyncio.timeout(5):
        await done.wait()
    assert sorted(fired) == ["early", "late"]
    assert loop.time() - started >= 0.045
    wheel.close()


def test_a_stalled_loop_loses_no_deadline() -> None:
    class StalledLoop(asyncio.AbstractEventLoop):
        now = 0.0

        def time(self) -> float:
            return self.now

        def call_later(
            self, delay: float, callback: Callable[..., object], *_: object, **__: object
        ) -> asyncio.TimerHandle:
            self.timer = callback
            return asyncio.TimerHandle(delay, callback, (), self)

        def get_debug(self) -> bool:
            return False

    loop = StalledLoop()
    wheel = TimerWheel(loop, tick_s=0.1)
    fired: list[str] = []
    moved, due = (Deadline(wheel, partial(fired.append, name)) for name in ("moved", "due"))
    moved.set(0.1)
    moved.set(0.9)
    due.set(0.3)
    loop.now = 0.65
    loop.timer()
    assert fired == ["due"]
    loop.now = 1.05
    loop.timer()
    assert fired == ["due", "moved"]


async def test_a_failing_callback_costs_no_other_deadline(caplog: pytest.LogCaptureFixture) -> None:
    wheel = TimerWheel(asyncio.get_running_loop(), tick_s=0.005)
    fired = asyncio.Event()

    def fail() -> None:
        raise ZeroDivisionError

    for callback, seconds in ((fail, 0.01), (lambda: None, 0.01), (fired.set, 0.05)):
        Deadline(wheel, callback).set(seconds)
    await asyncio.wait_for(fired.wait(), 5)
    assert "ZeroDivisionError" in caplog.text
    wheel.close()


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".b"])
async def test_a_host_that_cannot_be_one_fails_its_waiter(host: str) -> None:
    failed: asyncio.Future[ConnectFailed] = asyncio.get_running_loop().create_future()

    class QueuedRequest:
        def on_connected(self, connection: ClientConnection) -> None:
            raise AssertionError

        def on_connect_failed(self, error: ConnectFailed) -> None:
            failed.set_result(error)

    wheel = TimerWheel(asyncio.get_running_loop())
    pool = ConnectionPool(f"http://{host}:80", ClientLimits(), wheel, ClientTls())
    pool.acquire(QueuedRequest())
    assert "connect failed" in str(await asyncio.wait_for(failed, 5))
    pool.close()
