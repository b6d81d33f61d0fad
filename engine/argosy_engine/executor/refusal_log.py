"""RefusalLog: warnings about refused connections, of which strangers can cause any number."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

MAX_LINES = 10
"""In each interval; further refusals are counted."""
INTERVAL_S = 60.0


class RefusalLog:
    """
    Args:
        clock: seconds that never go back.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._began_at = clock()
        self._num_lines = self._num_left_out = 0

    def warn(self, peer: str, reason: object) -> None:
        """Say why a peer's connection is refused, unless much has been said lately."""
        with self._lock:
            now = self._clock()
            if now - self._began_at >= INTERVAL_S:
                if self._num_left_out:
                    self._logger.warning(
                        "refused %d further connections to the port of the nodes", self._num_left_out
                    )
                self._began_at, self._num_lines, self._num_left_out = now, 0, 0
            if self._num_lines >= MAX_LINES:
                self._num_left_out += 1
                return
            self._num_lines += 1
        self._logger.warning("refused a connection of %s to the port of the nodes: %s", peer, reason)
