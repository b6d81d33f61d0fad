"""A progress that remembers what it was told, and checks the order."""

from __future__ import annotations

import threading

from argosy_fetcher.progress import Progress
from argosy_protocol.reports import Phase


class RecordedProgress(Progress):
    def __init__(self) -> None:
        self.events: list[str] = []
        """Names of the calls but `advance` and `note`, in order."""
        self.revision = ""
        self.total = 0
        self.present = 0
        self.received = 0
        self.notes: list[str] = []
        self.phases: list[Phase] = []
        self._lock = threading.Lock()

    def enter(self, phase: Phase) -> None:
        self.phases.append(phase)

    def resolved(self, source: str, revision: str) -> None:
        self.events.append("resolved")
        self.revision = revision

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        self.events.append("begin")
        self.total, self.present = total_bytes, present_bytes

    def advance(self, num_bytes: int) -> None:
        assert self.events[-1] == "begin"
        with self._lock:
            self.received += num_bytes

    def note(self, text: str) -> None:
        self.notes.append(text)

    def end(self) -> None:
        self.events.append("end")
