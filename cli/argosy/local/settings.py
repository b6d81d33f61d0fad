"""Settings of a local fleet: its programs, addresses and times.

Owns: the defaults and their reasons. Must not know: manifests.
Invariant: settings never change while the supervisor runs.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

HOST: Final = "127.0.0.1"
"""Engines and router listen on loopback only, as the local fleet serves this machine."""
DEFAULT_PORT: Final = 8080

_ARGOSY: Final = (
    sys.executable,
    "-P",
    "-m",
    "argosy",
)  # -P: never import from the directory we happen to be in


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings with which `argosy up` starts a supervisor."""

    port: int = DEFAULT_PORT
    """The router's port."""
    api_key: str = ""
    """Key that the router requires of clients; none by default, as it listens on loopback."""
    api_keys_file: str = ""
    """Absolute path of a file of client keys with their terms, which the router reads again when it changes."""
    engine: tuple[str, ...] = _ARGOSY
    """Command of an engine, to which `serve MODEL ...` is appended."""
    router: tuple[str, ...] = (*_ARGOSY, "router")
    """Command of the router, to which flags are appended."""
    batch: tuple[str, ...] = (*_ARGOSY, "batch")
    """Command of what keeps files, batches and responses, to which flags are appended."""
    first_backoff_s: float = 0.5
    """Delay before the first restart; it doubles with each further one. Short, as most crashes happen once."""
    most_backoff_s: float = 30.0
    """Cap of the delay: a crash loop costs little, and a removed cause is noticed soon."""
    most_backoff_unready_s: float = 300.0
    """The same for a replica that has never been ready, as in Kubernetes: each attempt loads a model, beside replicas
    that work and need the memory, and an edit of its manifest does not wait for the next one."""
    steady_s: float = 60.0
    """A replica that was ready for this long starts again with the first delay."""
    min_ready_s: float = 10.0
    """How long a new replica must have been ready before a rolling update counts it as available, like the pods'
    minReadySeconds: a replica that crashes on its first requests must not replace one that works."""
    health_period_s: float = 5.0
    health_failures: int = 6
    """Failed checks of /health in a row, half a minute's worth, after which a process is restarted because it hangs.
    Fewer would restart one that merely shares its cores with a build."""


def backoff_s(settings: Settings, failures: int, *, has_served: bool = True) -> float:
    """Delay before the next start, after this number of failures in a row (at least 1)."""
    most_s = settings.most_backoff_s if has_served else settings.most_backoff_unready_s
    return min(most_s, settings.first_backoff_s * 2.0 ** min(failures - 1, 32))


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for a child that lives within the block.

    A socket is bound to it that does not listen. Linux gives such a port to no socket that asks for any port, but lets
    a server listen there that asks for this one with SO_REUSEADDR, as engines and the router do.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((HOST, 0))
        port: int = reservation.getsockname()[1]
        yield port


def is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
