"""LoopHistogram: a Prometheus histogram for what is observed on the event loop, with every token, step and request.

prometheus_client takes a lock for each of the counters that an observation changes, and looks for the bucket from the
first one on. This one is changed on the event loop alone, where it costs a tenth.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram:
    """A series of a `LoopHistogramFamily`.

    Args:
        buckets: upper bounds in ascending order, without infinity.
    """

    __slots__ = ("_buckets", "counts", "created", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = tuple(buckets)
        self.counts = [0] * (len(self._buckets) + 1)
        """Observations in each bucket; the last one is those beyond all bounds."""
        self.total = 0.0
        """Sum of all observations."""
        self.created = time.time()

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._buckets, value)] += 1
        self.total += value


class LoopHistogramFamily(Collector):
    """
    Args:
        registry: exposes the family.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label_names: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._label_names = tuple(label_names)
        self._buckets = tuple(buckets)
        self._series: dict[tuple[str, ...], LoopHistogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> LoopHistogram:
        """Return the series with these labels, which is exposed from now on."""
        return self._series.setdefault(values, LoopHistogram(self._buckets))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        bounds = [*(floatToGoString(bound) for bound in self._buckets), "+Inf"]
        for values, series in self._series.items():
            counts = list(zip(bounds, accumulate(series.counts), strict=True))
            family.add_metric(values, counts, series.total)
            labels = dict(zip(self._label_names, values, strict=True))
            family.add_sample(f"{self._name}_created", labels, series.created)
        yield family
