"""The error of the benchmarks' commands.

Its message is one line for people that names the remedy; the commands print it and exit with its code.
"""

from __future__ import annotations

FAILURE = 1
USAGE = 2


class BenchmarkError(Exception):
    """The benchmark cannot run.

    Args:
        exit_code: `FAILURE` if a later try may succeed as it is, `USAGE` if the command line or a file must change.
    """

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
