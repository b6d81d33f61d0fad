"""The gRPC port on which gateways ask for endpoints, and gRPC's health checks.

Owns: the limits of the port (messages, streams, dead peers) and its certificate.
Must not know: what is decided on a stream.
Invariant: nothing that a peer sends ends the router; a stream that breaks the protocol ends with a status of gRPC's.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from argosy_protocol.program.listen import CannotListen
from argosy_router.config import RouterConfig
from argosy_router.gateway import ext_proc_messages as messages
from argosy_router.gateway import ext_proc_schema as schema
from argosy_router.gateway.ext_proc_stream import ProcessingStream, ProtocolViolation
from argosy_router.gateway.request_intake import Intake

log = logging.getLogger(__name__)

_READINESS: Final = frozenset(("", "readiness", schema.PROCESS[0]))
"""Services that the endpoint picker protocol names for health checks; `liveness` is another one."""
_MESSAGE_OVERHEAD: Final = 1 << 20
"""What a message may have beside a whole body: headers, metadata, attributes."""
MAX_CONNECTIONS = 1024
"""Of gateways (one for each thread of an Envoy), which carry many streams each. Whoever reaches the port may open some,
and descriptors are those of the main port as well."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""From accepting a connection until it speaks HTTP/2; gRPC's own is two minutes."""
_KEEPALIVE_MS: Final = 30_000
"""Interval of the pings by which a dead gateway is noticed."""
_KEEPALIVE_TIMEOUT_MS: Final = 20_000


class ExtProcServer:
    """Serves gateways until it is stopped."""

    def __init__(self, config: RouterConfig, intake: Intake) -> None:
        self._config = config
        limits = config.server
        options = [
            ("grpc.max_receive_message_length", limits.max_body_bytes + _MESSAGE_OVERHEAD),
            ("grpc.max_metadata_size", limits.max_header_bytes),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, limits.max_connections)),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.max_connections)
        self.intake = intake
        """What takes the requests."""
        self._server.add_generic_rpc_handlers(
            (
                _handler(
                    schema.PROCESS,
                    grpc.stream_stream_rpc_method_handler(
                        self._process,
                        request_deserializer=messages.parse,
                        response_serializer=schema.ProcessingResponse.SerializeToString,
                    ),
                ),
                _handler(
                    schema.HEALTH_CHECK,
                    grpc.unary_unary_rpc_method_handler(
                        self._check,
                        request_deserializer=schema.HealthCheckRequest.FromString,
                        response_serializer=schema.HealthCheckResponse.SerializeToString,
                    ),
                ),
            )
        )
        self.port = 0
        """The port in use, once started."""

    async def start(self) -> None:
        """
        Raises:
            CannotListen: the address is in use or does not belong to this machine.
        """
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.ext_proc_port}"
        try:
            if config.ssl_certfile is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(config))
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address} (--ext-proc-port): {error}") from None
        await self._server.start()
        log.info("endpoint picker on %s:%d", config.host, self.port)

    async def stop(self) -> None:
        """Close the port and cut the streams."""
        await self._server.stop(None)

    async def _process(self, _: Any, context: Any) -> None:
        stream = ProcessingStream(self.intake, context, silence_s=self._config.request_timeout_s)
        try:
            await stream.run()
        except (ProtocolViolation, messages.MessageTooLarge) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the gateway was silent for too long")

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service == "liveness":
            is_serving = True
        elif request.service in _READINESS:
            is_serving = self.intake.application.is_ready
        else:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        status = schema.SERVING if is_serving else schema.NOT_SERVING
        return schema.HealthCheckResponse(status=status)


def _handler(name: tuple[str, str], handler: Any) -> Any:
    service, method = name
    return grpc.method_handlers_generic_handler(service, {method: handler})


def _credentials(config: RouterConfig) -> Any:
    """The OpenAI endpoint's certificate; its files are read again at a handshake if they have changed."""
    certfile, keyfile = config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile
    assert certfile is not None
    assert keyfile is not None
    files = [path for path in (certfile, keyfile, config.ssl_ca_certs) if path is not None]
    stamp = _stamp(files)

    def load() -> Any:
        authorities = None if config.ssl_ca_certs is None else config.ssl_ca_certs.read_bytes()
        pair = (keyfile.read_bytes(), certfile.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    def reload() -> Any:
        nonlocal stamp
        try:
            latest = _stamp(files)
            if latest == stamp:
                return None
            stamp, fresh = latest, load()
        except OSError as error:
            log.warning("the gateway port keeps its certificate: %s", error)
            return None
        return fresh

    return grpc.dynamic_ssl_server_credentials(load(), reload, config.ssl_ca_certs is not None)


def _stamp(files: list[Path]) -> list[tuple[int, int]]:
    return [(status.st_mtime_ns, status.st_size) for status in (path.stat() for path in files)]
