"""Marked progress: a `Progress` that shows those who wait for a lock that its holder makes progress."""

from __future__ import annotations

from argosy_fetcher.lock_holder import HolderMark
from argosy_fetcher.progress import Progress
from argosy_protocol.model_progress import Phase


class MarkedProgress:
    """Passes everything on. Notes are no progress: a retry writes one."""

    def __init__(self, told: Progress, mark: HolderMark) -> None:
        self._told = told
        self._mark = mark

    def enter(self, phase: Phase) -> None:
        self._mark.progressed()
        self._told.enter(phase)

    def resolved(self, source: str, revision: str) -> None:
        self._mark.progressed()
        self._told.resolved(source, revision)

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        self._mark.progressed()
        self._told.begin(total_bytes, present_bytes)

    def advance(self, num_bytes: int) -> None:
        self._mark.progressed()
        self._told.advance(num_bytes)

    def note(self, text: str) -> None:
        self._told.note(text)

    def end(self) -> None:
        self._told.end()
