"""Progress meter: what a fetch has done so far, as numbers that may be asked for at any time.

Owns phase, rate and remaining time. Must not know who asks. Invariant: a report keeps the bounds of `ModelProgress`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from argosy_fetcher.progress import Progress
from argosy_fetcher.progress_display import duration_text, printable, size_text
from argosy_protocol.model_progress import ModelProgress, Phase

RATE_WINDOW_S: Final = 15.0
"""The rate is the mean of this time: long enough not to jump, short enough to show soon that nothing arrives."""
_SAMPLE_INTERVAL_S: Final = 1.0
_MAX_SOURCE: Final = 1024
_MAX_REVISION: Final = 256
_MAX_NOTE: Final = 512


class ProgressMeter:
    """A `Progress` that keeps account, and passes everything on.

    Args:
        source: the model as the user wrote it.
        shown: is told everything as well.
        clock: seconds from any start.
    """

    def __init__(self, source: str, shown: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._clock = clock
        self._lock = threading.Lock()
        self._source = source
        self._revision = self._note = ""
        self._phase: Phase = "resolving"
        self._total = self._done = self._present = 0
        self._started = clock()
        self._samples: deque[tuple[float, int]] = deque()
        """Times, and the bytes done by then: one that is older than the window, and those of the window."""

    def report(self) -> ModelProgress:
        with self._lock:
            rate = self._rate(self._clock()) if self._phase == "fetching" else 0.0
            left = max(0, self._total - self._done)
            return ModelProgress(
                source=printable(self._source)[:_MAX_SOURCE],
                revision=printable(self._revision)[:_MAX_REVISION],
                phase=self._phase,
                fetched_bytes=max(0, self._done),
                total_bytes=max(0, self._total),
                bytes_per_second=rate,
                eta_seconds=left / rate if rate > 0.0 else None,
                note=printable(self._note)[:_MAX_NOTE],
            )

    def outcome(self) -> str:
        """Describe a fetch that has ended: `28.0 GiB fetched in 70 s`, or `already stored`."""
        with self._lock:
            fetched, seconds = self._done - self._present, self._clock() - self._started
        return (
            f"{size_text(fetched)} fetched in {duration_text(seconds)}" if fetched > 0 else "already stored"
        )

    def enter(self, phase: Phase) -> None:
        with self._lock:
            self._phase, self._note = phase, ""
        self._shown.enter(phase)

    def resolved(self, source: str, revision: str) -> None:
        with self._lock:
            self._revision = revision
        self._shown.resolved(source, revision)

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        with self._lock:
            self._phase, self._note = "fetching", ""
            self._total, self._done, self._present = total_bytes, present_bytes, present_bytes
            self._samples.clear()
            self._samples.append((self._clock(), present_bytes))
        self._shown.begin(total_bytes, present_bytes)

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._sample(self._clock())
        self._shown.advance(num_bytes)

    def note(self, text: str) -> None:
        with self._lock:
            self._note = text
        self._shown.note(text)

    def end(self) -> None:
        with self._lock:
            self._phase, self._note = "done", ""
        self._shown.end()

    def _sample(self, now: float) -> None:
        if not self._samples or now - self._samples[-1][0] < _SAMPLE_INTERVAL_S:
            return
        self._samples.append((now, self._done))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_WINDOW_S:
            self._samples.popleft()

    def _rate(self, now: float) -> float:
        self._sample(now)
        since, done_then = self._samples[0]
        return max(0.0, (self._done - done_then) / (now - since)) if now > since else 0.0
