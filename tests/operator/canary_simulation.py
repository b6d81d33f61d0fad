"""Canary rollouts with made-up traffic, which count verdicts: how often a canary fails, and after how many requests.

Looks come every LOOK_S, as the operator's do. Attempts are independent; times to first token and between tokens are
lognormal, with a spread by which nine of ten are below 2.8 times the median.
"""

from __future__ import annotations

import datetime
import math
from collections import deque
from statistics import NormalDist
from typing import Any

import numpy as np

from argosy_operator.desired.rollout import CanaryState, advance
from argosy_operator.observation import QUANTILE, Figures, SplitFigures, quantile
from argosy_protocol.reports import SIDE_BOUNDS_S, WINDOW_SLICES
from argosy_resource.rollout import CanaryRollout

LOOK_S = 5
SPREAD = 0.8
MEDIAN_S = 0.3
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


class Build:
    """How one side answers."""

    def __init__(
        self,
        *,
        errors: float = 0.003,
        client_errors: float = 0.01,
        slowness: float = 1.0,
        cached: float = 0.6,
    ) -> None:
        self.rates = np.array([errors, client_errors, cached])
        below = [NormalDist().cdf(math.log(each / (MEDIAN_S * slowness)) / SPREAD) for each in SIDE_BOUNDS_S]
        self.buckets = np.diff([0.0, *below, 1.0])


class Side:
    """What routers have counted of one side, since it is divided so and within the window."""

    def __init__(self, build: Build, window_s: int, *, has_times: bool) -> None:
        self.build = build
        self.has_times = has_times
        self.looks_per_slice = max(1, window_s // WINDOW_SLICES // LOOK_S)
        self.total = np.zeros(4 + has_times * 2 * len(build.buckets), dtype=np.int64)
        self.slices: deque[np.ndarray] = deque(maxlen=WINDOW_SLICES)
        self.looks = 0

    def add(self, attempts: int, random: np.random.Generator) -> None:
        counts = np.concatenate(([attempts], random.binomial(attempts, self.build.rates)))
        if self.has_times:
            drawn = random.multinomial(attempts, self.build.buckets, size=2)
            counts = np.concatenate((counts, drawn.reshape(-1)))
        if self.looks % self.looks_per_slice == 0:
            self.slices.append(np.zeros_like(self.total))
        self.looks += 1
        self.total += counts
        self.slices[-1] += counts

    def window(self) -> Figures:
        return figures(sum(self.slices, np.zeros_like(self.total)))

    def so_far(self) -> Figures:
        return figures(self.total)


def figures(counts: np.ndarray) -> Figures:
    attempts, failures, client_errors, cached, *times = counts.tolist()
    ttft, itl = tuple(times[: len(times) // 2]), tuple(times[len(times) // 2 :])
    return Figures(
        attempts=attempts,
        failures=failures,
        client_errors=client_errors,
        streams=attempts,
        ttft_p90_s=quantile(ttft, QUANTILE, SIDE_BOUNDS_S),
        ttft=ttft,
        itl=itl,
        prompt_tokens=1000 * attempts,
        cached_tokens=1000 * cached,
        sampled=attempts,
        sampled_cached=cached,
    )


class SimulatedRollout:
    """One rollout from its first replica on, in front of a service with so many replicas and requests a second."""

    def __init__(
        self,
        canary: CanaryRollout,
        build: Build,
        random: np.random.Generator,
        *,
        stable: Build | None = None,
        replicas: int = 5,
        requests_per_s: float = 20.0,
    ) -> None:
        self.canary = canary
        analysis = canary.analysis
        self.window_s = 300 if analysis is None else analysis.window_seconds
        self.has_times = analysis is not None and analysis.max_ttft_p90_ratio is not None
        self.build = build
        self.stable = stable or Build()
        self.random = random
        self.replicas = replicas
        self.requests_per_s = requests_per_s
        self.seconds = 0
        self.canary_requests = 0
        self.state = CanaryState(revision="new", missing_since=self.now, weight_since=self.now)
        self._divide()

    @property
    def now(self) -> str:
        return (START + datetime.timedelta(seconds=self.seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _divide(self) -> None:
        self.sides = tuple(
            Side(build, self.window_s, has_times=self.has_times) for build in (self.stable, self.build)
        )

    @property
    def share(self) -> float:
        """As routers draw (`RevisionSides.share`)."""
        weight = self.state.weight / 100
        return weight if weight == 1 else min(weight, self.state.size / (self.state.size + self.replicas))

    def look(self) -> None:
        """Let LOOK_S pass, and have the operator look."""
        self.seconds += LOOK_S
        requests = int(self.random.poisson(self.requests_per_s * LOOK_S))
        ours = int(self.random.binomial(requests, self.share))
        self.canary_requests += ours
        stable, canary = self.sides
        stable.add(requests - ours, self.random)
        canary.add(ours, self.random)
        before = self.state.weight
        self.state, *_ = advance(
            self.canary,
            self.state,
            replicas=self.replicas,
            routable=self.state.size,
            figures=SplitFigures(
                is_complete=True,
                stable=stable.window(),
                canary=canary.window(),
                stable_total=stable.so_far(),
                canary_total=canary.so_far(),
            ),
            now=self.now,
            deadline_s=1800,
        )
        if self.state.weight != before:
            self._divide()

    def run(self, seconds: int) -> str:
        """The phase after this time, or at its end."""
        while self.state.phase == "stepping" and self.seconds < seconds:
            self.look()
        return self.state.phase


def verdicts(count: int, seconds: int, seed: int, **rollout: Any) -> tuple[dict[str, int], list[int]]:
    """How many rollouts are in which phase after so many seconds, and the canary's requests until each that failed."""
    random = np.random.default_rng(seed)
    phases: dict[str, int] = {}
    needed = []
    for _ in range(count):
        simulated = SimulatedRollout(random=random, **rollout)
        phase = simulated.run(seconds)
        phases[phase] = phases.get(phase, 0) + 1
        if phase == "failed":
            needed.append(simulated.canary_requests)
    return phases, sorted(needed)
