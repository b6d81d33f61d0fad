"""Argument parsing shared by the commands."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from argosy.errors import UsageError

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
