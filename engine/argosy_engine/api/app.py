"""The application of an API process and the HTTP server around it, as the flags want them.

The server listens from the first second: while the model loads, /health answers 200 (the process lives), /ready 503
with the phase, and requests 503 with a retry hint.

`PlainApp` calls the endpoints that generate itself. FastAPI makes an endpoint's arguments by declared types and
validates its result, and every request passes seven layers and a search through all routes before that; those endpoints
decode with msgspec and return responses. Invariant: a request is answered as FastAPI would answer it, errors included;
only the layers that an application adds by `add_middleware` would not see it, and there are none: ours are those of
`add_http_layers`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_engine.api.endpoints.chat import add_chat_routes
from argosy_engine.api.endpoints.completions import add_completion_routes
from argosy_engine.api.endpoints.engine_routes import (
    add_admin_routes,
    add_info_routes,
    add_model_routes,
    add_state_routes,
    add_token_routes,
)
from argosy_engine.api.endpoints.exchange import Endpoint, message_headers, request_id_of, to_api_error
from argosy_engine.api.endpoints.messages import add_message_routes
from argosy_engine.api.endpoints.pooling import add_pooling_routes
from argosy_engine.api.endpoints.responses import add_response_routes
from argosy_engine.api.http.asgi_layers import (
    AuthMiddleware,
    CorsLayer,
    CustomMiddleware,
    FollowedKeys,
    RequestIds,
    RequestLimits,
    RootPath,
    is_request_id,
)
from argosy_engine.api.http.http_responses import BodySend, read_body
from argosy_engine.api.http.http_server import HttpServer, ServerCertificate
from argosy_engine.api.observability.request_records import RequestRecords
from argosy_engine.api.served_engine import Engine
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_fetcher.errors import FetchError
from argosy_fetcher.source_uri import from_argument
from argosy_http.bounded_protocol import ConnectionLimit, error_body
from argosy_protocol import __version__, headers
from argosy_protocol.anthropic import (
    is_messages_path,
)
from argosy_protocol.api_descriptions import (
    GENERATION,
    MODELS,
    STORED_RESPONSES,
    TEXT,
    Operation,
    Route,
    document_page,
    openapi_document,
)
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    MethodNotAllowed,
    no_route,
)
from argosy_protocol.headers import KeyRing
from argosy_protocol.json_limits import decode_body
from argosy_protocol.program.process import describe_tasks

if TYPE_CHECKING:
    from argosy_engine.api.observability.request_spans import RequestSpans


logger = logging.getLogger("argosy.api")


KEY_VARIABLES = ("ARGOSY_API_KEY", "VLLM_API_KEY")
"""The second one, so that a deployment that protects vLLM does not leave this engine open."""

INTERNAL_KEYS_VARIABLE = "ARGOSY_INTERNAL_KEYS_FILE"
"""File of a mounted Secret with the service's internal keys, one per line, the newest first. A variable rather than a
flag, because engines of other versions ignore what they do not know, and take the key of `ARGOSY_API_KEY`."""

INTERNAL_KEY_LINGER_S = 600.0
"""For how long an internal key is accepted after it has left its file: each router sees a new fleet key when its own
kubelet has brought it, up to two minutes later than others."""


_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before its response."""


_Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class _IndexedHeaders(Headers):
    """Headers that are found by a dictionary: an endpoint asks for a dozen names, and few are there."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = dict(reversed(self._list))
        """Of a header that was sent twice, the first line, as in Starlette's."""

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower().encode("latin-1")].decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self._first

    @overload
    def get(self, key: str, /) -> str | None: ...
    @overload
    def get(self, key: str, /, default: Any) -> Any: ...
    def get(self, key: str, default: Any = None) -> Any:
        found = self._first.get(key.lower().encode("latin-1"))
        return default if found is None else found.decode("latin-1")


class _PlainRequest(Request):
    @cached_property
    def headers(self) -> Headers:
        return _IndexedHeaders(self.scope)


