"""Lines for a descriptor that perhaps nobody reads, such as standard error.

Owns: the thread that writes. Must not know: what the lines say.
Invariants: `write` neither blocks nor raises; what waits is bounded, and what does not fit is dropped whole.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

MAX_WAITING_BYTES = 4 * 1024 * 1024
"""Some 20,000 access lines; reached only when nobody reads."""
LAST_LINES_S = 1.0
"""How long the end waits for whoever reads."""


class LineWriter:
    """Writes to `descriptor`, one line or block of lines after another."""

    def __init__(self, descriptor: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._descriptor = descriptor
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, lines: bytes) -> bool:
        """Has whole lines written some time. False: too much waits already, they are dropped."""
        with self._lock:
            if self._waiting_bytes + len(lines) > self._max_waiting_bytes:
                return False
            self._waiting_bytes += len(lines)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="line writer", daemon=True)
                self._thread.start()
        self._queue.put(lines)
        return True

    def close(self, timeout_s: float = LAST_LINES_S) -> None:
        """Waits until all is written, at most so long. Lines written after that get a thread of their own."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout_s)

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            rest = memoryview(lines)
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                pass  # closed at the other end: there is nobody to tell
            with self._lock:
                self._waiting_bytes -= len(lines)


class LineHandler(logging.Handler):
    """Log records through a `LineWriter`: a log call must not stop the loop either."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)
