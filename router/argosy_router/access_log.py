"""One line per request, `key=value`, on standard error.

Owns: buffering and writing. Must not know: what the fields mean.
Invariants: no prompt, no key, no client text that could break a line; the buffer is bounded and lines are dropped,
not requests delayed.
"""

from __future__ import annotations

import asyncio
import os

FLUSH_S = 0.2
MAX_BUFFERED_LINES = 20_000
"""A few megabytes; reached only when nobody reads standard error."""


class AccessLog:
    """Collects lines and writes them a few times a second: one system call instead of one per request."""

    def __init__(self, descriptor: int = 2, *, is_enabled: bool = True) -> None:
        self._descriptor = descriptor
        self.is_enabled = is_enabled
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0

    def write(self, line: str) -> None:
        """Queues one line (without its end)."""
        if len(self._lines) >= MAX_BUFFERED_LINES:
            self.dropped += 1
            return
        self._lines.append(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            text = "\n".join(self._lines) + "\n"
            self._lines.clear()
            try:
                os.write(self._descriptor, text.encode("ascii", "backslashreplace"))
            except OSError:
                self.dropped += text.count("\n")
