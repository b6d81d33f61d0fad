"""Report of a replay: figures per policy, and a table that compares them.

Owns: percentiles, shares, the table. Must not know: how the figures were measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from argosy_router.simulation.simulator import SimulationOutcome

BASELINE = "round-robin"


class PolicyResult(Struct, frozen=True, kw_only=True):
    """Figures of one policy on one number of replicas."""

    policy: str
    replicas: int
    cached_share: float
    """Share of prompt tokens found in a cache."""
    oracle_share: float
    """The same for an unbounded cache shared by all replicas."""
    predicted_share: float
    """Share of prompt tokens that the router expected to be cached."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_error_mean_s: float
    """Mean absolute difference between predicted and simulated time to first token."""
    imbalance: float
    """Busiest replica's prefill time over the mean."""
    makespan_s: float


def result_of(outcome: SimulationOutcome, oracle_tokens: int) -> PolicyResult:
    """Compute the figures of one replay."""
    ttft = sorted(outcome.ttft_s)
    errors = [abs(a - b) for a, b in zip(outcome.ttft_s, outcome.predicted_ttft_s, strict=True)]
    mean_busy = sum(outcome.busy_s) / len(outcome.busy_s)
    return PolicyResult(
        policy=outcome.policy,
        replicas=outcome.replicas,
        cached_share=outcome.cached_tokens / outcome.prompt_tokens,
        oracle_share=oracle_tokens / outcome.prompt_tokens,
        predicted_share=outcome.predicted_tokens / outcome.prompt_tokens,
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        ttft_error_mean_s=sum(errors) / len(errors),
        imbalance=max(outcome.busy_s) / mean_busy if mean_busy else 1.0,
        makespan_s=outcome.makespan_s,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of an ordered sample lies (nearest rank)."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


HEADER = (
    *("REPLICAS", "POLICY", "CACHED", "OF ORACLE", "TTFT P50", "P90", "P99"),
    *("P90 / RR", "P99 / RR", "IMBALANCE"),
)


def rows(results: Sequence[PolicyResult]) -> list[tuple[str, ...]]:
    """Rows of the table under `HEADER`; the ratios compare to round-robin on the same number of replicas."""
    baselines = {result.replicas: result for result in results if result.policy == BASELINE}
    table: list[tuple[str, ...]] = []
    for result in results:
        baseline = baselines.get(result.replicas)
        ratios = ("-", "-")
        if baseline is not None:
            ratios = (
                f"{result.ttft_p90_s / baseline.ttft_p90_s:.2f}",
                f"{result.ttft_p99_s / baseline.ttft_p99_s:.2f}",
            )
        of_oracle = result.cached_share / result.oracle_share if result.oracle_share else 1.0
        table.append(
            (
                str(result.replicas),
                result.policy,
                f"{result.cached_share:.1%}",
                f"{of_oracle:.1%}",
                f"{result.ttft_p50_s:.3f}s",
                f"{result.ttft_p90_s:.3f}s",
                f"{result.ttft_p99_s:.3f}s",
                *ratios,
                f"{result.imbalance:.2f}",
            )
        )
    return table
