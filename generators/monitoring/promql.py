"""PromQL over the metrics of a router.

Owns: full names of series by kind, and the few forms of expressions. Must not know: panels, alerts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from argosy_router.config import BatchLimits, RouterConfig
from argosy_router.metric_series import PREFIX, Counter, Histogram, Reading, Series
from argosy_router.server import Router

_WINDOW = "$__rate_interval"
_CHOSEN = 'model=~"$model"'


PRODUCTION = RouterConfig(
    replicas=("http://127.0.0.1:1",),
    batch=BatchLimits(batch_url="http://127.0.0.1:2"),
    fleet_key=b"0123456789abcdef",
)
"""A router with all that has metrics. It is never started."""


class Registry:
    """Full names of a router's series, by kind."""

    def __init__(self, series: Sequence[Series]) -> None:
        self._series = {one.name: one for one in series}

    @property
    def names(self) -> Sequence[str]:
        """Without prefix and suffix."""
        return tuple(self._series)

    @classmethod
    def of_router(cls) -> Registry:
        """The registry of a router as production runs it."""

        async def build() -> Registry:
            return cls(tuple(Router(PRODUCTION).metrics.series))

        return asyncio.run(build())

    def counter(self, name: str) -> str:
        series = self._series[name]
        assert isinstance(series, Counter) or (isinstance(series, Reading) and series.kind == "counter"), name
        return f"{PREFIX}{name}_total"

    def gauge(self, name: str) -> str:
        series = self._series[name]
        assert isinstance(series, Reading), name
        assert series.kind == "gauge", name
        return PREFIX + name

    def buckets(self, name: str) -> str:
        assert isinstance(self._series[name], Histogram), name
        return f"{PREFIX}{name}_bucket"


class Expressions:
    """PromQL over a registry, for a dashboard's chosen models or for rules over all."""

    def __init__(self, registry: Registry, window: str = _WINDOW, chosen: str = _CHOSEN) -> None:
        self._registry = registry
        self._window = window
        self._chosen = chosen

    def rate(self, counter: str, by: str = "", where: str = "", *, has_model: bool = True) -> str:
        """Increase per second, summed."""
        selector = self._selector(where, has_model=has_model)
        return f"sum{_by(by)}(rate({self._registry.counter(counter)}{selector}[{self._window}]))"

    def gauge(self, gauge: str, by: str = "", where: str = "", *, has_model: bool = True) -> str:
        return f"sum{_by(by)}({self._registry.gauge(gauge)}{self._selector(where, has_model=has_model)})"

    def quantile(self, share: float, histogram: str, by: str = "", *, has_model: bool = True) -> str:
        labels = ", ".join(filter(None, (by, "le")))
        selector = self._selector("", has_model=has_model)
        buckets = f"rate({self._registry.buckets(histogram)}{selector}[{self._window}])"
        return f"histogram_quantile({share:g}, sum by ({labels}) ({buckets}))"

    def _selector(self, where: str, *, has_model: bool) -> str:
        conditions = ", ".join(filter(None, (self._chosen if has_model else "", where)))
        return f"{{{conditions}}}" if conditions else ""


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
