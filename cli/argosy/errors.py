"""Errors of commands, with their exit codes.

CommandError        1   the operation failed; the message says what to do
└── UsageError      2   the command line or the manifest must change

Invariant: `str(error)` is one line for people, including the remedy; details, such as the tail of a log, are in
`details`.
"""

from __future__ import annotations

from typing import ClassVar, Final

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
TERMINATED: Final = 143


class CommandError(Exception):
    """The operation failed."""

    exit_code: ClassVar[int] = FAILURE

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class UsageError(CommandError):
    """The command line or the manifest must change."""

    exit_code = USAGE
