"""`argosy router`: the command line of the router.

Owns: flags, environment, logging set-up. Must not know: how a router works.
Order of sources: flag, then environment, then default.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
from collections.abc import Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import get_args

from argosy_protocol.fleet import RoutingPolicy
from argosy_protocol.log_format import configure_logging
from argosy_router.config import ConfigError, RouterConfig
from argosy_router.diagnostics import describe_on_signal, signal_held
from argosy_router.flow_control.controller import FlowControlLimits
from argosy_router.http.client import ClientLimits
from argosy_router.http.limits import ServerLimits
from argosy_router.http.seats import SPARE_DESCRIPTORS, Network, default_connections, open_files_limit
from argosy_router.records.access_log import AccessFormat
from argosy_router.records.line_writer import LineHandler, LineWriter

EXIT_USAGE = 2
EXIT_ADDRESS = 3
_DEFAULTS = RouterConfig()


def build_parser() -> argparse.ArgumentParser:
    """All flags, grouped."""
    parser = argparse.ArgumentParser(
        prog="argosy router",
        description="One OpenAI endpoint in front of many engines, routed by what they have cached.",
        epilog="Environment: ARGOSY_ROUTER_API_KEY (like --api-key), ARGOSY_FLEET_KEY (engines' keys derive from it), "
        "ARGOSY_REPLICA_KEY (like --replica-key). Exit codes: 0 drained, 2 usage, 3 address not available.",
    )
    listen = parser.add_argument_group("listening")
    listen.add_argument("--host", default=_DEFAULTS.host, help="address of the OpenAI endpoint (%(default)s)")
    listen.add_argument(
        "--port", type=int, default=_DEFAULTS.port, help="port of the OpenAI endpoint (%(default)s)"
    )
    listen.add_argument("--admin-host", default="", help="address of the admin port (same as --host)")
    listen.add_argument(
        "--admin-port", type=int, default=_DEFAULTS.admin_port, help="admin port; -1 for none (%(default)s)"
    )
    listen.add_argument(
        "--admin-name",
        action="append",
        default=[],
        metavar="HOST",
        help="host name by which an admin port without a key may be called; repeatable "
        "(addresses, localhost and this machine's name always may)",
    )
    listen.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="client connections at a time; beyond it idle ones are closed, then new ones refused "
        "(half of the files the process may open, 16384 at most)",
    )
    listen.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="CIDR",
        help="network of load balancers in front, whose connections are many clients': connections without a request "
        "are not bounded per address there; repeatable (0.0.0.0/0 and ::/0 for everywhere)",
    )
    listen.add_argument(
        "--stream-moderation-us",
        type=int,
        default=round(_DEFAULTS.server.moderation_s * 1e6),
        metavar="US",
        help="where many streams are fast, events wait up to so many microseconds for more, which halves what each "
        "costs; 0 for never (%(default)s)",
    )
    replicas = parser.add_argument_group("replicas (one of the four)")
    replicas.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="http://HOST:PORT or https://HOST:PORT of an engine; repeatable",
    )
    replicas.add_argument(
        "--replica-dns",
        action="append",
        default=[],
        metavar="URL",
        help="the same for all addresses HOST resolves to, such as a headless Service's pods; repeatable",
    )
    replicas.add_argument(
        "--fleet-file", type=Path, metavar="FILE", help="fleet document, followed as it changes"
    )
    replicas.add_argument(
        "--kubernetes", action="store_true", help="fleet document and pods from the API server"
    )
    replicas.add_argument(
        "--fleet-namespace", default="", help="namespace of the fleet document (the router's own)"
    )
    replicas.add_argument(
        "--fleet-configmap",
        default=_DEFAULTS.fleet_configmap,
        help="ConfigMap of the fleet document (%(default)s)",
    )
    replicas.add_argument(
        "--replica-key", help="bearer key of the engines given by --replica or --replica-dns"
    )
    access = parser.add_argument_group("access")
    access.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="key of clients; repeatable"
    )
    access.add_argument(
        "--api-keys-file",
        type=Path,
        metavar="FILE",
        help="a key and its terms per line, reread when it changes (see docs/access.md)",
    )
    access.add_argument(
        "--routers",
        type=int,
        default=0,
        metavar="N",
        help="routers with these keys, this one included: each applies an N-th of their limits "
        "(with --kubernetes the router pods are counted, otherwise 1)",
    )
    access.add_argument("--no-auth", action="store_true", help="serve a non-loopback address without keys")
    tls = parser.add_argument_group("TLS (PEM files, reread when they change)")
    tls.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="certificate chain of both ports")
    tls.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its key, unless in --ssl-certfile")
    tls.add_argument(
        "--ssl-ca-certs",
        type=Path,
        metavar="FILE",
        help="clients of the OpenAI endpoint must show a certificate of these authorities",
    )
    tls.add_argument(
        "--replica-ca-certs", type=Path, metavar="FILE", help="authorities of https replicas (the system's)"
    )
    tls.add_argument(
        "--replica-insecure", action="store_true", help="believe any certificate of an https replica"
    )
    routing = parser.add_argument_group("routing")
    routing.add_argument(
        "--policy", choices=get_args(RoutingPolicy), default="", help="for all services, instead of their own"
    )
    routing.add_argument(
        "--index-memory",
        type=int,
        default=_DEFAULTS.index_memory,
        metavar="BYTES",
        help="cap of the prefix indexes, all services together; some 200 bytes a chunk (%(default)s)",
    )
    queue = parser.add_argument_group("queue (of each service without limits of its own)")
    queue.add_argument(
        "--max-queued-requests",
        type=int,
        default=_DEFAULTS.admission.max_queued_requests,
        metavar="N",
        help="requests that may wait while all replicas are full (%(default)s)",
    )
    queue.add_argument(
        "--max-queued-bytes",
        type=int,
        default=_DEFAULTS.admission.max_queued_bytes,
        metavar="BYTES",
        help="what their bodies may take (%(default)s)",
    )
    queue.add_argument(
        "--queue-timeout",
        type=float,
        default=_DEFAULTS.admission.queue_timeout_s,
        metavar="S",
        help="how long one may wait (%(default)s)",
    )
    queue.add_argument(
        "--hold-timeout",
        type=float,
        default=_DEFAULTS.admission.hold_timeout_s,
        metavar="S",
        help="how long requests wait for the first replica of a service that has none; 0 refuses them (%(default)s)",
    )
    queue.add_argument(
        "--max-inflight-bytes",
        type=int,
        default=_DEFAULTS.server.max_inflight_bytes,
        metavar="BYTES",
        help="what the bodies of all requests may take, those on their way in and those without a whole answer "
        "(%(default)s)",
    )
    times = parser.add_argument_group("times (seconds)")
    times.add_argument(
        "--request-timeout",
        type=float,
        default=_DEFAULTS.request_timeout_s,
        metavar="S",
        help="longest wait of an attempt for an answer that is not a stream (%(default)g)",
    )
    times.add_argument(
        "--first-byte-timeout",
        type=float,
        default=_DEFAULTS.first_byte_timeout_s,
        metavar="S",
        help="longest wait of an attempt for a stream's first byte; more where the first token is expected late "
        "(%(default)g)",
    )
    times.add_argument(
        "--idle-timeout",
        type=float,
        default=_DEFAULTS.client.idle_timeout_s,
        metavar="S",
        help="longest pause in an answer; a stream goes on elsewhere, or is cut (%(default)g)",
    )
    times.add_argument(
        "--keep-alive-after",
        type=float,
        default=_DEFAULTS.admission.keep_alive_after_s,
        metavar="S",
        help="when a stream that was sent, but not begun by a replica, gets 200 and keep-alive comments (%(default)g)",
    )
    times.add_argument(
        "--hedge-after",
        type=float,
        default=_DEFAULTS.hedge_after,
        metavar="FACTOR",
        help="ask a second replica for a stream that has not begun after FACTOR times the expected time, 1 to 100; "
        "at most for one in twenty; 0 never (%(default)g)",
    )
    times.add_argument(
        "--shutdown-timeout",
        type=float,
        default=_DEFAULTS.shutdown_timeout_s,
        metavar="S",
        help="how long requests under way may take to finish after SIGTERM (%(default)g)",
    )
    times.add_argument(
        "--drain-settle",
        type=float,
        default=_DEFAULTS.drain_settle_s,
        metavar="S",
        help="how long after SIGTERM connections are still accepted, while load balancers notice /ready (%(default)g)",
    )
    logs = parser.add_argument_group("logs")
    logs.add_argument("--no-access-log", action="store_true", help="no line per request")
    logs.add_argument(
        "--access-log-format",
        choices=get_args(AccessFormat),
        default=_DEFAULTS.access_log_format,
        help="form of those lines (%(default)s)",
    )
    logs.add_argument(
        "--usage-log",
        type=Path,
        metavar="DIR",
        help="append tokens used per API key, model and hour to files in DIR, one JSON object a line",
    )
    logs.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="record requests as a trace without text, for argosy bench router --replay FILE",
    )
    logs.add_argument(
        "--record-max-bytes",
        type=int,
        default=_DEFAULTS.record_max_bytes,
        metavar="BYTES",
        help="where the recording ends (%(default)s)",
    )
    logs.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="send a span per request to this OpenTelemetry collector (OTLP over HTTP); needs the extra `otlp`",
    )
    logs.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def config_of(arguments: argparse.Namespace, environment: dict[str, str]) -> RouterConfig:
    """The configuration, checked.

    Raises:
        ConfigError: it contradicts itself or is not safe.
    """
    keys = list(arguments.api_key)
    if not keys and (key := environment.get("ARGOSY_ROUTER_API_KEY")):
        keys = [key]
    config = RouterConfig(
        host=arguments.host,
        port=arguments.port,
        admin_host=arguments.admin_host,
        admin_port=arguments.admin_port,
        admin_names=tuple(arguments.admin_name),
        replicas=tuple(arguments.replica),
        replica_dns=tuple(arguments.replica_dns),
        replica_key=arguments.replica_key or environment.get("ARGOSY_REPLICA_KEY", ""),
        fleet_file=arguments.fleet_file,
        kubernetes=arguments.kubernetes,
        fleet_namespace=arguments.fleet_namespace,
        fleet_configmap=arguments.fleet_configmap,
        api_keys=tuple(keys),
        api_keys_file=arguments.api_keys_file,
        routers=arguments.routers,
        is_open=arguments.no_auth,
        ssl_certfile=arguments.ssl_certfile,
        ssl_keyfile=arguments.ssl_keyfile,
        ssl_ca_certs=arguments.ssl_ca_certs,
        replica_ca_certs=arguments.replica_ca_certs,
        verifies_replicas=not arguments.replica_insecure,
        fleet_key=environment.get("ARGOSY_FLEET_KEY", "").encode(),
        policy=arguments.policy,
        index_memory=arguments.index_memory,
        shutdown_timeout_s=arguments.shutdown_timeout,
        drain_settle_s=arguments.drain_settle,
        first_byte_timeout_s=arguments.first_byte_timeout,
        request_timeout_s=arguments.request_timeout,
        hedge_after=arguments.hedge_after,
        admission=FlowControlLimits(
            max_queued_requests=arguments.max_queued_requests,
            max_queued_bytes=arguments.max_queued_bytes,
            queue_timeout_s=arguments.queue_timeout,
            hold_timeout_s=arguments.hold_timeout,
            keep_alive_after_s=arguments.keep_alive_after,
        ),
        client=ClientLimits(idle_timeout_s=arguments.idle_timeout),
        server=ServerLimits(
            max_inflight_bytes=arguments.max_inflight_bytes,
            max_connections=_max_connections(arguments.max_connections),
            trusted_proxies=tuple(map(_network, arguments.trusted_proxy)),
            moderation_s=arguments.stream_moderation_us * 1e-6,
        ),
        access_log=not arguments.no_access_log,
        access_log_format=arguments.access_log_format,
        usage_log=arguments.usage_log,
        record=arguments.record,
        record_max_bytes=arguments.record_max_bytes,
        otlp_traces_endpoint=arguments.otlp_traces_endpoint,
    )
    config.check()
    return config


def _network(given: str) -> Network:
    """Raises ConfigError: it is none."""
    try:
        return ip_network(given)
    except ValueError as error:
        raise ConfigError(f"--trusted-proxy must be a network such as 10.0.0.0/8: {error}") from None


def _max_connections(asked: int | None) -> int:
    """Raises ConfigError: the process may not open so many files."""
    available = open_files_limit()
    if asked is None:
        return default_connections(available)
    needed = 2 * asked + SPARE_DESCRIPTORS
    if needed > available:
        raise ConfigError(
            f"--max-connections {asked} needs {needed} open files and this process may have {available}: "
            "ask for fewer, or raise the limit (ulimit -n)"
        )
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the router until it is told to stop. Returns the exit code."""
    with signal_held():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(argv)
    stderr = LineWriter(2)
    configure_logging(arguments.log_level.upper(), LineHandler(stderr))
    _raise_file_limit()
    try:
        config = config_of(arguments, dict(os.environ))
        return _run(config, stderr)
    except (ConfigError, ValueError) as error:
        print(f"argosy router: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:  # CannotListen above all
        print(f"argosy router: {error}", file=sys.stderr)
        return EXIT_ADDRESS
    finally:
        stderr.close()


def _run(config: RouterConfig, stderr: LineWriter) -> int:
    import uvloop

    from argosy_router.server import Router

    async def serve() -> None:
        router = Router(config, stderr=stderr)
        describe_on_signal(asyncio.get_running_loop(), router.describe)
        await router.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


def _raise_file_limit() -> None:
    """Each request takes two descriptors, and the usual soft limit of 1024 exists only for `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
