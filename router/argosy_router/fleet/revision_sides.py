"""The two sides of a service during a canary rollout: its replicas of the stable and of the canary revision.

Owns: which side answers a request, and what each side's attempts came to within a window. Must not know: replicas,
requests, why the fleet document divides a service.
Invariants: routers draw the same side for the same session without communicating, and a session that the canary answers
at one weight stays with it at any higher one; memory is bounded by the number of slices, whatever the number of
requests; another division starts counting anew, so that a figure never mixes two weights.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from xxhash import xxh3_64_intdigest

from argosy_protocol.fleet import RevisionSplit
from argosy_protocol.load_report import TTFT_BOUNDS_S, RolloutReport, SideReport

STABLE: Final = "\0stable\0"
"""Name that replicas of the stable side serve. They also serve it followed by each of their adapters and aliases, of
which none begins with NUL."""
CANARY: Final = "\0canary\0"
"""Name that replicas of the canary side serve, likewise."""
SLICES: Final = 12
"""Parts of a window. The window moves by a part."""

_ATTEMPTS: Final = 0
_FAILURES: Final = 1
_PROMPT: Final = 2
_PREDICTED: Final = 3
_CACHED: Final = 4
_TTFT: Final = 5
"""Positions in a slice; the buckets of times to first token come last."""


def in_parts(name: str) -> tuple[str, str]:
    """Return the side (empty for any) and the adapter or alias (empty for the model itself) of a name that replicas
    serve."""
    for side in (STABLE, CANARY):
        if name.startswith(side):
            return side, name[len(side) :]
    return "", name


class _SideCounts:
    """What the attempts at one side came to, in slices."""

    __slots__ = ("_slice_s", "_slices")

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / SLICES
        self._slices: dict[int, list[int]] = {}

    def add(self, position: int, amount: int, now: float) -> None:
        number = int(now / self._slice_s)
        counts = self._slices.get(number)
        if counts is None:
            self._forget(number)
            counts = self._slices[number] = [0] * (_TTFT + len(TTFT_BOUNDS_S) + 1)
        counts[position] += amount

    def report(self, now: float) -> SideReport:
        self._forget(int(now / self._slice_s))
        if not self._slices:
            return SideReport()
        total = [sum(column) for column in zip(*self._slices.values(), strict=True)]
        return SideReport(
            attempts=total[_ATTEMPTS],
            failures=total[_FAILURES],
            prompt_tokens=total[_PROMPT],
            predicted_tokens=total[_PREDICTED],
            cached_tokens=total[_CACHED],
            ttft_counts=tuple(total[_TTFT:]) if any(total[_TTFT:]) else (),
        )

    def _forget(self, number: int) -> None:
        for past in [past for past in self._slices if past <= number - SLICES]:
            del self._slices[past]


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

    def draw(self, drawn_by: bytes) -> str:
        """The side that answers a request; the same for equal `drawn_by`, at all routers."""
        is_canarys = xxh3_64_intdigest(b"revision " + drawn_by) % 100 < self.split.weight
        return CANARY if is_canarys else STABLE

    # what an attempt at a replica of this revision came to

    def attempted(self, revision: str, now: float) -> None:
        self._add(revision, _ATTEMPTS, 1, now)

    def failed(self, revision: str, now: float) -> None:
        """Count an attempt that failed by an error of the engine or of the connection."""
        self._add(revision, _FAILURES, 1, now)

    def observe_ttft(self, revision: str, seconds: float, now: float) -> None:
        """Count a streamed answer that began `seconds` after its request."""
        self._add(revision, _TTFT + bisect_left(TTFT_BOUNDS_S, seconds), 1, now)

    def observe_tokens(self, revision: str, prompt: int, predicted: int, cached: int, now: float) -> None:
        """Count an answer's prompt tokens, those that were expected to be cached, and those that were."""
        self._add(revision, _PROMPT, prompt, now)
        self._add(revision, _PREDICTED, predicted, now)
        self._add(revision, _CACHED, cached, now)

    def _add(self, revision: str, position: int, amount: int, now: float) -> None:
        counts = self._counts.get(self.side_of(revision))
        if counts is not None:
            counts.add(position, amount, now)

    def report(self, now: float) -> RolloutReport:
        """The figures of the window that ends now."""
        return RolloutReport(
            canary_revision=self.split.canary,
            weight=self.split.weight,
            stable=self._counts[STABLE].report(now),
            canary=self._counts[CANARY].report(now),
        )
