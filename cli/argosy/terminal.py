"""Display on a terminal, or in a log: tables, and a fleet's state.

Owns: the text of replicas and services. Must not know: sockets, processes.
Invariants: if standard output is not a terminal, every line is final and complete in itself; what a table's cells say,
which others may have chosen, moves no cursor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from argosy_fetcher.progress_display import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from argosy.local.control_messages import FleetStatus, ReplicaStatus

_STYLES = {
    "Routable": "green",
    "Ready": "cyan",
    "Starting": "yellow",
    "Draining": "magenta",
    "Stopping": "magenta",
    "BackOff": "bold red",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format columns as kubectl does: no rules, two or more spaces in between, readable by `cut` and `awk`."""
    lines = [header, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def age(seconds: float) -> str:
    """Format a duration in its largest unit of which there are at least two: `90s`, `12m`, `3d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


class Progress(Protocol):
    """Shows successive statuses of a fleet."""

    def show(self, status: FleetStatus) -> None: ...

    def close(self) -> None: ...


def progress() -> Progress:
    """Choose the display: live on a terminal, plain lines elsewhere."""
    return LiveProgress() if sys.stdout.isatty() else PlainProgress()


class PlainProgress:
    """Prints one line for each change of a replica."""

    def __init__(self, known: FleetStatus | None = None) -> None:
        self._shown = _lines(known) if known else {}

    def show(self, status: FleetStatus) -> None:
        lines = _lines(status)
        for name, line in lines.items():
            if self._shown.get(name) != line:
                print(f"{name}  {line}", flush=True)
        for name in self._shown.keys() - lines.keys():
            print(f"{name}  gone", flush=True)
        self._shown = lines

    def close(self) -> None:
        pass


class LiveProgress:
    """A table that is redrawn in place."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(auto_refresh=True, refresh_per_second=8)
        self._live.start()

    def show(self, status: FleetStatus) -> None:
        self._live.update(_live_table(status))

    def close(self) -> None:
        self._live.stop()


def _lines(status: FleetStatus) -> dict[str, str]:
    lines = {replica.name: _line(replica) for service in status.services for replica in service.replicas}
    if not status.is_stopping:
        lines["router"] = "Ready" if status.router.is_ready else f"Starting  {status.router.reason}"
    return lines


def _line(replica: ReplicaStatus) -> str:
    restarts = f"  (restart {replica.restarts})" if replica.restarts else ""
    return f"{replica.phase}  {replica.reason}".rstrip() + restarts


def _live_table(status: FleetStatus) -> RenderableType:
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for service in status.services:
        done = service.is_settled and not status.is_stopping
        mark = Text("✓", style="green") if done else Spinner("dots")
        grid.add_row(
            mark, Text(service.key, style="bold"), f"{service.routable}/{service.desired}", service.reason
        )
        for replica in service.replicas:
            state = Text(replica.phase, style=_STYLES.get(replica.phase, ""))
            grid.add_row("", f"  {replica.name}", state, replica.reason)
    router = status.router
    mark = Text("✓", style="green") if router.is_ready else Spinner("dots")
    grid.add_row(
        mark, Text("router", style="bold"), "Ready" if router.is_ready else "Starting", router.reason
    )
    return grid
