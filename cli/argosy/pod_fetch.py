"""Pod fetch: what `argosy models pull --progress-port` does more than a fetch at a terminal.

Owns the progress port, the container's termination message and the end at SIGTERM. Must not know how a model is
fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from argosy.errors import CommandError
from argosy.sigterm import ends_at_sigterm
from argosy_fetcher.progress import Progress
from argosy_fetcher.progress_meter import ProgressMeter
from argosy_fetcher.progress_server import ProgressServer
from argosy_protocol.program.listen import CannotListen

TERMINATION_LOG: Final = Path("/dev/termination-log")
"""The kubelet mounts it, and shows its content as the container's termination message (`terminationMessagePath`)."""


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
