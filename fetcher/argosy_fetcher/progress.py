"""Progress: what a fetch reports while it runs. Printing it is the caller's."""

from __future__ import annotations

from typing import Protocol

from argosy_protocol.model_progress import Phase


class Progress(Protocol):
    """Observer of one fetch. Its methods may be called from several threads at once and must not block."""

    def enter(self, phase: Phase) -> None:
        """Another phase has begun. `begin` enters `fetching`, and `end` enters `done`, without this call."""
        ...

    def resolved(self, source: str, revision: str) -> None:
        """The revision is known."""
        ...

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        """The selected files are known.

        Args:
            total_bytes: size of all selected files.
            present_bytes: how much of it an earlier attempt, or another cache on this machine, has left here.
        """
        ...

    def advance(self, num_bytes: int) -> None:
        """Bytes have arrived. Negative if content turned out to be wrong and is fetched again."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line: a wait for another process, a retry after a failure."""
        ...

    def end(self) -> None:
        """The model is complete."""
        ...


class Silent:
    """A `Progress` that reports nothing."""

    def enter(self, phase: Phase) -> None: ...

    def resolved(self, source: str, revision: str) -> None: ...

    def begin(self, total_bytes: int, present_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...
