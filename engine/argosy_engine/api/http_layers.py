"""The ASGI layers around the application, in their order: what a request passes before it reaches a route.

From the outside: the prefix of a proxy is removed, the user's own layers see the request, the answer gets an id, a
browser's preflight request is answered (without a key, as browsers send none with it), the key is checked, the body is
bounded. So every answer of the server, errors and streams included, has the headers that browsers ask for; answers that
the user's layers give instead have what these put there.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from argosy_engine.api.http.auth_middleware import AuthMiddleware
from argosy_engine.api.http.custom_middleware import CustomMiddleware
from argosy_engine.api.http.request_ids import RequestIds
from argosy_engine.api.http.request_limits import RequestLimits
from argosy_engine.api.http.root_path import RootPath
from argosy_engine.api.server_args import ServerArgs
from argosy_protocol.bearer_keys import KeyRing


def add_http_layers(app: ASGIApp, options: ServerArgs, keys: KeyRing, admin_keys: KeyRing) -> ASGIApp:
    """Return the application with all layers around it.

    Args:
        keys: accepted keys; if there are none, no key is needed.
        admin_keys: keys for administrative paths; `keys` if there are none.

    Raises:
        ConfigError: a layer of `--middleware` cannot be loaded.
    """
    layered: ASGIApp = AuthMiddleware(RequestLimits(app), keys, options.guard_metrics, admin_keys)
    layered = CORSMiddleware(
        layered,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
    )
    if options.enable_request_id_headers:
        layered = RequestIds(layered)
    if options.middleware:
        layered = CustomMiddleware(layered, app, options.middleware)
    return RootPath(layered, options.root_path or "")
