"""Delays between attempts."""

from __future__ import annotations

import threading

import pytest

from argosy_fetcher.errors import ModelNotFound, TransientError, UnknownHost
from argosy_fetcher.retry import Attempts, Cancelled, Outage, RetryPolicy, retrying
from retry_time import RetryTime


def test_delays_double_up_to_the_cap_and_vary() -> None:
    policy = RetryPolicy()
    for failures, longest in [(1, 0.5), (2, 1.0), (4, 4.0), (7, 30.0), (10_000, 30.0)]:
        delays = [policy.delay(failures, None) for _ in range(200)]
        assert longest / 2 <= min(delays) < max(delays) <= longest


@pytest.mark.parametrize(("retry_after", "delay"), [(7.0, 7.0), (300.0, 300.0), (1e9, 300.0)])
def test_retry_after_is_bounded(retry_after: float, delay: float) -> None:
    assert RetryPolicy().delay(1, retry_after) == delay


@pytest.mark.parametrize("retry_after", [0.0, -5.0, 1.0])
def test_retry_after_does_not_shorten_a_delay(retry_after: float) -> None:
    assert 4.0 <= RetryPolicy().delay(5, retry_after) <= 8.0


@pytest.mark.parametrize("retry_after", [float("nan"), float("inf")])
def test_a_retry_after_that_is_no_number_is_ignored(retry_after: float) -> None:
    assert 0.25 <= RetryPolicy().delay(1, retry_after) <= 0.5


def fail_until_given_up(attempts: Attempts, error: TransientError) -> TransientError:
    """Return what is raised in the end."""
    for _ in range(1000):
        try:
            attempts.failed(error)
        except TransientError as last:
            return last
    raise AssertionError("it never gave up")


def test_five_minutes_without_progress_are_enough() -> None:
    time = RetryTime()
    attempts = Attempts("it", time.policy(), lambda text: None)
    error = fail_until_given_up(attempts, TransientError("503"))
    assert 300 <= time.now <= 330
    assert f"it: gave up after {len(time.waits) + 1} failures in a row and {time.now:.0f} s" in str(error)
    assert str(error).endswith("progress: 503"), "nothing has arrived that could be kept"


def test_what_has_arrived_is_promised_only_if_something_has() -> None:
    attempts = Attempts("it", RetryTime().policy(), lambda text: None)
    attempts.progressed()
    error = fail_until_given_up(attempts, TransientError("503"))
    assert str(error).endswith("503; what has arrived is kept, so another run continues from there")


def test_a_host_that_does_not_exist_is_asked_for_a_few_times() -> None:
    time = RetryTime()
    attempts = Attempts("it", time.policy(), lambda text: None)
    error = fail_until_given_up(attempts, UnknownHost("there is no host x"))
    assert "gave up after 5 failures in a row" in str(error)
    assert "there is no host x" in str(error)
    assert time.now < 10


def test_a_host_that_has_answered_before_is_not_given_up_so_soon() -> None:
    time, outage = RetryTime(), Outage()
    stuck, other = (Attempts(name, time.policy(), lambda text: None, None, outage) for name in ("a", "b"))
    other.progressed()
    fail_until_given_up(stuck, UnknownHost("there is no host x"))
    assert time.now >= 300


def test_the_last_failure_is_raised_with_its_retry_after() -> None:
    attempts = Attempts("it", RetryTime().policy(), lambda text: None)
    assert fail_until_given_up(attempts, TransientError("429", 9.0)).retry_after_s == 9.0


def test_a_wait_that_the_server_asks_for_is_followed_by_attempts() -> None:
    time = RetryTime()
    attempts = Attempts("it", time.policy(), lambda text: None)
    fail_until_given_up(attempts, TransientError("429", 3600.0))
    assert time.waits == [300.0, 300.0]


def test_progress_of_another_file_keeps_a_fetch_alive() -> None:
    time, outage = RetryTime(), Outage()
    stuck, other = (Attempts(name, time.policy(), lambda text: None, None, outage) for name in ("a", "b"))
    for _ in range(100):
        stuck.failed(TransientError("503"))
        other.progressed()
    assert time.now > 1000
    fail_until_given_up(stuck, TransientError("503"))


def test_a_wish_beyond_the_bound_is_told() -> None:
    notes: list[str] = []
    Attempts("it", RetryTime().policy(), notes.append).failed(TransientError("429", 7200.0))
    assert notes == [
        "waiting for it (attempt 2 in 300.0 s): 429; "
        "the server asks for 7200 s, which is more than is waited at once"
    ]


def test_threads_that_fail_alike_write_one_note() -> None:
    notes: list[str] = []
    time, outage = RetryTime(), Outage()
    parts = [Attempts("it", time.policy(), notes.append, None, outage) for _ in range(8)]
    for _ in range(3):
        for attempts in parts:
            attempts.failed(TransientError("503"))
    told = [note.partition(" in ")[0] for note in notes]
    assert told == ["waiting for it (attempt 3", "waiting for it (attempt 4"]


def test_single_cuts_are_not_worth_a_note() -> None:
    notes: list[str] = []
    attempts = Attempts("it", RetryPolicy(wait=lambda event, seconds: None), notes.append)
    attempts.failed(TransientError("cut"))
    assert notes == []
    attempts.failed(TransientError("cut"))
    assert len(notes) == 1
    assert notes[0].startswith("waiting for it (attempt 3 in ")
    assert notes[0].endswith(" s): cut")


def test_cancelling_ends_the_wait() -> None:
    cancelled = threading.Event()
    cancelled.set()
    attempts = Attempts("it", RetryPolicy(first_delay=1000, max_delay=1000), lambda text: None, cancelled)
    with pytest.raises(Cancelled):
        attempts.failed(TransientError("cut"))


def test_errors_that_no_attempt_cures_are_raised_at_once() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        raise ModelNotFound("no such model")

    attempts = Attempts("it", RetryPolicy(), lambda text: None)
    with pytest.raises(ModelNotFound):
        retrying(attempts, call)
    assert calls == [1]
