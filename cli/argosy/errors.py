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
ADDRESS: Final = 3
STALLED: Final = 4
INTERRUPTED: Final = 130
TERMINATED: Final = 143
EXIT_CODES: Final = {
    OK: "success; of a server, a stop that was asked for",
    FAILURE: "failure, such as no answer, a full disk or a model that does not fit",
    USAGE: "wrong usage, a bad manifest, or a model that cannot be served",
    ADDRESS: "the address of a server is taken",
    STALLED: "the load of an engine's model stalled (`--load-stall-timeout`)",
    INTERRUPTED: "interrupted by Ctrl-C",
    TERMINATED: "a fetch, a repeated prune or the start of a container was ended by SIGTERM",
}
"""Exit codes of all commands but `argosy operator`, which says its own, and what they mean."""


class CommandError(Exception):
    """The operation failed."""

    exit_code: ClassVar[int] = FAILURE

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class UsageError(CommandError):
    """The command line or the manifest must change."""

    exit_code = USAGE


def reason(error: Exception) -> str:
    """Say what the system or a library says of a failure, without the number of an error."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
