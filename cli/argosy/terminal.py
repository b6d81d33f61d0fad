"""What commands share on a terminal: the arguments that they read, and tables and a fleet's state that they print.

Invariants: if standard output is not a terminal, every line is final and complete in itself; what a table's cells say,
which others may have chosen, moves no cursor.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from argosy.errors import UsageError
from argosy_fetcher.progress import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from argosy.local.control import FleetStatus, ReplicaStatus


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


def progress() -> PlainProgress | LiveProgress:
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
            mark,
            Text(service.key, style="bold"),
            f"{service.routable}/{service.desired}",
            _plain(service.reason),
        )
        for replica in service.replicas:
            state = Text(replica.phase, style=_STYLES.get(replica.phase, ""))
            grid.add_row("", f"  {replica.name}", state, _plain(replica.reason))
    router = status.router
    mark = Text("✓", style="green") if router.is_ready else Spinner("dots")
    grid.add_row(
        mark, Text("router", style="bold"), "Ready" if router.is_ready else "Starting", _plain(router.reason)
    )
    return grid


def _plain(text: str) -> RenderableType:
    """A text of others as it is."""
    from rich.text import Text

    return Text(printable(text))


_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)(?:([kmgt])|([KMGT])(?:iB?)?)?")
_AGE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])")
_POSITIONAL: Final = "\0"
"""Marks an argument behind `--` while argparse reads it; no argument of a process can contain it."""
_OF_FLEET: Final = re.compile(r"`argosy (?:up|down|ps|logs|why|chat|route|dashboard)\b")
"""Where a text names a command for the fleet on this machine."""
_AGE_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors look like all other errors of a command: one line, with the remedy.

    Flags may stand before, between and behind positional arguments. What is behind the first `--` is positional.
    """

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        if self._subparsers is not None:  # argparse cannot mix theirs, which have no two positional ones
            return super().parse_args(args, namespace)
        given = list(sys.argv[1:] if args is None else args)
        if "--" in given:  # which parse_intermixed_args forgets before it reads the positional arguments
            at = given.index("--") + 1
            given[at:] = [_POSITIONAL + argument for argument in given[at:]]
        options = self.parse_intermixed_args(given, namespace)
        for name, value in vars(options).items():
            if isinstance(value, str):
                setattr(options, name, value.removeprefix(_POSITIONAL))
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.replace(_POSITIONAL, '')}; `{self.prog} --help` shows the arguments")


def add_output(parser: argparse.ArgumentParser, text: str = "table") -> None:
    parser.add_argument("-o", "--output", choices=(text, "json"), default=text, help="format (%(default)s)")


def print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="where the fleet keeps its state ($ARGOSY_STATE_DIR, else .argosy in the current directory)",
    )


def with_state_dir(text: str, state_dir: str | None) -> str:
    """Return a text in which commands for the fleet on this machine have the --state-dir that was given, if any."""
    if not state_dir:
        return text
    flag = f" --state-dir {shlex.quote(state_dir)}"
    return _OF_FLEET.sub(lambda command: command[0] + flag, text)


def state_dir_in(arguments: Sequence[str]) -> str | None:
    """Return the value of --state-dir among the arguments of a command; None without one."""
    before = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    for at, argument in enumerate(before):
        name, equals, value = argument.partition("=")
        if name == "--state-dir":
            return value if equals else next(iter(before[at + 1 :]), None)
    return None


def positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds")
    return value


def port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError("must be between 1 and 65535")
    return value


def size_bytes(text: str) -> int:
    """Parse a size: bytes, or with a suffix k, m, g, t (decimal) or K, M, G, T (binary; Ki, KiB and so on as well)."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError("must be a size such as 500G or 64000000")
    if found[2]:
        factor = 1000 ** ("kmgt".index(found[2]) + 1)
    else:
        factor = 1024 ** ("KMGT".index(found[3]) + 1) if found[3] else 1
    return int(float(found[1]) * factor)


def percent_or_bytes(text: str) -> float | int:
    """Parse a share of a disk such as 15% (a float), or a size (an int)."""
    number = text.removesuffix("%")
    if number == text:
        return size_bytes(text)
    if not (number.isascii() and number.isdigit() and int(number) < 100):
        raise argparse.ArgumentTypeError("must be a share such as 15%, or a size such as 50G")
    return float(number)


def age_seconds(text: str) -> float:
    """Parse a duration with a unit: s, m, h, d or w."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError("must be a number with a unit: s, m, h, d or w, such as 30d")
    return float(found[1]) * _AGE_UNITS[found[2]]
