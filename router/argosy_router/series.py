"""Sums, distributions and readings by label: what metrics are made of.

Owns: three kinds of series and how each becomes a Prometheus family. Must not know: any one metric.
Invariant: counting is a dict or list operation on the loop's own thread; a scrape only reads.

prometheus_client's own counters take a lock and a label lookup per event, some 10 us per request for what a router
counts; these hand it the finished sums at scrape time instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]


class Counter:
    """A monotonic sum per label tuple."""

    __slots__ = ("help", "labels", "name", "values")

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.values: dict[Labels, _Sum] = {}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        total = self.values.get(labels)
        if total is None:
            total = self.values[labels] = _Sum()
        total.value += amount

    def sum(self, labels: Labels) -> float:
        total = self.values.get(labels)
        return 0.0 if total is None else total.value

    def sums(self) -> list[tuple[Labels, float]]:
        return [(labels, total.value) for labels, total in self.values.items()]

    def collect(self, prefix: str) -> Metric:
        family = CounterMetricFamily(prefix + self.name, self.help, labels=self.labels)
        for labels, value in self.sums():
            family.add_metric(labels, value)
        return family


class _Sum:
    """So that counting looks labels up once, not to read and to write."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Histogram:
    """Observations per label tuple, by bucket."""

    __slots__ = ("bounds", "help", "labels", "name", "values")

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.bounds = bounds
        self.values: dict[Labels, list[float]] = {}
        """bucket counts, then the sum"""

    def observe(self, labels: Labels, value: float) -> None:
        row = self.values.get(labels)
        if row is None:
            row = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1.0
        row[-1] += value

    def collect(self, prefix: str) -> Metric:
        family = HistogramMetricFamily(prefix + self.name, self.help, labels=self.labels)
        for labels, row in self.values.items():
            total = 0.0
            buckets = []
            for bound, count in zip((*map(str, self.bounds), "+Inf"), row, strict=False):
                total += count
                buckets.append((bound, total))
            family.add_metric(labels, buckets, row[-1])
        return family


class Reading:
    """Figures kept elsewhere and read at scrape time; rows with equal labels add up."""

    __slots__ = ("help", "kind", "labels", "name", "read")

    def __init__(
        self,
        kind: Literal["gauge", "counter"],
        name: str,
        text: str,
        labels: Sequence[str],
        read: Callable[[], Rows],
    ) -> None:
        self.kind = kind
        self.name = name
        self.help = text
        self.labels = labels
        self.read = read

    def collect(self, prefix: str) -> Metric:
        make = GaugeMetricFamily if self.kind == "gauge" else CounterMetricFamily
        family = make(prefix + self.name, self.help, labels=self.labels)
        sums: defaultdict[Labels, float] = defaultdict(float)
        for labels, value in self.read():
            sums[labels] += value
        for labels, value in sums.items():
            family.add_metric(labels, value)
        return family


Series = Counter | Histogram | Reading
