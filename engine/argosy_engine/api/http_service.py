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
from argosy_engine.errors import ConfigError
from argosy_protocol.bearer_keys import KeyRing

KEY_VARIABLES = ("ARGOSY_API_KEY", "VLLM_API_KEY")
"""The second one, so that a deployment that protects vLLM does not leave this engine open."""
INTERNAL_KEYS_VARIABLE = "ARGOSY_INTERNAL_KEYS_FILE"
"""File of a mounted Secret with the service's internal keys, one per line, the newest first. A variable rather than a
flag, because engines of other versions ignore what they do not know, and take the key of `ARGOSY_API_KEY`."""
INTERNAL_KEY_LINGER_S = 600.0
"""For how long an internal key is accepted after it has left its file: each router sees a new fleet key when its own
kubelet has brought it, up to two minutes later than others."""


def given_keys(options: ServerArgs) -> list[str]:
    """The keys of flags and environment. Beside a file of internal keys `ARGOSY_API_KEY` does not count: it is the key
    that was valid when the container started, and could never be revoked."""
    variables = KEY_VARIABLES[1:] if os.environ.get(INTERNAL_KEYS_VARIABLE) else KEY_VARIABLES
    return [
        *options.api_key,
        *(key for name in variables for key in os.environ.get(name, "").split(",") if key),
    ]


def accepted_keys(options: ServerArgs) -> KeyRing:
    """The keys that open the API.

    Raises:
        ConfigError: there are two files of keys.
    """
    given, path, internal = given_keys(options), options.api_keys_file, os.environ.get(INTERNAL_KEYS_VARIABLE)
    if internal and path is not None:
        raise ConfigError(f"--api-keys-file and {INTERNAL_KEYS_VARIABLE} exclude each other")
    if internal:
        return FollowedKeys(
            given, Path(internal), linger_s=INTERNAL_KEY_LINGER_S, name=INTERNAL_KEYS_VARIABLE
        )
    return KeyRing(given) if path is None else FollowedKeys(given, Path(path))


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
        ConfigError: a layer of `--middleware` cannot be loaded, or there are two files of keys.
    """
    keys = accepted_keys(options)
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
