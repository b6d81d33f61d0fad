"""The HTTP server of an API process, as the flags want it: layers, keys, limits and certificate."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from argosy_engine.api.http.connection_limit import protocol_of
from argosy_engine.api.http.followed_keys import FollowedKeys
from argosy_engine.api.http.http_server import HttpServer
from argosy_engine.api.http.tls import ServerCertificate
from argosy_engine.api.http_layers import add_http_layers
from argosy_engine.api.server_args import ServerArgs
from argosy_protocol.bearer_keys import KeyRing

KEY_VARIABLES = ("ARGOSY_API_KEY", "VLLM_API_KEY")
"""The second one, so that a deployment that protects vLLM does not leave this engine open."""


def make_http_server(
    app: ASGIApp,
    options: ServerArgs,
    num_descriptors: int,
    tls: ServerCertificate | None,
    on_slow_client: Callable[[], None],
    application: ASGIApp | None = None,
) -> HttpServer:
    """Make the server of an application, which `HttpServer.serve` starts.

    Args:
        app: without the layers around it.
        num_descriptors: how many files the process may open for connections and other uses.
        tls: makes the server speak HTTPS.
        on_slow_client: is called for each client that is cut off because it does not read.
        application: what the user's layers find as `request.app`, if that is not `app` itself.

    Raises:
        ConfigError: a layer of `--middleware` cannot be loaded.
    """
    given = [
        *options.api_key,
        *(key for name in KEY_VARIABLES for key in os.environ.get(name, "").split(",")),
    ]
    path = options.api_keys_file
    keys = KeyRing(given) if path is None else FollowedKeys(given, Path(path))
    admin_keys = KeyRing([*options.admin_api_key, *os.environ.get("ARGOSY_ADMIN_API_KEY", "").split(",")])
    config = uvicorn.Config(
        add_http_layers(app, options, keys, admin_keys, application),
        http=protocol_of(num_descriptors, options.http_limits, on_slow_client),
        ws="none",  # the layers around the application know HTTP only
        log_config=None,  # uvicorn's records use our log format
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=options.timeout_keep_alive,  # type: ignore[arg-type]  # fractions work as well
        server_header=False,
    )
    config.load()
    return HttpServer(config, tls)


async def refresh_certificate(options: ServerArgs, tls: ServerCertificate | None) -> None:
    """Read the certificate anew when it changes, with `--enable-ssl-refresh`."""
    if tls is not None and options.enable_ssl_refresh:
        await tls.refresh()