class PlainApp(FastAPI):
    """A FastAPI application that calls the endpoints of some routes itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._direct: dict[tuple[str, str], _Endpoint] = {}
        """Endpoints by method and path."""

    def call_directly(self, paths: Collection[str]) -> None:
        """Call the endpoints of the routes with these paths directly. They take the request alone."""
        for route in self.routes:
            if isinstance(route, APIRoute) and route.path in paths:
                self._direct |= {(method, route.path): route.endpoint for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._direct.get((scope["method"], scope["path"]))
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        has_started = False

        async def noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        request = _PlainRequest(scope, receive)
        try:
            response = await endpoint(request)
            await response(scope, receive, noting_start)
        except Exception as error:
            if has_started:
                raise
            await self._answer_error(error, request, send)

    async def _answer_error(self, error: Exception, request: Request, send: Send) -> None:
        """Let the handler of the error's class answer; an unexpected error is raised once more, for the log."""
        for kind in type(error).__mro__:
            handler = self.exception_handlers.get(kind)
            if handler is not None:
                made = handler(request, error)
                response = await made if inspect.isawaitable(made) else made
                await response(request.scope, request.receive, send)
                if kind is not Exception:
                    return
                break
        raise error


def build_app(engine: Engine) -> PlainApp:
    """Build the application, without the layers around it (`add_http_layers`)."""
    app = PlainApp(
        title="Argosy engine", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.engine = engine
    endpoints = {
        "messages": add_chat_routes(app, engine),
        "prompt": add_completion_routes(app, engine),
        **add_pooling_routes(app, engine),
    }
    add_sagemaker_routes(app, endpoints)
    add_message_routes(app, engine)
    add_response_routes(app, engine)
    for add_routes in (
        add_token_routes,
        add_model_routes,
        add_state_routes,
        add_admin_routes,
        add_info_routes,
    ):
        add_routes(app, engine)
    if not engine.options.disable_fastapi_docs:
        add_openapi_routes(app)
    handle_errors(app)
    app.call_directly(GENERATION)
    return app


_PRIVATE = "/internal/"

_OPERATIONS = {
    **{("POST", path): operation for path, operation in GENERATION.items()},
    **{(route.method, route.path): route.operation for route in (*STORED_RESPONSES, *MODELS)},
    ("POST", "/sleep"): Operation(query={"level": {"enum": [1, 2]}, "mode": {"enum": ["abort", "wait"]}}),
    ("GET", "/server_info"): Operation(query={"config_format": {"enum": ["text", "json"]}}),
    ("GET", "/metrics"): Operation(answer={"text/plain": TEXT}),
    ("GET", "/docs"): Operation(answer={"text/html": TEXT}),
}


def add_openapi_routes(app: FastAPI) -> None:
    """Add /openapi.json, and /docs, a page that shows it. The document has all routes of the application but those that
    are between our own programs."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(openapi_document(app.title, documented_routes(app)))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(encoded(), media_type="application/json")

    @app.get("/docs")
    async def docs() -> Response:
        return Response(document_page(), media_type="text/html; charset=utf-8")


def documented_routes(app: FastAPI) -> Iterator[Route]:
    """Yield the routes that the document of the application has."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema and not route.path.startswith(_PRIVATE):
            path = route.path.replace(":path}", "}")
            for method in sorted(route.methods or ()):
                yield Route(method, path, _OPERATIONS.get((method, path), Operation()))


def _allowed(error: HTTPException) -> list[str]:
    return [] if error.headers is None else error.headers.get("Allow", "").split(", ")


def handle_errors(app: FastAPI) -> None:
    """Send all errors in the shape of the API that the path belongs to."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        path, lines = request.url.path, error.headers()
        if is_messages_path(path):
            lines |= message_headers(request_id_of(request, None))
        elif is_request_id(given := request.headers.get(headers.REQUEST_ID)):
            lines[headers.REQUEST_ID] = str(given)
        return Response(error_body(error, path), error.http_status, lines, "application/json")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path[:128]
        known = {
            404: no_route(method, path),
            405: MethodNotAllowed(f"{path} does not take {method}", _allowed(error)),
        }
        return await api_error(request, known.get(error.status_code) or to_api_error(error))

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)  # the client has left

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Not logged here: Starlette raises it once more, and uvicorn logs it.
        return await api_error(request, to_api_error(error))


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_NULL = b"null"
"""A field with this value counts as absent, as everywhere in the API."""


def add_sagemaker_routes(app: FastAPI, endpoints: Mapping[str, Endpoint]) -> None:
    """Add Amazon SageMaker's `/invocations`, which is whatever endpoint the body is for, and needs a key as that does.

    Names and rules are vLLM's (`entrypoints/serve/sagemaker`). Its `/ping` is beside /health.

    Args:
        endpoints: by the field that only requests to that endpoint have.
    """

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        given = decode_body(_FIELDS, await read_body(request))
        for field, endpoint in endpoints.items():
            if bytes(given.get(field, _NULL)) != _NULL:
                return await endpoint(request)
        raise BadRequest(f"the request needs one of the fields {', '.join(endpoints)}")


def add_http_layers(
    app: ASGIApp, options: ServerArgs, keys: KeyRing, admin_keys: KeyRing, application: ASGIApp | None = None
) -> ASGIApp:
    """Return the application with all layers around it.

    From the outside: the prefix of a proxy is removed, the request is recorded for logs and spans, the user's own
    layers see it, the answer gets an id, a browser's preflight request is answered (without a key, as browsers send
    none with it), the key is checked, the body is bounded. So every answer of the server, errors and streams included,
    has the headers that browsers ask for; answers that the user's layers give instead have what these put there.

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


