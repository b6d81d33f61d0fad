"""The retry budget: a share of the requests, and a floor."""

from __future__ import annotations

from argosy_router.proxy.resilience.retry_budget import MAX_CREDIT, RetryBudget


def test_the_budget_is_a_fifth_of_requests_and_a_floor() -> None:
    budget = RetryBudget(0.0)
    assert sum(budget.spend(0.0) for _ in range(1000)) == MAX_CREDIT
    for _ in range(50):
        budget.earn()
    assert sum(budget.spend(0.0) for _ in range(1000)) in (9, 10)  # a fifth of 50, floats
    assert sum(budget.spend(1.0) for _ in range(1000)) in (10, 11)
