"""The router's configuration, resolved.

Owns: names, defaults and their reasons. Must not know: argparse, the environment (see `main`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from argosy_router.http.client import ClientLimits
from argosy_router.http.server import ServerLimits
from argosy_router.index import DEFAULT_CAPACITY
from argosy_router.proxy.dispatcher import FIRST_BYTE_TIMEOUT_S, REQUEST_TIMEOUT_S

LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))


class ConfigError(Exception):
    """The configuration contradicts itself or is not safe; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything `argosy router` can be told."""

    host: str = "127.0.0.1"
    port: int = 8080
    admin_host: str = ""
    """Empty: the same as `host`."""
    admin_port: int = 8081
    """Zero: any free port; negative: no admin port."""
    replicas: tuple[str, ...] = ()
    replica_key: str = ""
    """Bearer key of the replicas named by `replicas`."""
    fleet_file: Path | None = None
    kubernetes: bool = False
    fleet_namespace: str = ""
    """Empty: the router's own namespace."""
    fleet_configmap: str = "argosy-fleet"
    api_keys: tuple[str, ...] = ()
    api_keys_file: Path | None = None
    """One key per line, read again when it changes (a mounted Secret is replaced in place)."""
    is_open: bool = False
    """No keys although the address is not loopback."""
    guards_metrics: bool = False
    fleet_key: bytes = b""
    policy: str = ""
    """Empty: each service's own."""
    index_capacity: int = DEFAULT_CAPACITY
    shutdown_timeout_s: float = 30.0
    """In-flight requests get this long after SIGTERM; keep it below the pod's grace period."""
    drain_settle_s: float = 0.0
    """How long after SIGTERM new connections are still accepted, while load balancers notice `/ready`."""
    first_byte_timeout_s: float = FIRST_BYTE_TIMEOUT_S
    request_timeout_s: float = REQUEST_TIMEOUT_S
    access_log: bool = True
    server: ServerLimits = field(default_factory=ServerLimits)
    client: ClientLimits = field(default_factory=ClientLimits)

    def check(self) -> None:
        """Raises ConfigError."""
        sources = [bool(self.replicas), self.fleet_file is not None, self.kubernetes]
        if sum(sources) != 1:
            raise ConfigError("name the replicas by exactly one of --replica, --fleet-file and --kubernetes")
        has_keys = bool(self.api_keys) or self.api_keys_file is not None
        if not has_keys and self.host not in LOOPBACK and not self.is_open:
            raise ConfigError(
                f"refusing to serve {self.host} without API keys: pass --api-key or --api-keys-file, "
                "or --no-auth if something in front checks them"
            )
        if self.kubernetes and not self.fleet_key:
            raise ConfigError("--kubernetes needs the fleet key in ARGOSY_FLEET_KEY")
        if self.fleet_key and len(self.fleet_key) < 16:
            raise ConfigError("ARGOSY_FLEET_KEY must have at least 16 bytes")
