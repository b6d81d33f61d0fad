"""The load of one service: the reports of all routers, merged.

Owns how figures of several routers become one. Must not know how routers are asked, nor what follows from a load.
A replica's own figures include the work of all routers, so the largest counts; what a router holds is added up.
Invariant: a replica's figures are finite and within bounds, whatever it has told the routers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

from msgspec import Struct

from argosy_protocol.load_report import (
    TTFT_BOUNDS_S,
    TTFT_WINDOW_S,
    LoadReport,
    ReplicaLoadReport,
    RolloutReport,
    ServiceLoadReport,
)

_QUANTILE: Final = 0.9
_MOST: Final = 10**9
"""Of sequences or tokens at one replica, and of the value of its cache."""


class ReplicaUse(Struct, frozen=True, kw_only=True):
    """One replica's load."""

    is_routable: bool = False
    """Whether some router would send it a request."""
    sequences: int = 0
    """Sequences that it computes or that wait there."""
    queued_tokens: int = 0
    kv_usage: float = 0.0
    cache_value: float = 0.0
    """Prompt tokens per second that its cache saves and no other would."""


class ServiceLoad(Struct, frozen=True, kw_only=True):
    """One service's load."""

    is_complete: bool = True
    """Whether every router has reported of late. If not, the load is a lower bound."""
    is_settled: bool = False
    """Whether every router has, but for those that have been silent for so long that nobody waits for them. What they
    hold in queues is missing, and how long ago they had a request; what they send is in the replicas' own figures, as
    far as these tell how much they compute."""
    held: int = 0
    """Requests that wait for a first replica."""
    queued: int = 0
    """Requests in the routers' queues, those held included."""
    queued_tokens: int = 0
    """Tokens that these are expected to cost."""
    idle_s: float = 0.0
    """Seconds without any request."""
    ttft_p90_s: float | None = None
    """Of the last minute; None if no answer began."""
    answers: int = 0
    """Streamed answers that began within the last minute."""
    is_window_covered: bool = True
    """Whether every router has run for that minute. A router that has just started knows of no earlier answer."""
    replicas: Mapping[str, ReplicaUse] = {}
    """By UID of the pod."""
    rollouts: tuple[RolloutReport | None, ...] = ()
    """What each router reports of a canary rollout; None from one that does not divide the service."""

    @property
    def sequences(self) -> int:
        """Sequences at replicas, and requests in the queues."""
        return self.queued + sum(each.sequences for each in self.replicas.values())

    @property
    def tokens(self) -> int:
        """Tokens that wait, at replicas and in the queues."""
        return self.queued_tokens + sum(each.queued_tokens for each in self.replicas.values())

    @property
    def routable(self) -> int:
        return sum(each.is_routable for each in self.replicas.values())


class FleetLoad(Mapping[str, ServiceLoad]):
    """The last reports of all routers, by `namespace/name` of the service. A service's are merged when it is first
    asked for: most reconciles ask for one."""

    def __init__(self, reports: Iterable[LoadReport], *, is_complete: bool, is_settled: bool = False) -> None:
        self._is_complete, self._is_settled, self._is_window_covered = is_complete, is_settled, True
        self._reports: dict[str, list[ServiceLoadReport]] = {}
        self._merged: dict[str, ServiceLoad] = {}
        for report in reports:
            if report.uptime_s is not None and report.uptime_s < TTFT_WINDOW_S:
                self._is_window_covered = False
            for service in report.services:
                self._reports.setdefault(service.service, []).append(service)

    def __getitem__(self, service: str) -> ServiceLoad:
        if (known := self._merged.get(service)) is not None:
            return known
        merged = self._merged[service] = _merged(
            self._reports[service],
            is_complete=self._is_complete,
            is_settled=self._is_settled,
            is_window_covered=self._is_window_covered,
        )
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)


def _merged(
    reports: list[ServiceLoadReport], *, is_complete: bool, is_settled: bool, is_window_covered: bool
) -> ServiceLoad:
    by_uid: dict[str, list[ReplicaLoadReport]] = {}
    for report in reports:
        for replica in report.replicas:
            by_uid.setdefault(replica.uid or replica.name, []).append(replica)
    counts = [report.ttft_counts for report in reports if len(report.ttft_counts) == len(TTFT_BOUNDS_S) + 1]
    answers = [sum(column) for column in zip(*counts, strict=True)]
    return ServiceLoad(
        is_complete=is_complete,
        is_settled=is_settled,
        held=sum(report.held for report in reports),
        queued=sum(report.queued for report in reports),
        queued_tokens=sum(report.queued_tokens for report in reports),
        idle_s=min(report.idle_s for report in reports),
        ttft_p90_s=quantile(answers, _QUANTILE),
        answers=sum(answers),
        is_window_covered=is_window_covered,
        replicas={uid: _replica(each) for uid, each in by_uid.items()},
        rollouts=tuple(report.rollout for report in reports),
    )


def _replica(reports: list[ReplicaLoadReport]) -> ReplicaUse:
    return ReplicaUse(
        is_routable=any(each.routable for each in reports),
        sequences=_bounded(
            max(max(each.requests for each in reports), sum(each.inflight for each in reports))
        ),
        queued_tokens=_bounded(max(each.queued_tokens for each in reports)),
        kv_usage=min(1.0, max(0.0, *(each.kv_usage for each in reports))),
        cache_value=float(min(_MOST, sum(each.cache_value for each in reports))),
    )


def _bounded(count: int) -> int:
    return min(_MOST, max(0, count))


def quantile(counts: Sequence[int], share: float, bounds: Sequence[float] = TTFT_BOUNDS_S) -> float | None:
    """The time to first token (or another one that is counted by `bounds`) below which `share` of the counts are,
    interpolated within its bucket; None if there are none. Beyond the last bound, that bound."""
    below = list(accumulate(counts))
    if not below or not below[-1]:
        return None
    rank = share * below[-1]
    number = bisect_left(below, rank)
    if number >= len(bounds):
        return bounds[-1]
    low = bounds[number - 1] if number else 0.0
    return low + (bounds[number] - low) * (rank - below[number] + counts[number]) / counts[number]
