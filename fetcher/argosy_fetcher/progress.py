"""Progress: what a fetch reports while it runs, and displays of it: a bar on a terminal, plain lines elsewhere.

A display owns the text and how often it appears. Must not know what is fetched, or how. Invariant: text that a server
chose cannot move the cursor, because what is not printable is replaced.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from argosy_protocol.reports import SIZE_UNITS, Phase, duration_text, share_text

if TYPE_CHECKING:
    from rich.console import Console


class Progress:
    """Observer of one fetch; this one reports nothing. Its methods may be called from several threads at once and must
    not block."""

    def enter(self, phase: Phase) -> None:
        """Another phase has begun. `begin` enters `fetching`, and `end` enters `done`, without this call."""

    def resolved(self, source: str, revision: str) -> None:
        """The revision is known."""

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        """The selected files are known.

        Args:
            total_bytes: size of all selected files.
            present_bytes: how much of it an earlier attempt, or another cache on this machine, has left here.
        """

    def advance(self, num_bytes: int) -> None:
        """Bytes have arrived. Negative if content turned out to be wrong and is fetched again."""

    def note(self, text: str) -> None:
        """Something worth a line: a wait for another process, a retry after a failure."""

    def end(self) -> None:
        """The model is complete."""


class ForwardedProgress(Progress):
    """Passes everything on.

    Args:
        on_progress: called first, but not for notes: a retry writes one.
    """

    def __init__(self, shown: Progress, on_progress: Callable[[], None] = lambda: None) -> None:
        self._shown = shown
        self._on_progress = on_progress

    def enter(self, phase: Phase) -> None:
        self._on_progress()
        self._shown.enter(phase)

    def resolved(self, source: str, revision: str) -> None:
        self._on_progress()
        self._shown.resolved(source, revision)

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        self._on_progress()
        self._shown.begin(total_bytes, present_bytes)

    def advance(self, num_bytes: int) -> None:
        self._on_progress()
        self._shown.advance(num_bytes)

    def note(self, text: str) -> None:
        self._shown.note(text)

    def end(self) -> None:
        self._shown.end()


LINE_INTERVAL_S: Final = 5.0
_BAR_INTERVAL_S: Final = 0.1
"""How often a bar takes in what has arrived. Its own lock is too slow for every chunk."""
_RATE_LINES: Final = 6
"""The rate of a line is the mean since this many lines ago, so that it neither jumps nor lags by minutes."""


class ProgressDisplay(Progress):
    """A `Progress` that is shown until its context ends: threads that still fetch must not write after that."""

    _is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._is_closed = True


def progress_display(write: Callable[[str], None] | None = None) -> ProgressDisplay:
    """Choose the display: a bar if standard error is a terminal, else lines.

    Args:
        write: takes a line without its end; standard error if left out.
    """
    if sys.stderr.isatty():
        return BarDisplay()
    return LineDisplay(write or _write_error)


class LineDisplay(ProgressDisplay):
    """Writes a line at most every `interval_s` seconds while bytes arrive, and one for every event.

    Args:
        write: takes a line without its end.
        clock: seconds from any start.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        interval_s: float = LINE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._total = self._done = self._present = 0
        self._begun: float | None = None
        self._lines: deque[tuple[float, int]] = deque(maxlen=_RATE_LINES)
        """Time of the last lines, and the bytes done by then."""

    def resolved(self, source: str, revision: str) -> None:
        self._print(f"{source}: revision {revision}")

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        with self._lock:
            self._total, self._present = total_bytes, present_bytes
            self._done = present_bytes
            self._begun = self._clock()
            self._lines.clear()
            self._lines.append((self._begun, present_bytes))
        if present_bytes < total_bytes:
            present = f", of which {size_text(present_bytes)} are here already" if present_bytes else ""
            self._print(f"fetching {size_text(total_bytes)}{present}")

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if not self._lines or now <= self._lines[-1][0] or now - self._lines[-1][0] < self._interval_s:
                return
            since, done_then = self._lines[0]
            rate = (self._done - done_then) / (now - since)
            self._lines.append((now, self._done))
            line = status_text(self._done, self._total, rate)
        self._print(line)

    def note(self, text: str) -> None:
        self._print(text)

    def end(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, None
            fetched = self._done - self._present
        if begun is not None and fetched > 0:
            seconds = self._clock() - begun
            self._print(f"fetched {size_text(fetched)} in {duration_text(seconds)}")

    def _print(self, text: str) -> None:
        if not self._is_closed:
            self._write(printable(text))


class BarDisplay(ProgressDisplay):
    """Draws a bar with bytes, rate and remaining time; events are lines above it.

    Args:
        console: standard error if left out.
    """

    def __init__(self, console: Console | None = None) -> None:
        if console is None:
            from rich.console import Console

            console = Console(stderr=True)
        self._console = console
        self._lock = threading.Lock()
        self._pending = 0
        self._flushed = 0.0
        self._bar: Any = None
        self._label = ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, frames)
        self._stop()

    def resolved(self, source: str, revision: str) -> None:
        self._label = printable(source.rpartition("://")[2])
        self._print(f"{source}: revision {revision}")

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        self._stop()
        if present_bytes >= total_bytes or self._is_closed:
            return
        self._bar = _make_bar(self._console)
        self._bar.add_task(self._label, total=total_bytes, completed=present_bytes)
        self._bar.start()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._pending += num_bytes
            now = time.monotonic()
            if now - self._flushed < _BAR_INTERVAL_S:
                return
            self._flushed = now
            arrived, self._pending = self._pending, 0
        self._move(arrived)

    def note(self, text: str) -> None:
        self._print(text)

    def end(self) -> None:
        self._stop()

    def _move(self, num_bytes: int) -> None:
        bar = self._bar
        if bar is not None and num_bytes:
            bar.update(bar.tasks[0].id, advance=num_bytes)

    def _stop(self) -> None:
        with self._lock:
            arrived, self._pending = self._pending, 0
        self._move(arrived)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        if not self._is_closed:
            self._console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _make_bar(console: Console) -> Any:
    from rich import progress as rich_progress
    from rich.text import Text

    class StatusColumn(rich_progress.ProgressColumn):
        """Share, bytes, rate and remaining time, in the words of the lines."""

        def render(self, task: rich_progress.Task) -> Text:
            rate = task.finished_speed or task.speed or 0.0
            return Text(status_text(int(task.completed), int(task.total or 0), rate))

    return rich_progress.Progress(
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        StatusColumn(),
        console=console,
    )


def status_text(done_bytes: int, total_bytes: int, bytes_per_s: float) -> str:
    """Describe a transfer: `43 % 12.1/28.0 GiB, 253.1 MiB/s, eta 64 s`; without what is not known."""
    text = share_text(done_bytes, total_bytes)
    if bytes_per_s <= 0.0:
        return text
    text += f", {size_text(int(bytes_per_s))}/s"
    left = total_bytes - done_bytes
    return f"{text}, eta {duration_text(left / bytes_per_s)}" if left > 0 else text


def size_text(num_bytes: int) -> str:
    """Format a size with a binary unit: `1.4 GiB`."""
    unit, name = next((entry for entry in SIZE_UNITS if num_bytes >= entry[0]), (1, "B"))
    return f"{num_bytes} B" if unit == 1 else f"{num_bytes / unit:.1f} {name}"


def printable(text: str) -> str:
    """Replace what is not printable, so that a text stays on its line."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _write_error(line: str) -> None:
    sys.stderr.write(line + "\n")  # in one call, because several threads write
    sys.stderr.flush()
