"""How commands end: errors, exit codes, and SIGTERM.

CommandError        1   the operation failed; the message says what to do
└── UsageError      2   the command line or the manifest must change

Invariant: `str(error)` is one line for people, including the remedy; details, such as the tail of a log, are in
`details`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import ClassVar, Final, NoReturn

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


@contextmanager
def ends_at_sigterm(last_line: str) -> Iterator[None]:
    """Let SIGTERM end the process at once, with a last line on standard error, while the context lasts."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        with suppress(OSError):
            os.write(2, f"argosy: {last_line}\n".encode())
        os._exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
