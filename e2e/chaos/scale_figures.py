"""Figures from the operator's own metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_BUCKET = re.compile(r'argosy_operator_reconcile_seconds_bucket\{.*le="([^"]+)".*\}')
_REQUESTS = re.compile(r"apiserver_request_duration_seconds_(sum|count)\{(.*)\}")
_COUNT = re.compile(r'argosy_operator_reconcile_seconds_count\{outcome="(\w+)"\}')


@dataclass(frozen=True)
class Figures:
    """What one operator process reports of itself."""

    reconciles: float
    errors: float
    defects: float
    memory_mib: float
    """Most resident memory so far."""

    @classmethod
    def of(cls, metrics: Mapping[str, float], memory: tuple[int, int]) -> Figures:
        """From `OperatorProcess.metrics` and `.memory`."""
        counts = {match[1]: value for name, value in metrics.items() if (match := _COUNT.fullmatch(name))}
        return cls(
            sum(counts.values()), counts.get("error", 0.0), counts.get("defect", 0.0), memory[1] / (1 << 20)
        )


def reconcile_buckets(metrics: Mapping[str, float]) -> dict[float, float]:
    """Cumulative counts of reconciles of every outcome by upper bound in seconds."""
    found: dict[float, float] = {}
    for name, value in metrics.items():
        if match := _BUCKET.fullmatch(name):
            bound = float(match[1])
            found[bound] = found.get(bound, 0.0) + value
    return found


def since(before: Mapping[float, float], now: Mapping[float, float]) -> dict[float, float]:
    """The buckets of what was observed between two looks at a histogram."""
    return {bound: count - before.get(bound, 0.0) for bound, count in now.items()}


def api_requests(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Number of requests that the API server has answered to anybody, watches left out, and their seconds in all."""
    count = seconds = 0.0
    for name, value in metrics.items():
        match = _REQUESTS.fullmatch(name)
        if match is None or 'verb="WATCH"' in match[2] or 'verb="CONNECT"' in match[2]:
            continue
        if match[1] == "sum":
            seconds += value
        else:
            count += value
    return count, seconds


def samples(text: str) -> dict[str, float]:
    """Every sample of a page of metrics, by name and labels as they are written."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def histogram_quantile(buckets: Mapping[float, float], share: float) -> float:
    """The quantile as Prometheus computes it: linear within a bucket. Infinity if it is above the last bound; 0 without
    observations."""
    ordered = sorted(buckets.items())
    total = ordered[-1][1] if ordered else 0.0
    if total == 0:
        return 0.0
    rank = share * total
    lower, below = 0.0, 0.0
    for bound, count in ordered:
        if count >= rank:
            if bound == float("inf"):
                return bound
            return lower + (bound - lower) * (rank - below) / (count - below) if count > below else bound
        lower, below = bound, count
    return float("inf")
