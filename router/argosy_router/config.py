"""The router's configuration: every flag's name, type, bounds, default and help text, and the reasons for the defaults.

`main` makes the flags of `argosy router` from `RouterConfig` (`argosy_protocol.program.flags`). Fields without a
description have no flag. Sizes are in bytes, times in seconds.
"""

# Not compiled: read once, at the start.

from __future__ import annotations

import os
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from argosy_protocol.fleet import RoutingPolicy
from argosy_protocol.program.flags import Flag, origins_problem

MAX_WAIT_S = 3600.0
"""Upper bound of queue timeouts; the same as for a service's own limits."""
MAX_REQUEST_S = 86_400.0
"""Upper bound of a request's time; the same as for a service's own limits."""
MAX_BYTES = 1 << 50
DEFAULT_ADMIN_PORT = 8081
DEFAULT_INDEX_MEMORY = 256 * 1024 * 1024
"""Room for at least a million chunks of 256 bytes: a quarter of a gigabyte of prompts."""
MIN_INDEX_MEMORY = 1024 * 1024
LOOPBACK = frozenset(("127.0.0.1", "::1", "localhost"))
ANY_HOST = frozenset(("", "0.0.0.0", "::"))  # noqa: S104 (compared only)

AccessFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

Name = Annotated[str, Meta(max_length=253)]
Url = Annotated[str, Meta(max_length=2048)]
Key = Annotated[str, Meta(max_length=4096)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Wait = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
Port = Annotated[int, Meta(ge=0, le=65535)]

_LISTEN = "listening"
_REPLICAS = "replicas (give one of --replica, --replica-dns, --fleet-file and --kubernetes)"
_ACCESS = "access"
_TLS = "TLS (PEM files, reread when they change)"
_ROUTING = "routing"
_QUEUE = "queue (for services without limits of their own)"
_TIMES = "timeouts (seconds)"
_BATCHES = "files, batches and stored responses (docs/batch.md)"
_LOGS = "logs"

_NO_FLAG = Flag(is_hidden=True)


class ConfigError(Exception):
    """The configuration contradicts itself or is not safe; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits and deadlines of client connections, each and all together."""

    max_header_bytes: Annotated[int, _NO_FLAG] = 32 * 1024
    """Bounds the request line and the headers together; nginx's default for large headers."""
    max_headers: Annotated[int, _NO_FLAG] = 100
    max_body_bytes: Annotated[int, _NO_FLAG] = 32 * 1024 * 1024
    """A million tokens of text are 4 MB; images travel inline as base64."""
    max_unread_body_bytes: Annotated[int, _NO_FLAG] = 16 * 1024
    """Bounds a body that is received but not used."""
    max_inflight_bytes: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_BYTES,
            description="memory limit for request bodies that are being received or whose response is incomplete, and "
            "for responses that clients have not read",
        ),
        Flag(group=_QUEUE, is_size=True),
    ] = 512 * 1024 * 1024
    """A quarter of the memory that the Helm chart gives a router. Each body is held once, and decoding briefly doubles
    one of them."""
    header_timeout_s: Annotated[float, _NO_FLAG] = 10.0
    """Bounds the time from a request's first byte to the end of its headers (slowloris)."""
    body_timeout_s: Annotated[float, _NO_FLAG] = 30.0
    """Period in which a client must deliver `min_body_rate` bytes per second on average."""
    min_body_rate: Annotated[int, _NO_FLAG] = 1024
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 24,
            description="client connections at a time; beyond the limit the router closes idle ones and those that "
            "have sent no whole request head, then refuses new ones",
        ),
        Flag(group=_LISTEN, metavar="N", default="half of the files the process may open, 16384 at most"),
    ] = 16384
    """`main` lowers the default if the process may not open enough files."""
    max_silent_per_address: Annotated[int, _NO_FLAG] = 0
    """Connections per client address without a whole request head. Zero stands for an eighth of `max_connections`."""
    trusted_proxies: Annotated[
        tuple[Annotated[str, Meta(max_length=64)], ...],
        Meta(
            max_length=1024,
            description="network of load balancers in front of the router; their connections are exempt from the limit "
            "on connections per address without a request; repeatable (0.0.0.0/0 and ::/0 exempt every address)",
        ),
        Flag(name="trusted-proxy", group=_LISTEN, metavar="CIDR", is_repeatable=True),
    ] = ()
    surplus_timeout_s: Annotated[float, _NO_FLAG] = 1.0
    """How long a connection over the limit may take to send a request head, which is then refused."""
    keep_alive_s: Annotated[float, _NO_FLAG] = 75.0
    write_stall_s: Annotated[float, _NO_FLAG] = 60.0
    """How long a client may leave the write buffer full before its connection is aborted, unless it reads as fast as
    `min_body_rate`."""
    write_buffer_bytes: Annotated[int, _NO_FLAG] = 4 * 1024
    """Bytes that a client may leave unread, beside what the kernel takes, before all of them count in the memory of
    bodies and the router pauses reading from the replica. As much as a connection takes anyway: of zero, each event
    would be written by itself rather than with all of its turn of the event loop."""
    stream_moderation_us: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="longest pause in microseconds in which the router coalesces events while many streams are "
            "fast, which halves the cost of an event; 0: never",
        ),
        Flag(group=_LISTEN, metavar="US"),
    ] = 500
    """Clients notice pauses of more than ten milliseconds, hence the bound."""
    max_held_bytes: Annotated[int, _NO_FLAG] = 64 * 1024
    """Bytes that a client may pipeline behind the current request. If it sends more, the connection closes after the
    current response."""
    tls_handshake_timeout_s: Annotated[float, _NO_FLAG] = 10.0
    """Bounds the time from accepting a connection to the end of its handshake."""
    linger_s: Annotated[float, _NO_FLAG] = 1.0
    """How long to discard input after refusing a request, so that the refusal is not lost to a TCP reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLimits:
    """Limits and deadlines of a connection to a replica."""

    connect_timeout_s: Annotated[float, _NO_FLAG] = 1.0
    """Replicas are in the same network, where a second is a thousand round trips. Bounds the cost of an address that
    drops packets."""
    idle_timeout_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=MAX_WAIT_S,
            description="longest pause within a response; after it a stream is migrated or cut",
        ),
        Flag(group=_TIMES, metavar="S"),
    ] = 60.0
    keep_alive_s: Annotated[float, _NO_FLAG] = 4.0
    """Shorter than the shortest keep-alive timeout among engines' servers (uvicorn: 5 s), so that reuse rarely races
    with a close."""
    max_idle_connections: Annotated[int, _NO_FLAG] = 256
    max_header_bytes: Annotated[int, _NO_FLAG] = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowControlLimits:
    """Limits of the queue of each service that sets none of its own, and the times of keep-alive comments."""

    max_queued_requests: Annotated[
        int,
        Meta(ge=0, le=1 << 24, description="requests that may be queued while all replicas are full"),
        Flag(group=_QUEUE, metavar="N"),
    ] = 4096
    max_queued_bytes: Annotated[
        Bytes,
        Meta(description="memory limit for the bodies of queued requests"),
        Flag(group=_QUEUE, is_size=True),
    ] = 256 * 1024 * 1024
    queue_timeout_s: Annotated[
        Wait, Meta(description="longest time that a request is queued"), Flag(group=_QUEUE, metavar="S")
    ] = 60.0
    """The longest retry delay that OpenAI's SDKs accept from a server."""
    hold_timeout_s: Annotated[
        Wait,
        Meta(
            description="longest time that a request is queued for a service without replicas; 0: it is refused at once"
        ),
        Flag(group=_QUEUE, metavar="S"),
    ] = 0.0
    keep_alive_s: Annotated[float, _NO_FLAG] = 10.0
    """Time between the comments sent on a stream that has no event. A queued request that is refused before its first
    comment still gets the refusal's own status."""
    keep_alive_after_s: Annotated[
        Wait,
        Meta(
            description="seconds after which a streaming request with no response from a replica gets status 200 and "
            "keep-alive comments"
        ),
        Flag(group=_TIMES, metavar="S"),
    ] = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The way to `argosy batch`, and the room that requests of batches have."""

    batch_url: Annotated[
        Url,
        Meta(
            pattern=r"^(https?://[^/?#@]+/?)?$",
            description="`argosy batch`, which keeps the files, batches and responses of clients",
        ),
        Flag(
            group=_BATCHES,
            metavar="URL",
            form="must be a URL such as http://HOST:PORT, without a path",
            default="none: no /v1/files and /v1/batches, and no stored responses",
        ),
    ] = ""
    response_ttl_s: Annotated[
        float,
        Meta(ge=3600.0, le=365 * 86_400.0, description="time after which stored responses are deleted"),
        Flag(group=_BATCHES, metavar="S"),
    ] = 30 * 86_400.0
    """As OpenAI's."""
    batch_share: Annotated[
        float,
        Meta(
            gt=0.0,
            le=1.0,
            description="part of what the replicas of a service can take that requests of batches may have; one may "
            "always run",
        ),
        Flag(group=_BATCHES, metavar="SHARE"),
    ] = 0.5
    """Batches fill idle replicas to the half, so that interactive requests start at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The whole configuration of `argosy router`."""

    host: Annotated[Name, Meta(description="address of the OpenAI endpoint"), Flag(group=_LISTEN)] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="port of the OpenAI endpoint"), Flag(group=_LISTEN)] = 8080
    admin_host: Annotated[
        Name, Meta(description="address of the admin port"), Flag(group=_LISTEN, default="as --host")
    ] = ""
    admin_port: Annotated[
        int, Meta(ge=-1, le=65535, description="admin port; 0: any free port, -1: none"), Flag(group=_LISTEN)
    ] = DEFAULT_ADMIN_PORT
    ext_proc_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65535,
            description="port on which gateways ask for endpoints by Envoy's external processing protocol, at the "
            "address of --host; 0: any free port, -1: none; needs the extra `gateway`",
        ),
        Flag(group=_LISTEN),
    ] = -1
    admin_names: Annotated[
        tuple[Name, ...],
        Meta(
            max_length=1024,
            description="host name that an admin port without a key accepts; repeatable (addresses, localhost and this "
            "machine's name are always accepted)",
        ),
        Flag(name="admin-name", group=_LISTEN, metavar="HOST", is_repeatable=True),
    ] = ()
    replicas: Annotated[
        tuple[Url, ...],
        Meta(
            max_length=65536,
            description="URL of an engine, http://HOST:PORT or https://HOST:PORT; repeatable",
        ),
        Flag(name="replica", group=_REPLICAS, metavar="URL", is_repeatable=True),
    ] = ()
    replica_dns: Annotated[
        tuple[Url, ...],
        Meta(
            max_length=1024,
            description="URL whose host name resolves to the addresses of engines, such as a headless Service's; "
            "repeatable",
        ),
        Flag(group=_REPLICAS, metavar="URL", is_repeatable=True),
    ] = ()
    fleet_file: Annotated[
        Path | None,
        Meta(description="fleet document; reread when it changes"),
        Flag(group=_REPLICAS, metavar="FILE"),
    ] = None
    kubernetes: Annotated[
        bool,
        Meta(description="read the fleet document and the pods from the API server"),
        Flag(group=_REPLICAS),
    ] = False
    fleet_namespace: Annotated[
        Name,
        Meta(description="namespace of the fleet document"),
        Flag(group=_REPLICAS, default="the router's own"),
    ] = ""
    fleet_configmap: Annotated[
        Name, Meta(description="ConfigMap of the fleet document"), Flag(group=_REPLICAS)
    ] = "argosy-fleet"
    replica_key: Annotated[
        Key,
        Meta(
            description="bearer key of the engines given by --replica or --replica-dns; also ARGOSY_REPLICA_KEY"
        ),
        Flag(group=_REPLICAS, environment="ARGOSY_REPLICA_KEY"),
    ] = ""
    api_keys: Annotated[
        tuple[Key, ...],
        Meta(
            max_length=65536,
            description="API key of clients, or several; repeatable; also ARGOSY_ROUTER_API_KEY, which is one key",
        ),
        Flag(
            name="api-key",
            group=_ACCESS,
            is_repeatable=True,
            takes_several=True,
            environment="ARGOSY_ROUTER_API_KEY",
        ),
    ] = ()
    api_keys_file: Annotated[
        Path | None,
        Meta(
            description="file with an API key and its terms per line; reread when it changes (see docs/access.md)"
        ),
        Flag(group=_ACCESS),
    ] = None
    """Reloaded when it changes, as a mounted Secret does."""
    routers: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="number of routers that share these keys, this one included; each applies an equal share of "
            "the limits",
        ),
        Flag(
            group=_ACCESS, metavar="N", default="with --kubernetes the router pods are counted, otherwise 1"
        ),
    ] = 0
    expected_routers: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="with --kubernetes, number of routers to assume until their pods can be counted",
        ),
        Flag(group=_ACCESS, metavar="N"),
    ] = 1
    auth: Annotated[
        bool,
        Meta(description="refuse to serve an address that is not loopback without API keys"),
        Flag(group=_ACCESS),
    ] = True
    allowed_origins: Annotated[
        tuple[Annotated[str, Meta(max_length=2048)], ...],
        Meta(
            max_length=1024,
            description='JSON list of the origins whose pages in browsers may call the OpenAI endpoint; ["*"]: all',
        ),
        Flag(group=_ACCESS, metavar="ORIGINS", is_json=True, default="none"),
    ] = ()
    ssl_certfile: Annotated[
        Path | None,
        Meta(description="certificate chain; both ports then serve HTTPS"),
        Flag(group=_TLS, metavar="FILE"),
    ] = None
    """May include the private key. Without it both ports use plain HTTP."""
    ssl_keyfile: Annotated[
        Path | None,
        Meta(description="private key of the certificate, unless --ssl-certfile contains it"),
        Flag(group=_TLS, metavar="FILE"),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        Meta(
            description="require clients of the OpenAI endpoint to present a certificate of these authorities"
        ),
        Flag(group=_TLS, metavar="FILE"),
    ] = None
    replica_ca_certs: Annotated[
        Path | None,
        Meta(description="certificate authorities of https replicas"),
        Flag(group=_TLS, metavar="FILE", default="the system's"),
    ] = None
    replica_insecure: Annotated[
        bool, Meta(description="do not verify the certificates of https replicas"), Flag(group=_TLS)
    ] = False
    fleet_key: Annotated[bytes, Flag(is_hidden=True, environment="ARGOSY_FLEET_KEY")] = b""
    """The key that the engines' keys are derived from."""
    fleet_key_dir: Annotated[Path | None, Flag(is_hidden=True, environment="ARGOSY_FLEET_KEY_DIR")] = None
    """Mounted Secret with that key, which may be rotated while the router runs (`argosy_protocol.fleet_keys`)."""
    policy: Annotated[
        RoutingPolicy | None,
        Meta(description="routing policy of all services"),
        Flag(group=_ROUTING, default="each service's own"),
    ] = None
    index_memory: Annotated[
        int,
        Meta(
            ge=MIN_INDEX_MEMORY,
            le=MAX_BYTES,
            description="memory limit of the prefix indexes of all services together; the default holds 1 to "
            "1.4 million chunks, 6 million in a compiled router",
        ),
        Flag(group=_ROUTING, metavar="BYTES", is_size=True),
    ] = DEFAULT_INDEX_MEMORY
    flow_control: FlowControlLimits = field(default_factory=FlowControlLimits)
    server: ServerLimits = field(default_factory=ServerLimits)
    upstream: UpstreamLimits = field(default_factory=UpstreamLimits)
    batch: BatchLimits = field(default_factory=BatchLimits)
    request_timeout_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=MAX_REQUEST_S,
            description="longest time that an attempt waits until a response begins; one that is not a stream begins "
            "when it is complete",
        ),
        Flag(group=_TIMES, metavar="S"),
    ] = 600.0
    """The default timeout of OpenAI's SDK."""
    first_byte_timeout_s: Annotated[
        float,
        Meta(
            gt=0.0,
            le=MAX_REQUEST_S,
            description="longest time that an attempt waits for the first byte of a stream, --request-timeout at most; "
            "extended where the first token is expected late",
        ),
        Flag(group=_TIMES, metavar="S"),
    ] = 120.0
    hedge_after: Annotated[
        float,
        Meta(
            ge=0.0,
            le=100.0,
            description="send a stream that has not begun to a second replica after FACTOR times the expected time, 1 "
            "to 100; for one request in twenty at most; 0: never",
        ),
        Flag(group=_TIMES, metavar="FACTOR"),
    ] = 0.0
    shutdown_timeout_s: Annotated[
        Wait, Meta(description="time for requests to finish after SIGTERM"), Flag(group=_TIMES, metavar="S")
    ] = 30.0
    """Must be below the pod's termination grace period."""
    drain_settle_s: Annotated[
        Wait,
        Meta(
            description="time after SIGTERM in which the router accepts connections while load balancers notice /ready"
        ),
        Flag(group=_TIMES, metavar="S"),
    ] = 0.0
    access_log: Annotated[
        bool, Meta(description="write a line per request to standard error"), Flag(group=_LOGS)
    ] = True
    access_log_format: Annotated[
        AccessFormat, Meta(description="format of access log lines"), Flag(group=_LOGS)
    ] = "text"
    usage_log: Annotated[
        Path | None,
        Meta(
            description="append tokens used per API key, model and hour to files in DIR, as one JSON object per line"
        ),
        Flag(group=_LOGS, metavar="DIR"),
    ] = None
    record: Annotated[
        Path | None,
        Meta(description="record requests as a trace without text, for argosy bench router --replay FILE"),
        Flag(group=_LOGS, metavar="FILE"),
    ] = None
    record_max_bytes: Annotated[
        int,
        Meta(ge=1, le=MAX_BYTES, description="size at which the recording ends"),
        Flag(group=_LOGS, is_size=True),
    ] = 1024 * 1024 * 1024
    otlp_traces_endpoint: Annotated[
        Url,
        Meta(
            description="send a span per request to this OpenTelemetry collector (OTLP over HTTP); needs the extra "
            "`otlp`"
        ),
        Flag(group=_LOGS, metavar="URL"),
    ] = ""
    log_level: Annotated[
        LogLevel, Meta(description="minimum severity of logged messages"), Flag(group=_LOGS)
    ] = "info"

    def check(self) -> None:
        """Check the configuration as a whole.

        Raises:
            ConfigError: values contradict each other, or are not safe together.
        """
        sources = [bool(self.replicas), bool(self.replica_dns), self.fleet_file is not None, self.kubernetes]
        if sum(sources) != 1:
            raise ConfigError(
                "name the replicas by exactly one of --replica, --replica-dns, --fleet-file and --kubernetes"
            )
        admin_host = self.admin_host or self.host
        is_one_host = admin_host == self.host or ANY_HOST.intersection((admin_host, self.host))
        if self.port == self.admin_port > 0 and is_one_host:
            raise ConfigError(
                f"--port and --admin-port are both {self.port}; give one of them another number"
            )
        if "" in self.api_keys:
            raise ConfigError("an --api-key must not be empty")
        if problem := origins_problem(self.allowed_origins):
            raise ConfigError(problem)
        has_keys = bool(self.api_keys) or self.api_keys_file is not None
        if not has_keys and self.host not in LOOPBACK and self.auth:
            raise ConfigError(
                f"refusing to serve {self.host} without API keys: pass --api-key or --api-keys-file, "
                "or --no-auth if something in front checks them"
            )
        for network in self.server.trusted_proxies:
            try:
                ip_network(network)
            except ValueError as error:
                raise ConfigError(f"--trusted-proxy must be a network such as 10.0.0.0/8: {error}") from None
        if self.server.max_inflight_bytes < self.server.max_body_bytes:
            raise ConfigError(
                f"--max-inflight-bytes must be at least {self.server.max_body_bytes}, one body's limit"
            )
        usage_log = self.usage_log
        if usage_log is not None and not (usage_log.is_dir() and os.access(usage_log, os.W_OK | os.X_OK)):
            raise ConfigError(f"--usage-log {usage_log} must be a directory this process may write to")
        if self.ssl_certfile is None and (self.ssl_keyfile is not None or self.ssl_ca_certs is not None):
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if self.replica_ca_certs is not None and self.replica_insecure:
            raise ConfigError("--replica-ca-certs and --replica-insecure exclude each other")
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError("--otlp-traces-endpoint must be an http:// or https:// URL")
        if self.hedge_after and self.hedge_after < 1.0:
            # A prediction is a mean: at 1 every second request is overdue, and only the cap on hedges limits them.
            raise ConfigError("--hedge-after must be 0 or between 1 and 100")
        if self.kubernetes and not self.fleet_key and self.fleet_key_dir is None:
            raise ConfigError("--kubernetes needs the fleet key in ARGOSY_FLEET_KEY_DIR or ARGOSY_FLEET_KEY")
        if self.batch.batch_url and not self.fleet_key and self.fleet_key_dir is None:
            raise ConfigError(
                "--batch-url needs ARGOSY_FLEET_KEY or ARGOSY_FLEET_KEY_DIR, with the same value as that of argosy "
                "batch: by a key derived from it the two know each other"
            )
        if self.fleet_key and len(self.fleet_key) < 16:
            raise ConfigError("ARGOSY_FLEET_KEY must have at least 16 bytes")
