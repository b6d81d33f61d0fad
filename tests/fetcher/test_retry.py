"""Delays between attempts."""

from __future__ import annotations

import threading

import pytest

from argosy_fetcher.errors import ModelNotFound, TransientError
from argosy_fetcher.retry import Attempts, Cancelled, RetryPolicy, retrying


def test_delays_double_up_to_the_cap_and_vary() -> None:
    policy = RetryPolicy()
    for failures, longest in [(1, 0.5), (2, 1.0), (4, 4.0), (7, 30.0), (10_000, 30.0)]:
        delays = [policy.delay(failures, None) for _ in range(200)]
        assert longest / 2 <= min(delays) < max(delays) <= longest


@pytest.mark.parametrize(("retry_after", "delay"), [(0.0, 0.0), (7.0, 7.0), (1e9, 300.0), (-5.0, 0.0)])
def test_retry_after_is_bounded(retry_after: float, delay: float) -> None:
    assert RetryPolicy().delay(1, retry_after) == delay


@pytest.mark.parametrize("retry_after", [float("nan"), float("inf")])
def test_a_retry_after_that_is_no_number_is_ignored(retry_after: float) -> None:
    assert 0.25 <= RetryPolicy().delay(1, retry_after) <= 0.5


def test_the_last_failure_is_raised_with_its_retry_after() -> None:
    attempts = Attempts(
        "it", RetryPolicy(max_failures=2, wait=lambda event, seconds: None), lambda text: None
    )
    attempts.failed(TransientError("503"))
    attempts.progressed()
    attempts.failed(TransientError("503"))
    with pytest.raises(TransientError, match="it: gave up after 2 failures in a row: 429") as raised:
        attempts.failed(TransientError("429", 9.0))
    assert raised.value.retry_after_s == 9.0


def test_single_cuts_are_not_worth_a_note() -> None:
    notes: list[str] = []
    attempts = Attempts("it", RetryPolicy(wait=lambda event, seconds: None), notes.append)
    attempts.failed(TransientError("cut"))
    assert notes == []
    attempts.failed(TransientError("cut"))
    assert len(notes) == 1
    assert notes[0].startswith("it: cut; next attempt in ")


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
