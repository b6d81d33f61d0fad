"""What the operator's tests share: the modules beside them, which pytest's mode importlib does not make importable, and
a clock of the CPU time that reconciles take."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from argosy_operator.reconcile import reconciler
from argosy_operator.reconcile.workqueue import CpuMeter

sys.path.insert(0, str(Path(__file__).parent))


class CpuClock:
    """Seconds of CPU time. Each look at it takes some, as a step of a reconcile does, and a test may spend more."""

    STEP_S = 0.0001

    def __init__(self) -> None:
        self.spent_s = 0.0

    def __call__(self) -> float:
        self.spent_s += self.STEP_S
        return self.spent_s


@pytest.fixture(autouse=True)
def cpu_clock(monkeypatch: pytest.MonkeyPatch) -> CpuClock:
    """For the CPU time of a reconcile changes are gathered in virtual time: a collection of garbage in it, or a cold
    cache, would be a second's pause."""
    clock = CpuClock()
    monkeypatch.setattr(reconciler, "CpuMeter", partial(CpuMeter, clock))
    return clock
