"""The two sides of a service during a canary rollout: its replicas of the stable and of the canary revision.

Owns: which side answers a request, and what each side's attempts came to within a window. Must not know: replicas,
requests, why the fleet document divides a service.
Invariants: routers draw the same side for the same session without communicating, and a session that the canary answers
at one weight stays with it at any higher one; memory is bounded by the number of slices, whatever the number of
requests; another division starts counting anew, so that a figure never mixes two weights; below weight 100 a canary
replica is drawn for no more requests than a stable one.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Final

from xxhash import xxh3_64_intdigest

from argosy_protocol.fleet import RevisionSplit
from argosy_protocol.load_report import (
    SIDE_BOUNDS_S,
    TTFT_BOUNDS_S,
    WINDOW_SLICES,
    RolloutReport,
    SideReport,
)

STABLE: Final = "\0stable\0"
"""Name that replicas of the stable side serve. They also serve it followed by each of their adapters and aliases, of
which none begins with NUL."""
CANARY: Final = "\0canary\0"
"""Name that replicas of the canary side serve, likewise."""
_ATTEMPTS: Final = 0
_FAILURES: Final = 1
_CLIENT_ERRORS: Final = 2
_PROMPT: Final = 3
_PREDICTED: Final = 4
_CACHED: Final = 5
_SAMPLED: Final = 6
_SAMPLED_CACHED: Final = 7
_EXPECTED: Final = 8
_EXPECTED_CACHED: Final = 9
_TTFT_COARSE: Final = 10
_TTFT: Final = _TTFT_COARSE + len(TTFT_BOUNDS_S) + 1
_ITL: Final = _TTFT + len(SIDE_BOUNDS_S) + 1
_SIZE: Final = _ITL + len(SIDE_BOUNDS_S) + 1
"""Positions in a slice. The buckets of times come last: to the first token, by both lists of bounds, and between
tokens."""


def in_parts(name: str) -> tuple[str, str]:
    """Return the side (empty for any) and the adapter or alias (empty for the model itself) of a name that replicas
    serve."""
    for side in (STABLE, CANARY):
        if name.startswith(side):
            return side, name[len(side) :]
    return "", name


class _SideCounts:
    """What the attempts at one side came to: in the slices of a window, and in all."""

    __slots__ = ("_slice_s", "_slices", "_total")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / WINDOW_SLICES
        self._slices: dict[int, list[int]] = {}
        self._total = [0] * _SIZE

    def add(self, position: int, amount: int, now: float) -> None:
        number = int(now / self._slice_s)
        counts = self._slices.get(number)
        if counts is None:
            self._forget(number)
            counts = self._slices[number] = [0] * _SIZE
        counts[position] += amount
        self._total[position] += amount

    def report(self, now: float) -> SideReport:
        """The window that ends now."""
        self._forget(int(now / self._slice_s))
        if not self._slices:
            return SideReport()
        return _reported([sum(column) for column in zip(*self._slices.values(), strict=True)])

    def total(self) -> SideReport:
        """All since the service is divided so."""
        return _reported(self._total)

    def _forget(self, number: int) -> None:
        for past in [past for past in self._slices if past <= number - WINDOW_SLICES]:
            del self._slices[past]


def _reported(counts: list[int]) -> SideReport:
    return SideReport(
        attempts=counts[_ATTEMPTS],
        failures=counts[_FAILURES],
        client_errors=counts[_CLIENT_ERRORS],
        prompt_tokens=counts[_PROMPT],
        predicted_tokens=counts[_PREDICTED],
        cached_tokens=counts[_CACHED],
        ttft_counts=_unless_empty(counts[_TTFT_COARSE:_TTFT]),
        ttft=_unless_empty(counts[_TTFT:_ITL]),
        itl=_unless_empty(counts[_ITL:_SIZE]),
        sampled=counts[_SAMPLED],
        sampled_cached=counts[_SAMPLED_CACHED],
        expected=counts[_EXPECTED],
        expected_cached=counts[_EXPECTED_CACHED],
    )


def _unless_empty(counts: list[int]) -> tuple[int, ...]:
    return tuple(counts) if any(counts) else ()


class RevisionSides:
    """How one service is divided, and the figures of both sides."""

    __slots__ = ("_counts", "split")

    def __init__(self, split: RevisionSplit) -> None:
        self.split = split
        self._counts = {side: _SideCounts(float(split.window_s)) for side in (STABLE, CANARY)}

    def side_of(self, revision: str) -> str:
        """The side of a replica of this revision; empty if it is of another one, which answers only if no side can."""
        if revision == self.split.canary:
            return CANARY
        return STABLE if self.split.stable in ("", revision) else ""

    def draw(self, drawn_by: bytes, share: float) -> str:
        """The side that answers a request; the same for equal `drawn_by`, at all routers that know of the same
        replicas. `share` is the canary's, as `share` computes it."""
        drawn = xxh3_64_intdigest(b"revision " + drawn_by)
        # The whole part first, as routers have drawn that know no other.
        percent = drawn % 100 + drawn // 100 % 100 / 100
        return CANARY if percent < 100 * share else STABLE

    def share(self, num_stable: int, num_canary: int) -> float:
        """The canary's share of the requests with so many routable replicas on each side: its weight, but no more than
        its part of the replicas unless it is to have every request."""
        share = self.split.weight / 100
        if share >= 1.0 or not num_stable:
            return share
        return min(share, num_canary / (num_stable + num_canary))

    # what an attempt at a replica of this revision came to

    def ended(self, revision: str, status: int, now: float) -> None:
        """Count an attempt that ended with an answer, an error of the client's (4xx) included."""
        self._add(revision, _ATTEMPTS, 1, now)
        if 400 <= status < 500:
            self._add(revision, _CLIENT_ERRORS, 1, now)

    def failed(self, revision: str, now: float) -> None:
        """Count an attempt that ended without one."""
        self._add(revision, _ATTEMPTS, 1, now)
        self._add(revision, _FAILURES, 1, now)

    def observe_ttft(self, revision: str, seconds: float, now: float) -> None:
        """Count a streamed attempt whose answer began after so many seconds, or had not by then."""
        self._add(revision, _TTFT_COARSE + bisect_left(TTFT_BOUNDS_S, seconds), 1, now)
        self._add(revision, _TTFT + bisect_left(SIDE_BOUNDS_S, seconds), 1, now)

    def observe_itl(self, revision: str, seconds: float, now: float) -> None:
        """Count a streamed answer by the mean time between its tokens."""
        self._add(revision, _ITL + bisect_left(SIDE_BOUNDS_S, seconds), 1, now)

    def observe_tokens(self, revision: str, prompt: int, predicted: int, cached: int, now: float) -> None:
        """Count an answer's prompt tokens, those that were expected to be cached, and those that were."""
        self._add(revision, _PROMPT, prompt, now)
        self._add(revision, _PREDICTED, predicted, now)
        self._add(revision, _CACHED, cached, now)
        drawn = random.random()  # noqa: S311 - a sample, no secret
        if prompt > 0:
            self._add(revision, _SAMPLED, 1, now)
            self._add(revision, _SAMPLED_CACHED, int(drawn * prompt < cached), now)
        if predicted > 0:
            self._add(revision, _EXPECTED, 1, now)
            self._add(revision, _EXPECTED_CACHED, int(drawn * predicted < cached), now)

    def _add(self, revision: str, position: int, amount: int, now: float) -> None:
        counts = self._counts.get(self.side_of(revision))
        if counts is not None:
            counts.add(position, amount, now)

    def report(self, now: float) -> RolloutReport:
        """The figures of the window that ends now, and of all since the service is divided so."""
        return RolloutReport(
            canary_revision=self.split.canary,
            weight=self.split.weight,
            stable=self._counts[STABLE].report(now),
            canary=self._counts[CANARY].report(now),
            stable_total=self._counts[STABLE].total(),
            canary_total=self._counts[CANARY].total(),
        )
