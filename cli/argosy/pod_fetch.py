"""Pod fetch: what `argosy models pull --progress-port` does more than a fetch at a terminal.

Owns the progress port, the container's termination message, what errors say of manifests, the end at SIGTERM, and how
long another process that fetches the model may go without progress. Must not know how a model is fetched.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from argosy.arguments import age_seconds
from argosy.diagnosis.remedies import is_unreachable
from argosy.errors import CommandError, UsageError
from argosy.sigterm import ends_at_sigterm
from argosy_fetcher.credentials import DIRECTORY_ENV, read_directory
from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    ModelHidden,
    ModelTooLarge,
    NoSpace,
    TransientError,
)
from argosy_fetcher.lock_holder import IDLE_AFTER_S
from argosy_fetcher.progress import Progress
from argosy_fetcher.progress_display import printable
from argosy_fetcher.progress_meter import ProgressMeter
from argosy_fetcher.progress_server import ProgressServer
from argosy_protocol.program.listen import CannotListen

TERMINATION_LOG: Final = Path("/dev/termination-log")
"""The kubelet mounts it, and shows its content as the container's termination message (`terminationMessagePath`)."""

_MAX_KEYS: Final = 8
"""Keys of a Secret that a message names."""

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
        FetchError, TransientError: as in the context, with what to do in a cluster. It is the termination message too.
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
    except (FetchError, TransientError) as error:
        told = type(error)(f"{error}{_remedy_in_a_cluster(error)}")
        write_termination_message(printable(str(told)))
        raise told from error


def _remedy_in_a_cluster(error: Exception) -> str:
    """What to do in a manifest, where the error says what to do on a machine; empty if that is the same."""
    match error:
        case ModelTooLarge():
            return "; raise spec.model.cache.sizeLimit"
        case NoSpace():
            return "; in a cluster, give the claim more room, or the model another spec.model.cache"
        case AccessDenied() | ModelHidden():
            return f"; in a cluster, {_secret()}"
        case TransientError() if is_unreachable(str(error)):
            return (
                "; in a cluster, look at its DNS and at the egress that NetworkPolicies allow, or name a mirror in the "
                "Secret of spec.model.secretRef"
            )
    return ""


def _secret() -> str:
    """Where credentials belong: a Secret, and the keys that the mounted one has."""
    directory = os.environ.get(DIRECTORY_ENV)
    if not directory:
        return "credentials are keys of the Secret that spec.model.secretRef names; none is named"
    keys = sorted(read_directory(Path(directory)))
    more = len(keys) - _MAX_KEYS
    shown = ", ".join(keys[:_MAX_KEYS]) + (f" and {more} more" if more > 0 else "")
    return f"credentials are keys of the Secret of spec.model.secretRef; it has {shown}"


def write_termination_message(message: str, path: Path = TERMINATION_LOG) -> None:
    """Leave a message for `kubectl describe pod` and the operator, if this is a container of a pod."""
    with suppress(OSError), path.open("r+") as file:  # never creates it
        file.write(message)
        file.truncate()
