"""Argument parsing shared by the commands."""

from __future__ import annotations

import argparse
from typing import NoReturn

from argosy.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors look like all other errors of a command: one line, with the remedy."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` shows the arguments")


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="where the fleet keeps its state ($ARGOSY_STATE_DIR, else .argosy in the current directory)",
    )


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
