"""LoadLog: log lines that say how far the load of a model is, which `argosy why` reads.

Owns: when a line is due. Must not know: what a load consists of. Invariant: a load that is short logs nothing, and one
that is long a line for each phase and one each `LINE_EVERY_S`, however many steps it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from argosy_engine.messages.load_step import LoadStep

logger = logging.getLogger(__name__)

QUIET_S = 2.0
"""Loads that end within this time are not worth a line."""
LINE_EVERY_S = 10.0


class LoadLog:
    """
    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._said_at = self._began
        self._said = ""

    def note(self, step: LoadStep) -> None:
        """Log the step if a line is due."""
        now = self._clock()
        if now - self._began < QUIET_S:
            return
        if step.phase != self._said or now - self._said_at >= LINE_EVERY_S:
            self._said, self._said_at = step.phase, now
            logger.info("loading the model: %s", step)