def make_engine(
    options: ServerArgs, args: EngineArgs, spans: RequestSpans | None, started: int | None = None
) -> Engine:
    """
    Args:
        spans: of `make_request_spans`; their owner closes them after the server.
        started: when, in seconds since the epoch; None: now.
    """
    return Engine(_names(args), options=options, spans=spans, started=started, root=root_of(args))


def make_request_spans(options: ServerArgs, args: EngineArgs) -> RequestSpans | None:
    """Return what makes spans of requests; None without an endpoint for them.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if options.otlp_traces_endpoint is None:
        return None
    try:
        from argosy_engine.api.observability.request_spans import RequestSpans
        from argosy_protocol.program.otlp_traces import tracer_provider
    except ImportError:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: `pip install '.[otlp]'` in the checkout"
        ) from None
    provider = tracer_provider(options.otlp_traces_endpoint, "argosy-engine", socket.gethostname())
    return RequestSpans(provider, _names(args)[0])


def _names(args: EngineArgs) -> tuple[str, ...]:
    return args.served_model_name or (args.canonical_name,)


def root_of(args: EngineArgs) -> str:
    """Return the model as it was given, as in vLLM; the first name of one behind a URL, or in a bucket or registry,
    whose address clients need not know."""
    try:
        uri = from_argument(args.model)
    except FetchError:  # the load tells
        return _names(args)[0]
    if uri.scheme == "hf":
        return uri.name.removeprefix("hf://")
    return _names(args)[0] if uri.is_remote else args.model


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
        http=ConnectionLimit.for_server(
            max_connections=num_descriptors // 2,  # the other half is for what the process cannot do without
            limits=options.http_limits,
            on_slow_client=staticmethod(on_slow_client),
        ),
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


def describe_server_on_signal(
    loop: asyncio.AbstractEventLoop, engine: Engine, pids: Callable[[], list[int]]
) -> None:
    """On SIGUSR1 log where tasks wait, and the ages of requests and of telemetry readers, besides the stacks
    (`osproc.dump_stacks_on_signal`), and forward the signal to the processes that this one has started.

    Args:
        pids: returns the processes to forward the signal to.
    """

    def describe() -> None:
        try:
            state = f"state of the API: {engine.phase}" if engine.llm is None else engine.llm.describe()
            logger.warning("argosy engine API, process %d: %s\n%s", os.getpid(), state, describe_tasks(loop))
            for pid in pids():
                os.kill(pid, signal.SIGUSR1)
        except Exception:
            logger.exception("the state could not be described")

    faulthandler.unregister(signal.SIGUSR1)
    loop.add_signal_handler(signal.SIGUSR1, describe)
    faulthandler.register(signal.SIGUSR1, chain=True)
