"""The router's configuration, resolved.

Owns: names, defaults and their reasons. Must not know: argparse, the environment (see `main`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from argosy_router.flow_control.controller import FlowControlLimits
from argosy_router.http.client import ClientLimits
from argosy_router.http.limits import ServerLimits
from argosy_router.http.tls import ClientTls, ServerTls
from argosy_router.prefixes.index_memory import DEFAULT_BYTES as INDEX_MEMORY
from argosy_router.prefixes.index_memory import MIN_BYTES as MIN_INDEX_MEMORY
from argosy_router.proxy.dispatcher import FIRST_BYTE_TIMEOUT_S, REQUEST_TIMEOUT_S
from argosy_router.proxy.hedging import MAX_FACTOR, MIN_FACTOR
from argosy_router.records.access_log import AccessFormat
from argosy_router.records.recorder import DEFAULT_MAX_BYTES as RECORD_MAX_BYTES

MAX_WAIT_S = 3600.0
"""What a service's own limits allow, too."""
MAX_REQUEST_S = 86_400.0
"""The same for the time of a request."""
MAX_MODERATION_S = 0.01
"""Clients see the difference beyond it."""
MAX_ROUTERS = 1000
DEFAULT_ADMIN_PORT = 8081
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
    admin_port: int = DEFAULT_ADMIN_PORT
    """Zero: any free port; negative: no admin port."""
    admin_names: tuple[str, ...] = ()
    """Host names by which an admin port without a key may be called, besides this machine's."""
    replicas: tuple[str, ...] = ()
    replica_dns: tuple[str, ...] = ()
    """URLs whose host names resolve to the replicas' addresses."""
    replica_key: str = ""
    """Bearer key of the replicas named by `replicas` and `replica_dns`."""
    fleet_file: Path | None = None
    kubernetes: bool = False
    fleet_namespace: str = ""
    """Empty: the router's own namespace."""
    fleet_configmap: str = "argosy-fleet"
    api_keys: tuple[str, ...] = ()
    api_keys_file: Path | None = None
    """One key and its terms per line (`admission.keys`), read again when it changes (a mounted Secret is replaced in
    place)."""
    routers: int = 0
    """Routers that divide the limits of keys, this one included. Zero: those found in Kubernetes, else one."""
    is_open: bool = False
    """No keys although the address is not loopback."""
    ssl_certfile: Path | None = None
    """PEM: certificate of both ports, and its chain, perhaps its key. Without it they are plain HTTP."""
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None
    """PEM: clients of the endpoint must show a certificate of one of these authorities."""
    replica_ca_certs: Path | None = None
    """PEM: authorities of https replicas; none: the system's."""
    verifies_replicas: bool = True
    fleet_key: bytes = b""
    policy: str = ""
    """Empty: each service's own."""
    index_memory: int = INDEX_MEMORY
    """Bytes that the prefix indexes of all services may take."""
    shutdown_timeout_s: float = 30.0
    """In-flight requests get this long after SIGTERM; keep it below the pod's grace period."""
    drain_settle_s: float = 0.0
    """How long after SIGTERM new connections are still accepted, while load balancers notice `/ready`."""
    first_byte_timeout_s: float = FIRST_BYTE_TIMEOUT_S
    request_timeout_s: float = REQUEST_TIMEOUT_S
    hedge_after: float = 0.0
    """Times the predicted time to first token, after which a stream is asked for at a second replica; zero: never."""
    access_log: bool = True
    access_log_format: AccessFormat = "text"
    usage_log: Path | None = None
    """Directory of the usage files; None writes none."""
    record: Path | None = None
    """File of the trace being recorded; None records nothing."""
    record_max_bytes: int = RECORD_MAX_BYTES
    otlp_traces_endpoint: str = ""
    """URL of an OTLP collector (HTTP); empty traces nothing."""
    admission: FlowControlLimits = field(default_factory=FlowControlLimits)
    server: ServerLimits = field(default_factory=ServerLimits)
    client: ClientLimits = field(default_factory=ClientLimits)

    def check(self) -> None:
        """Raises ConfigError."""
        sources = [bool(self.replicas), bool(self.replica_dns), self.fleet_file is not None, self.kubernetes]
        if sum(sources) != 1:
            raise ConfigError(
                "name the replicas by exactly one of --replica, --replica-dns, --fleet-file and --kubernetes"
            )
        if "" in self.api_keys:
            raise ConfigError("an --api-key must not be empty")
        self._check_admission()
        if not 0 <= self.routers <= MAX_ROUTERS:
            raise ConfigError(f"--routers must be between 0 and {MAX_ROUTERS}")
        has_keys = bool(self.api_keys) or self.api_keys_file is not None
        if not has_keys and self.host not in LOOPBACK and not self.is_open:
            raise ConfigError(
                f"refusing to serve {self.host} without API keys: pass --api-key or --api-keys-file, "
                "or --no-auth if something in front checks them"
            )
        usage_log = self.usage_log
        if usage_log is not None and not (usage_log.is_dir() and os.access(usage_log, os.W_OK | os.X_OK)):
            raise ConfigError(f"--usage-log {usage_log} must be a directory this process may write to")
        if self.ssl_certfile is None and (self.ssl_keyfile is not None or self.ssl_ca_certs is not None):
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if self.replica_ca_certs is not None and not self.verifies_replicas:
            raise ConfigError("--replica-ca-certs and --replica-insecure exclude each other")
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError("--otlp-traces-endpoint must be an http:// or https:// URL")
        if self.hedge_after and not MIN_FACTOR <= self.hedge_after <= MAX_FACTOR:
            raise ConfigError(f"--hedge-after must be 0 or between {MIN_FACTOR:g} and {MAX_FACTOR:g}")
        for flag, seconds, most in (
            ("--idle-timeout", self.client.idle_timeout_s, MAX_WAIT_S),
            ("--request-timeout", self.request_timeout_s, MAX_REQUEST_S),
            ("--first-byte-timeout", self.first_byte_timeout_s, MAX_REQUEST_S),
        ):
            if not 0.0 < seconds <= most:
                raise ConfigError(f"{flag} must be above 0 and at most {most:.0f} seconds")
        if self.index_memory < MIN_INDEX_MEMORY:
            raise ConfigError(f"--index-memory must be at least {MIN_INDEX_MEMORY} bytes")
        if self.record_max_bytes <= 0:
            raise ConfigError("--record-max-bytes must be positive")
        if self.kubernetes and not self.fleet_key:
            raise ConfigError("--kubernetes needs the fleet key in ARGOSY_FLEET_KEY")
        if self.fleet_key and len(self.fleet_key) < 16:
            raise ConfigError("ARGOSY_FLEET_KEY must have at least 16 bytes")

    def _check_admission(self) -> None:
        admission = self.admission
        if admission.max_queued_requests < 0 or admission.max_queued_bytes < 0:
            raise ConfigError("--max-queued-requests and --max-queued-bytes must not be negative")
        if self.server.max_connections < 1:
            raise ConfigError("--max-connections must be positive")
        if not 0.0 <= self.server.moderation_s <= MAX_MODERATION_S:
            raise ConfigError(
                f"--stream-moderation-us must be between 0 and {MAX_MODERATION_S * 1e6:.0f} microseconds"
            )
        if self.server.max_inflight_bytes < self.server.max_body_bytes:
            raise ConfigError(
                f"--max-inflight-bytes must be at least {self.server.max_body_bytes}, one body's limit"
            )
        for flag, seconds in (
            ("--queue-timeout", admission.queue_timeout_s),
            ("--hold-timeout", admission.hold_timeout_s),
            ("--keep-alive-after", admission.keep_alive_after_s),
            ("--shutdown-timeout", self.shutdown_timeout_s),
            ("--drain-settle", self.drain_settle_s),
        ):
            if not 0.0 <= seconds <= MAX_WAIT_S:
                raise ConfigError(f"{flag} must be between 0 and {MAX_WAIT_S:.0f} seconds")

    def server_tls(self) -> ServerTls | None:
        """The endpoint's TLS, or None for plain HTTP.

        Raises:
            ConfigError: a file cannot be used.
        """
        if self.ssl_certfile is None:
            return None
        try:
            return ServerTls(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-certfile, --ssl-keyfile or --ssl-ca-certs: {error}") from None

    def admin_tls(self) -> ServerTls | None:
        """The admin port's TLS: the endpoint's certificate. Nobody has to show one: kubelets and operators have none,
        and the port has a key.

        Raises:
            ConfigError: a file cannot be used.
        """
        return replace(self, ssl_ca_certs=None).server_tls()

    def replica_tls(self) -> ClientTls:
        """TLS towards https replicas.

        Raises:
            ConfigError: the file cannot be used.
        """
        try:
            return ClientTls(self.replica_ca_certs, verifies=self.verifies_replicas)
        except OSError as error:
            raise ConfigError(f"--replica-ca-certs: {error}") from None
