"""The ASGI layers around the application, in their order: what a request passes before it reaches a route.

From the outside: the prefix of a proxy is removed, the request is recorded for logs and spans, the user's own layers
see it, the answer gets an id, a browser's preflight request is answered (without a key, as browsers send none with it),
the key is checked, the body is bounded. So every answer of the server, errors and streams included, has the headers
that browsers ask for; answers that the user's layers give instead have what these put there.
"""

from __future__ import annotations

from starlette.types import ASGIApp

from argosy_engine.api.http.auth_middleware import AuthMiddleware
from argosy_engine.api.http.body_send import BodySend
from argosy_engine.api.http.cors_layer import CorsLayer
from argosy_engine.api.http.custom_middleware import CustomMiddleware
from argosy_engine.api.http.request_ids import RequestIds
from argosy_engine.api.http.request_limits import RequestLimits
from argosy_engine.api.http.root_path import RootPath
from argosy_engine.api.observability.request_records import RequestRecords
from argosy_engine.api.server_args import ServerArgs
from argosy_protocol.bearer_keys import KeyRing


def add_http_layers(
    app: ASGIApp, options: ServerArgs, keys: KeyRing, admin_keys: KeyRing, application: ASGIApp | None = None
) -> ASGIApp:
    """Return the application with all layers around it.

    Args:
        application: what the user's layers find as `request.app`, if that is not `app` itself.
        keys: accepted keys; if there are none, no key is needed.
        admin_keys: keys for administrative paths; `keys` if there are none.

    Raises:
        ConfigError: a layer of `--middleware` cannot be loaded.
    """
    layered: ASGIApp = AuthMiddleware(RequestLimits(BodySend(app)), keys, options.guard_metrics, admin_keys)
    layered = CorsLayer(
        layered,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
    )
    layered = _with_ids(layered, options)
    if options.middleware:
        layered = CustomMiddleware(layered, application or app, options.middleware)
    return RootPath(_recorded(layered, options), options.root_path or "")


def add_relayed_layers(app: ASGIApp, options: ServerArgs) -> ASGIApp:
    """Return the application with the layers that requests pass again in the process that they are relayed to, which
    knows what they ask for: the id of the answer and the record."""
    return _recorded(_with_ids(app, options), options)


def _with_ids(app: ASGIApp, options: ServerArgs) -> ASGIApp:
    return RequestIds(app) if options.enable_request_id_headers else app


def _recorded(app: ASGIApp, options: ServerArgs) -> ASGIApp:
    if options.access_log or options.otlp_traces_endpoint is not None:
        return RequestRecords(app, is_logged=options.access_log)
    return app
