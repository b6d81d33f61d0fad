"""Non-blocking writer of lines to a descriptor whose reader may be slow or gone, such as standard error.

Owns: the thread that writes. Must not know: what the lines contain.
Invariants: `write` neither blocks nor raises on a slow or closed reader; the buffer is bounded, and lines that do not
fit are dropped whole.
"""

# Not compiled: hands lines to a thread.

from __future__ import annotations

import logging
import os
import queue
import threading

MAX_WAITING_BYTES = 4 * 1024 * 1024
"""Some 20,000 access lines; reached only when the reader has stopped."""
LAST_LINES_S = 1.0
"""How long `close` waits for the reader."""


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
        """Queue whole lines to be written. Returns False if the buffer is full and the lines were dropped."""
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
        """Wait until everything is written, at most `timeout_s`. A later `write` starts a new thread."""
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
                pass  # the other end is closed, so the error cannot be reported either
            with self._lock:
                self._waiting_bytes -= len(lines)


class LineHandler(logging.Handler):
    """Logging handler that writes through a `LineWriter`, so that a log call cannot block the event loop."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)
