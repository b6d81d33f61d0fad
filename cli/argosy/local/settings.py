"""How one local fleet runs: its programs, addresses and times.

Owns the defaults and their reasons. Must not know manifests. Invariant: it never changes while the supervisor runs.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import Final

HOST: Final = "127.0.0.1"
"""Engines and router listen on loopback only: the local fleet is for this machine."""
DEFAULT_PORT: Final = 8080

_ARGOSY: Final = (
    sys.executable,
    "-P",
    "-m",
    "argosy",
)  # -P: never import from the directory we happen to be in


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `argosy up` decides when it starts a supervisor."""

    port: int = DEFAULT_PORT
    """Where the router listens."""
    api_key: str = ""
    """Key the router asks of clients; none by default, as it listens on loopback."""
    engine: tuple[str, ...] = _ARGOSY
    """The engine's program; `serve MODEL ...` follows."""
    router: tuple[str, ...] = (*_ARGOSY, "router")
    """The router's program; flags follow."""
    first_backoff_s: float = 0.5
    """Delay before the first restart; it doubles with each one. Short, as most deaths are one-offs."""
    most_backoff_s: float = 30.0
    """Cap of the delay: a crash loop costs little, and a fixed cause is noticed soon."""
    steady_s: float = 60.0
    """A replica that was ready this long starts over with the first delay."""
    min_ready_s: float = 10.0
    """How long a new replica must have been ready before a rolling update counts on it; as the pods' minReadySeconds. A
    replica that dies of its first requests must not have taken the place of one that works."""
    health_period_s: float = 5.0
    health_failures: int = 6
    """Half a minute without an answer to /health: the process hangs and is restarted. Less would restart one that
    only shares its cores with a build."""


def backoff_s(settings: Settings, failures: int) -> float:
    """Delay before the next start, after so many failures in a row (at least 1)."""
    return min(settings.most_backoff_s, settings.first_backoff_s * 2.0 ** min(failures - 1, 32))


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
