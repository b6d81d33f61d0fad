"""Retries: how long to wait between attempts, and when to give up.

Owns the delays and the count of failures in a row. Must not know what is attempted. Progress resets the count, so a bad
line costs time only; a server that sends nothing is given up.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from argosy_fetcher.errors import TransientError

_Result = TypeVar("_Result")


class Cancelled(Exception):
    """Another thread of the same fetch has failed, or the fetch was interrupted."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_failures: int = 8
    """Failures in a row, without a byte between them, after which a fetch gives up: about a minute."""
    first_delay: float = 0.5
    """Doubled by each failure in a row."""
    max_delay: float = 30.0
    max_retry_after: float = 300.0
    """Cap on a server's Retry-After: the hub's rate limits count requests over five minutes."""
    wait: Callable[[threading.Event, float], object] = threading.Event.wait
    """Waits until the event is set, for the given time at most."""

    def delay(self, failures: int, retry_after_s: float | None) -> float:
        """Return the seconds until the next attempt, after `failures` failures in a row.

        The delay is random, so that many clients of a server that comes back do not arrive at once.
        """
        if retry_after_s is not None and math.isfinite(retry_after_s):
            return min(max(retry_after_s, 0.0), self.max_retry_after)
        longest = min(self.max_delay, self.first_delay * 2.0 ** min(failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter


class Attempts:
    """Failures in a row of one thing. Used by one thread.

    Args:
        what: names the thing in messages.
        note: is told each delay but the first, because single cuts are ordinary.
        cancelled: ends waiting.
    """

    def __init__(
        self,
        what: str,
        policy: RetryPolicy,
        note: Callable[[str], None],
        cancelled: threading.Event | None = None,
    ) -> None:
        self._what = what
        self._policy = policy
        self._note = note
        self._cancelled = cancelled or threading.Event()
        self._failures = 0

    def progressed(self) -> None:
        """Reset the count: something has arrived."""
        self._failures = 0

    def failed(self, error: TransientError) -> None:
        """Wait until the next attempt is due.

        Raises:
            TransientError: there were too many failures in a row.
            Cancelled: the event was set meanwhile.
        """
        self._failures += 1
        if self._failures >= self._policy.max_failures:
            raise TransientError(
                f"{self._what}: gave up after {self._failures} failures in a row: {error}; "
                "what has arrived is kept, so another run continues from there",
                error.retry_after_s,
            ) from error
        delay = self._policy.delay(self._failures, error.retry_after_s)
        if self._failures > 1 or error.retry_after_s:
            self._note(f"{self._what}: {error}; next attempt in {delay:.1f} s")
        self._policy.wait(self._cancelled, delay)
        if self._cancelled.is_set():
            raise Cancelled


def retrying(attempts: Attempts, call: Callable[[], _Result]) -> _Result:
    """Call until there is a result.

    Raises:
        TransientError: there were too many failures.
    """
    while True:
        try:
            return call()
        except TransientError as error:
            attempts.failed(error)
        except (ConnectionError, TimeoutError) as error:
            attempts.failed(TransientError(str(error) or type(error).__name__))
