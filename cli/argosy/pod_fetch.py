"""Pod fetch: what `argosy models pull --progress-port` does more than a fetch at a terminal.

Owns the progress port, the container's termination message, the end at SIGTERM, and how long another process that
fetches the model may go without progress. Must not know how a model is
fetched.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from argosy.arguments import age_seconds
from argosy.errors import CommandError, UsageError
from argosy.sigterm import ends_at_sigterm
from argosy_fetcher.lock_holder import IDLE_AFTER_S
from argosy_fetcher.progress import Progress
from argosy_fetcher.progress_meter import ProgressMeter
from argosy_fetcher.progress_server import ProgressServer
from argosy_protocol.program.listen import CannotListen

TERMINATION_LOG: Final = Path("/dev/termination-log")
"""The kubelet mounts it, and shows its content as the container's termination message (`terminationMessagePath`)."""

LOCK_IDLE_ENV: Final = "ARGOSY_LOCK_IDLE"


def lock_idle_after() -> float:
    """Return the seconds that another process which fetches the model may go without progress, before that is told.

    Raises:
        UsageError: the environment's value is no duration, or none that is longer than 0.
    """
    value = os.environ.get(LOCK_IDLE_ENV)
    if not value:
        return IDLE_AFTER_S
    try:
        seconds = age_seconds(value)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{LOCK_IDLE_ENV}: {value[:40]!r} {error}") from None
    if not seconds:
        raise UsageError(f"{LOCK_IDLE_ENV} must be longer than 0; 10m is the default")
    return seconds


@contextmanager
def pod_fetch(source: str, port: int, shown: Progress) -> Iterator[ProgressMeter]:
    """Yield a `Progress` that a port reports while the context lasts, and in which SIGTERM ends the process.

    Args:
        source: the model as the user wrote it.
        shown: is told everything as well.

    Raises:
        CommandError: the port is taken, or not permitted.
    """
    meter = ProgressMeter(source, shown)
    try:
        # A fetch may be killed at any moment, and continues from its journal.
        with (
            ends_at_sigterm("stopped by SIGTERM; what has arrived is kept"),
            ProgressServer(port, meter.report),
        ):
            yield meter
    except CannotListen as error:
        raise CommandError(str(error)) from None


def write_termination_message(message: str, path: Path = TERMINATION_LOG) -> None:
    """Leave a message for `kubectl describe pod` and the operator, if this is a container of a pod."""
    with suppress(OSError), path.open("r+") as file:  # never creates it
        file.write(message)
        file.truncate()
