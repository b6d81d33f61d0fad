"""The retry budget: a share of the requests, and a floor."""

from __future__ import annotations

import time
from pathlib import Path

from argosy_router.proxy.resilience import MAX_RETRY_CREDIT, RetryBudget

from .failure_scripts import refuse
from .fake_engine import FakeEngine
from .harness import rig


def test_the_budget_is_a_fifth_of_requests_and_a_floor() -> None:
    budget = RetryBudget(0.0)
    assert sum(budget.spend(0.0) for _ in range(1000)) == MAX_RETRY_CREDIT
    for _ in range(50):
        budget.earn()
    assert sum(budget.spend(0.0) for _ in range(1000)) in (9, 10)  # a fifth of 50, floats
    assert sum(budget.spend(1.0) for _ in range(1000)) in (10, 11)


async def test_requests_over_a_rate_limit_earn_no_retries(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-any name=any\nsk-limited name=limited requests_per_minute=1\n")
    async with rig([FakeEngine(script=refuse) for _ in range(3)], api_keys_file=keys) as r:
        now = time.monotonic()
        r.router.requests.shared.now = lambda: now  # the floor adds nothing

        async def attempts(key: str) -> int:
            before = sum(len(engine.requests) for engine in r.engines)
            r.http.headers["authorization"] = f"Bearer sk-{key}"
            assert (await r.chat()).status_code == 429
            return sum(len(engine.requests) for engine in r.engines) - before

        while await attempts("any") > 1:
            pass
        await attempts("limited")
        assert [await attempts("limited") for _ in range(20)] == [0] * 20
        assert await attempts("any") == 1
