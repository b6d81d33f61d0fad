"""Warm against cold scale-up, and which replicas to give up, on clocked engines in simulated time.

The routing, the index and the value of caches are the router's own code. `python bench/router/scaling_replay.py` prints
two tables, which docs/log/operator.md explains: time to first token during a doubling of load, and cached prompt tokens
after a halving.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable

from argosy_router.observability.lines import TraceRequest
from argosy_router.simulation import (
    SYNTHETIC_BLOCK_TOKENS,
    EngineModel,
    ScalingSimulation,
    SimulationOutcome,
    Victims,
    conversation_of,
    percentile,
    synthetic_trace,
)

CHANGE_S = 300.0
"""When the load changes."""
REACTION_S = 30.0
"""From the change of the load until new replicas run or old ones leave."""
WATCHED_S = 120.0
"""Seconds after that which are compared."""
WARM_UP_S = 5.0
WARM_UP_TOKENS = 16_384
"""Both as an engine's defaults."""
PREFIX_TOKENS = 2048
MODEL = EngineModel(kv_cache_tokens=400_000)


def trace(seed: int, requests_per_s: float) -> list[TraceRequest]:
    """The load of the larger fleet."""
    count = int(requests_per_s * (CHANGE_S + REACTION_S + WATCHED_S))
    return synthetic_trace(
        count, requests_per_s, groups=60, prefix_tokens=PREFIX_TOKENS, turns=5.0, seed=seed
    )


def halved(requests: Iterable[TraceRequest], is_dropped: Callable[[float], bool]) -> list[TraceRequest]:
    """The trace without every other conversation at the times that `is_dropped` names."""
    blocks = PREFIX_TOKENS // SYNTHETIC_BLOCK_TOKENS
    return [each for each in requests if conversation_of(each, blocks) % 2 or not is_dropped(each.arrival_s)]


def figures(outcome: SimulationOutcome, start_s: float) -> tuple[float, float, float]:
    """Median and p90 of the time to first token, and the share of cached prompt tokens, of requests from `start_s`."""
    watched = [
        (ttft, *cached)
        for ttft, arrival, cached in zip(outcome.ttft_s, outcome.arrival_s, outcome.cached, strict=True)
        if start_s <= arrival < start_s + WATCHED_S
    ]
    ttfts = sorted(ttft for ttft, _, _ in watched)
    share = sum(each[1] for each in watched) / sum(each[2] for each in watched)
    return percentile(ttfts, 0.5), percentile(ttfts, 0.9), share


def doubling(seed: int, replicas: int, rate: float, *, is_warm: bool) -> tuple[float, float, float]:
    """Figures from the start of the new replicas on."""
    requests = halved(trace(seed, rate), lambda arrival: arrival < CHANGE_S)
    simulation = ScalingSimulation(requests, "cost", replicas // 2, MODEL, routers=2, seed=seed)
    start = CHANGE_S + REACTION_S
    warm_up_s, tokens = (WARM_UP_S, WARM_UP_TOKENS) if is_warm else (0.0, 0)
    simulation.add_replicas(
        start, replicas - replicas // 2, MODEL, warm_up_s=warm_up_s, warm_up_tokens=tokens
    )
    return figures(simulation.run(), start)


def halving(seed: int, replicas: int, rate: float, victims: Victims) -> tuple[float, float, float]:
    """Figures from the removal of half of the replicas on."""
    requests = halved(trace(seed, rate), lambda arrival: arrival >= CHANGE_S)
    simulation = ScalingSimulation(requests, "cost", replicas, MODEL, routers=2, seed=seed)
    start = CHANGE_S + REACTION_S
    simulation.remove_replicas(start, replicas // 2, victims, seed=seed)
    return figures(simulation.run(), start)


def show(label: str, runs: list[tuple[float, float, float]]) -> None:
    median, p90, share = (statistics.mean(column) for column in zip(*runs, strict=True))
    print(f"{label:<24}{1000 * median:>10.0f} ms{1000 * p90:>10.0f} ms{100 * share:>10.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=8, help="replicas of the larger fleet")
    parser.add_argument("--rate", type=float, default=32.0, help="requests per second of the larger fleet")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    seeds = range(options.seeds)
    print(f"{'':<24}{'TTFT p50':>13}{'TTFT p90':>13}{'cached':>12}")
    for label, is_warm in (("doubling, cold", False), ("doubling, warm", True)):
        show(label, [doubling(seed, options.replicas, options.rate, is_warm=is_warm) for seed in seeds])
    victims: tuple[Victims, ...] = ("random", "newest", "least-valuable")
    for each in victims:
        show(f"halving, {each}", [halving(seed, options.replicas, options.rate, each) for seed in seeds])


if __name__ == "__main__":
    main()
