"""Rate limits of an account: requests and tokens per minute, parallel requests and sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_protocol.errors import BadRequest
from argosy_router.auth.accounts import RateLimited, Reservation, duration
from argosy_router.token_bucket import PERIOD_S, TokenBucket

from .accounts import account


def left(reservation: Reservation, kind: str) -> int:
    """What an answer says is left of a limit."""
    lines = reservation.header_lines.decode().split("\r\n")
    return next(
        int(line.split(": ")[1]) for line in lines if line.startswith(f"x-ratelimit-remaining-{kind}")
    )


def test_a_limit_is_refilled_by_the_minute() -> None:
    limited = account(requests_per_minute=60)
    for _ in range(60):
        limited.reserve(1, 0.0)
    with pytest.raises(RateLimited) as refused:
        limited.reserve(1, 0.0)
    assert "has reached its rate limit of 60 requests per minute" in refused.value.message
    headers = refused.value.headers()
    assert headers["retry-after-ms"] == "1000"
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "1m0s"
    assert "x-ratelimit-limit-tokens" not in headers
    assert left(limited.reserve(1, 1.0), "requests") == 0


def test_tokens_are_settled_by_what_was_used() -> None:
    limited = account(tokens_per_minute=600)
    reservation = limited.reserve(500, 0.0)
    assert left(reservation, "tokens") == 100
    reservation.settle(100)
    limited.reserve(400, 0.0).settle(700)  # 200 more than there were
    with pytest.raises(RateLimited) as refused:
        limited.reserve(100, 0.0)
    assert "has reached its rate limit of 600 tokens per minute" in refused.value.message
    assert refused.value.retry_after_s == pytest.approx(30.0)
    assert left(limited.reserve(100, 30.1), "tokens") == 1


def test_a_request_larger_than_the_limit_needs_all_of_it_and_passes() -> None:
    limited = account(tokens_per_minute=100)
    first = limited.reserve(5000, 0.0)
    with pytest.raises(RateLimited) as refused:
        limited.reserve(50, 0.0)
    assert refused.value.retry_after_s == pytest.approx(30.0), "the bucket is empty, not in debt"
    first.settle(60)
    assert left(limited.reserve(40, 0.0), "tokens") == 0


def test_parallel_requests_are_counted() -> None:
    limited = account(max_parallel_requests=2)
    first, second = limited.reserve(1, 0.0), limited.reserve(1, 0.0)
    with pytest.raises(RateLimited, match=r"has 2 requests in progress, and may have 2$"):
        limited.reserve(1, 0.0)
    first.settle(5)
    first.cancel()
    limited.reserve(1, 0.0)
    with pytest.raises(RateLimited):
        limited.reserve(1, 0.0)
    second.cancel()
    limited.reserve(1, 0.0)


def test_parallel_sequences_are_counted() -> None:
    limited = account(max_parallel_sequences=8)
    first = limited.reserve(1, 0.0, 5)
    with pytest.raises(RateLimited, match="5 sequences in progress, and may have 8"):
        limited.reserve(1, 0.0, 4)
    second = limited.reserve(1, 0.0, 3)
    first.settle(5)
    first.cancel()
    with pytest.raises(RateLimited):
        limited.reserve(1, 0.0, 6)
    second.cancel()
    limited.reserve(1, 0.0, 8)


def test_a_call_that_has_more_sequences_than_its_key_may_is_told_so() -> None:
    limited = account(max_parallel_sequences=8)
    with pytest.raises(BadRequest, match=r"generates 9 sequences .* may have 8 in progress: send smaller"):
        limited.reserve(1, 0.0, 9)
    limited.divide(4, 0.0)
    held = limited.reserve(1, 0.0, 8)  # more than the share of two, alone
    with pytest.raises(RateLimited):
        limited.reserve(1, 0.0)
    held.settle(1)
    limited.reserve(1, 0.0, 2)


@pytest.mark.parametrize(
    ("terms", "routers", "admitted", "told"),
    [
        ({"requests_per_minute": 2}, 2, 1, "its rate limit of 2 requests per minute, {} 2, admits 1"),
        ({"requests_per_minute": 20}, 3, 6, "its rate limit of 20 requests per minute, {} 3, admits 6.7"),
        ({"requests_per_minute": 1}, 2, 1, "its rate limit of 1 requests per minute, {} 2, admits 0.5"),
        ({"tokens_per_minute": 3_000_000}, 2, 1, "3000000 tokens per minute, {} 2, admits 1500000"),
        ({"max_parallel_requests": 4}, 2, 2, "has 2 requests in progress, and may have 4, {} 2, admits 2"),
        ({"max_parallel_sequences": 9}, 3, 3, "has 3 sequences in progress, and may have 9, {} 3, admits 3"),
    ],
)
def test_one_of_several_routers_tells_its_share_of_a_limit(
    terms: dict[str, int], routers: int, admitted: int, told: str
) -> None:
    limited = account(**terms)
    limited.divide(routers, 0.0)
    tokens = 1_500_000 if "tokens_per_minute" in terms else 1
    for _ in range(admitted):
        limited.reserve(tokens, 0.0)
    with pytest.raises(RateLimited) as refused:
        limited.reserve(tokens, 0.0)
    assert refused.value.message.endswith(told.format("of which this router, one of"))


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400), st.integers(0, 800)), max_size=60))
def test_no_minute_passes_more_than_twice_the_limit_plus_what_was_underestimated(
    steps: list[tuple[float, int, int]],
) -> None:
    """A full bucket and a minute's refill: what any token bucket promises."""
    limited = account(tokens_per_minute=1000, requests_per_minute=10)
    now, passed = 0.0, []
    for pause_s, asked, used in steps:
        now += pause_s
        try:
            limited.reserve(asked, now).settle(used)
        except RateLimited as error:
            now += (error.retry_after_s or 0.0) + 1e-6
            limited.reserve(asked, now).cancel()
        else:
            passed.append((now, used))
    for start, _ in passed:
        minute = [used for time, used in passed if start <= time <= start + PERIOD_S]
        assert len(minute) <= 2 * 10
        assert sum(minute[:-1]) <= 2 * 1000 + max(minute)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-500, 1500)), max_size=50))
def test_a_bucket_never_holds_more_than_a_minute(steps: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(1000, 0.0)
    now = 0.0
    for pause_s, amount in steps:
        now += pause_s
        bucket.wait_s(1, now)
        bucket.take(amount)
        assert 0 <= bucket.remaining() <= 1000
        assert bucket.reset_s() >= 0


def test_durations_are_written_as_openai_writes_them() -> None:
    assert [duration(s) for s in (0, 0.0004, 0.12, 1, 1.5, 59.9991, 60, 359.2, 3600)] == [
        *("0ms", "1ms", "120ms", "1s", "1.5s", "1m0s", "1m0s", "6m0s", "60m0s"),
    ]
