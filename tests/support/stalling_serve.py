"""`argosy serve`, whose load stalls in one phase: the clock of its watches stands still until then, however long the
phases before take.

Arguments: that phase; a file, until whose creation the clock does not go either; how long a stalled start may take to
end in the usual way, in seconds; and the command line.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

from argosy_engine.api import serve
from argosy_engine.api import serve as start_watch
from argosy_engine.core.proc import async_core_client
from argosy_engine.core.proc.core_handle import LoadWatch
from argosy_engine.messages import LoadStep, OnLoadStep, ignore_step

PHASE, GATE, GRACE_S = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
stalls_since: list[float] = []
has_begun = False


def clock() -> float:
    if not stalls_since and has_begun and GATE.exists():
        stalls_since.append(time.monotonic())
    return time.monotonic() - stalls_since[0] if stalls_since else 0.0


class PhaseWatch(LoadWatch):
    def __init__(self, timeout_s: float, on_step: OnLoadStep = ignore_step) -> None:
        super().__init__(timeout_s, on_step, clock)

    def advanced(self, step: LoadStep) -> None:
        global has_begun
        super().advanced(step)
        has_begun = has_begun or step.phase == PHASE


if __name__ == "__main__":
    async_core_client.LoadWatch = start_watch.LoadWatch = PhaseWatch  # type: ignore[misc]
    serve.StartWatch = functools.partial(start_watch.StartWatch, grace_s=GRACE_S)  # type: ignore[misc, assignment]
    sys.exit(serve.main(sys.argv[4:]))
