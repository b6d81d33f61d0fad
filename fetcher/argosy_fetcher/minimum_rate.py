"""Minimum rate: tells a slow source from one that only keeps a connection open.

Owns the rate and the window over which it is measured. Timeouts of sockets end at every byte, so a server that sends
one from time to time would hold a fetch for ever. Only time that is spent waiting for the source counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from argosy_fetcher.errors import TransientError

MIN_BYTES_PER_S: Final = 1024
"""A hundredth of the slowest lines on which anybody fetches models."""
WINDOW_S: Final = 60.0


class MinimumRate:
    """The rate of one response. Waiting begins with the object.

    The time until the first bytes is not held against a response: a server that cannot begin in the middle of a file
    sends first what nobody asked for.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_bytes = 0
        self._delay_s = 0.0
        self._waited_s = 0.0
        """Since the first bytes, or since the last window."""
        self._has_begun = False
        self._since = clock()

    def add(self, num_bytes: int) -> bool:
        """Count what has arrived. Returns whether it came fast enough to be progress, the first wait included."""
        waited_s = self._clock() - self._since
        if self._has_begun:
            self._waited_s += waited_s
        else:
            self._has_begun, self._delay_s = True, waited_s
        self._num_bytes += num_bytes
        return self._num_bytes >= MIN_BYTES_PER_S * (self._delay_s + self._waited_s)

    def resume(self) -> None:
        """Wait again: what has arrived was used up.

        Raises:
            TransientError: a window is over, and too little came in it.
        """
        if self._waited_s >= WINDOW_S:
            if self._num_bytes < MIN_BYTES_PER_S * self._waited_s:
                raise TransientError(
                    f"the source sends too slowly ({self._num_bytes} bytes in {self._waited_s:.0f} s)"
                )
            self._num_bytes, self._delay_s, self._waited_s = 0, 0.0, 0.0
        self._since = self._clock()
