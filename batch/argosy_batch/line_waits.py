"""Which requests of one batch wait, and since when all that were sent have been refused.

Owns: when a batch only waits, so that it may yield its place. Must not know: what the requests are, places.
Invariant: once `end` was called no request of the batch is sent, and none waits; those in flight go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from argosy_batch.line_pace import PaceClosed

YIELD_AFTER_S: Final = 60.0
"""A batch whose requests have all been refused for this long only waits. Beginning it again reads its files."""


class LineWaits:
    """The waits of one batch's requests."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._waiting: set[asyncio.Task[object]] = set()
        self._refused_since: float | None = None
        self._has_ended = False

    def refused(self) -> None:
        """Note that a request will be sent again, because it was answered with 429 or 503."""
        if self._refused_since is None:
            self._refused_since = self._now()

    def answered(self) -> None:
        """Note that a request has its final answer."""
        self._refused_since = None

    @property
    def is_all(self) -> bool:
        """Whether the batch only waits."""
        return self._refused_since is not None and self._now() - self._refused_since >= YIELD_AFTER_S

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The current task waits inside the block.

        Raises:
            PaceClosed: no further request is sent.
        """
        if self._has_ended:
            raise PaceClosed
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    def end(self) -> None:
        """Cancel the tasks that wait, and let no other begin to."""
        self._has_ended = True
        for task in self._waiting:
            task.cancel()
