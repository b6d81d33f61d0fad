"""History of the last minutes of traffic per model, for the admin page.

Owns: samples of the metrics' sums, and the rates between them. Must not know: requests.
Invariant: at most `SAMPLES` samples per model, whatever the load. Figures are differences of existing sums, so the
history adds no counting to requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from argosy_router.metrics.registry import Metrics
from argosy_router.metrics.series import Counter, Histogram

INTERVAL_S = 5.0
SAMPLES = 61
"""Five minutes of intervals."""
RECENT = 13
"""One minute of intervals, for the headline figures, which should be steadier than the curve."""


class Figures(Struct, frozen=True, kw_only=True):
    """Traffic over a period. Ratios and quantiles are None if there was none."""

    requests_per_s: float
    failed_ratio: float | None
    """Share of answers with a status of 500 or above."""
    hit_ratio: float | None
    """Share of prompt tokens that came from a cache, by the answers' usage."""
    output_tokens_per_s: float
    ttft_p50_s: float | None
    """Time to first token of streams, interpolated within a histogram bucket."""
    ttft_p90_s: float | None


class Trend(Struct, frozen=True, kw_only=True):
    """One model's last minutes."""

    interval_s: float
    recent: Figures
    """Over the last minute, or since the model's first request if that is shorter."""
    curve: Sequence[Figures]
    """Per interval, oldest first."""


class _Sums(NamedTuple):
    time: float
    requests: float = 0.0
    failed: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    completion_tokens: float = 0.0
    ttft: Sequence[float] = ()
    """Observations per bucket."""


class History:
    """Samples of one router's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: dict[str, deque[_Sums]] = {}

    async def run(self) -> None:
        """Sample periodically until cancelled."""
        while True:
            self.sample(time.monotonic())
            await asyncio.sleep(INTERVAL_S)

    def sample(self, now: float) -> None:
        """Take one sample of every model that has had a request."""
        sums = self._sums(now)
        for model, latest in sums.items():
            if model not in self._samples:
                self._samples[model] = deque([_Sums(now - INTERVAL_S)], maxlen=SAMPLES)
            self._samples[model].append(latest)
        for model in self._samples.keys() - sums.keys():
            del self._samples[model]

    def trends(self, now: float) -> Callable[[str], Trend]:
        """Return what returns a model's curve up to the last sample, and the last minute up to now. The sums of
        all models are read once: for each model, those of a thousand would take seconds."""
        sums = self._sums(now)
        return lambda model: self._trend(model, sums.get(model, _Sums(now)), now)

    def _trend(self, model: str, latest: _Sums, now: float) -> Trend:
        bounds = self._metrics.ttft.bounds
        samples = self._samples.get(model, deque())
        since = samples[-min(len(samples), RECENT)] if samples else _Sums(now - INTERVAL_S)
        return Trend(
            interval_s=INTERVAL_S,
            recent=_between(since, latest, bounds),
            curve=[_between(before, after, bounds) for before, after in pairwise(samples)],
        )

    def _sums(self, now: float) -> dict[str, _Sums]:
        metrics = self._metrics
        requests = _by_model(metrics.requests)
        failed: defaultdict[str, float] = defaultdict(float)
        for (model, code), count in metrics.requests.sums():
            if code >= "500":
                failed[model] += count
        prompt, cached = _by_model(metrics.prompt_tokens), _by_model(metrics.actual)
        completion, ttft = _by_model(metrics.completion_tokens), _buckets(metrics.ttft)
        return {
            model: _Sums(
                now,
                count,
                failed[model],
                prompt[model],
                cached[model],
                completion[model],
                ttft.get(model, ()),
            )
            for model, count in requests.items()
        }


def _by_model(counter: Counter) -> defaultdict[str, float]:
    position = counter.labels.index("model")
    sums: defaultdict[str, float] = defaultdict(float)
    for labels, value in counter.sums():
        sums[labels[position]] += value
    return sums


def _buckets(histogram: Histogram) -> dict[str, list[float]]:
    return {model: row[:-1] for (model,), row in histogram.values.items()}


def _between(before: _Sums, after: _Sums, bounds: Sequence[float]) -> Figures:
    seconds = max(1e-3, after.time - before.time)
    requests = after.requests - before.requests
    prompt = after.prompt_tokens - before.prompt_tokens
    old = before.ttft or (0.0,) * len(after.ttft)
    counts = [new - count for new, count in zip(after.ttft, old, strict=True)]
    return Figures(
        requests_per_s=requests / seconds,
        failed_ratio=(after.failed - before.failed) / requests if requests else None,
        hit_ratio=(after.cached_tokens - before.cached_tokens) / prompt if prompt else None,
        output_tokens_per_s=(after.completion_tokens - before.completion_tokens) / seconds,
        ttft_p50_s=quantile(0.5, counts, bounds),
        ttft_p90_s=quantile(0.9, counts, bounds),
    )


def quantile(share: float, counts: Sequence[float], bounds: Sequence[float]) -> float | None:
    """Estimate the value below which `share` of the observations lie, like Prometheus' `histogram_quantile`.

    Args:
        counts: observations per bucket, one more than `bounds`: the last bucket has no upper bound.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    low = below = 0.0
    for count, high in zip(counts, bounds, strict=False):
        if below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        low, below = high, below + count
    return low
