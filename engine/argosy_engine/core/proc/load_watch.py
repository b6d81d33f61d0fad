"""LoadWatch: notices that an engine's load stalls, on behalf of the clients that wait for it.

Owns: when a load counts as stalled. It is watched from outside of the processes that load, because a thread that hangs
in a read of a lost volume may hold the interpreter's lock, and its process may not even be able to end. The cores of
all data-parallel ranks share one watch, because they may wait for each other. Invariant: a load that advances is never
called stalled, however long it takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from argosy_engine.errors import LoadStalled
from argosy_engine.messages.load_step import LoadStep, OnLoadStep, ignore_step

STACKS_S = 0.5
"""Time in which processes that hang write their stacks, before they are ended."""
_SHOWN_PHASE = 64


class LoadWatch:
    """
    Args:
        timeout_s: how long a load may be without progress; 0: for ever.
        on_step: told of all progress.
        clock: seconds that never go back.
    """

    def __init__(
        self, timeout_s: float, on_step: OnLoadStep = ignore_step, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._on_step = on_step
        self._clock = clock
        self._advanced_at = clock()
        self._last = LoadStep("start of the process")

    def advanced(self, step: LoadStep) -> None:
        """Note that the load of any core has advanced."""
        self._advanced_at, self._last = self._clock(), step
        self._on_step(step)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the load counts as stalled if it does not advance, at least 0; None: it never does."""
        if not self._timeout_s:
            return None
        return max(self._advanced_at + self._timeout_s - self._clock(), 0.0)

    @property
    def is_stalled(self) -> bool:
        return self.remaining_s == 0.0

    def stalled(self) -> LoadStalled:
        """Return the error to raise once the load is stalled."""
        return LoadStalled(
            f"the load of the model has stalled: no progress for {self._timeout_s:g} s "
            f"({str(self._last)[:_SHOWN_PHASE]}); the stacks of the engine's processes are above. Look at the volume "
            "or device that it waits for; --load-stall-timeout allows more time, or with 0 any"
        )


def dump_stacks(pids: Iterable[int]) -> None:
    """Have engine cores and their workers write their stacks, which takes up to `STACKS_S`."""
    for pid in pids:
        for each in (pid, *_children(pid)):
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGUSR1)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended, or the system does not tell
        return []
