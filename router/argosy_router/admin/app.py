"""The admin port's HTTP application, for operators, probes and people.

Owns: the admin routes. Must not know: the data plane's connections.
Invariants: with a fleet key, everything but `/health`, `/ready`, `/metrics` and the page's static files needs the admin
key derived from it. Without one, these routes answer only to host names of this machine, which stops DNS rebinding by a
web page. The playground requires what the main port requires.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial
from importlib.resources import files
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from argosy_protocol.bearer_keys import KeyRing, internal_key
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    Unauthorized,
)
from argosy_protocol.load_report import LOAD_PATH
from argosy_protocol.routable_report import ADMIN_KEY_UID, REPORT_PATH
from argosy_router.admin.connections import MAX_CONNECTIONS, AdminConnection, TlsServer
from argosy_router.admin.explain import explain
from argosy_router.admin.load_reports import LoadReports
from argosy_router.admin.overview import Overviews
from argosy_router.fleet.fleet import Fleet
from argosy_router.http.messages import Request as RouterRequest
from argosy_router.metrics.registry import CONTENT_TYPE, Metrics
from argosy_router.prompts.prompt_hash import measure
from argosy_router.proxy.accounting.outcome import CLIENT_GONE
from argosy_router.proxy.application import RouterApplication
from argosy_router.proxy.downstream.playground_client import PlaygroundClient
from argosy_router.proxy.request.call_decoding import SESSION_HEADER, prompt_of, session_of
from argosy_router.proxy.request.examination import examine
from argosy_router.proxy.request.model_names import find_service
from argosy_router.proxy.upstream.attempt_log import CAPACITY, AttemptLog, RefusalLog

MAX_WAIT_S = 60.0
MAX_EXPLAINED_BYTES = 4 * 1024 * 1024
"""A million tokens of text; decoding more would block the data plane, which shares this event loop."""
MAX_CHAT_BYTES = 4 * 1024 * 1024
_JSON = "application/json"
Handler = Callable[[Request], Awaitable[Response]]
Q = TypeVar("Q")
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("api", "dom", "fleet", "main", "playground")
    },
}
"""path -> file, content type"""
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class _Poll(msgspec.Struct):
    """A report, at once, or after one with another number than `after`, or after `wait` seconds."""

    after: Annotated[int, msgspec.Meta(ge=-1)] = -1
    wait: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class _ReportPoll(_Poll):
    """The same of the routable report, and of its changes only, if `after` is of this `epoch`."""

    epoch: Annotated[str, msgspec.Meta(max_length=64)] = ""


class _Latest(msgspec.Struct):
    """Latest decisions: how many, and of which model; of all of them without one."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=CAPACITY)] = 100
    model: Annotated[str, msgspec.Meta(max_length=512)] = ""


class _LatestRefusals(msgspec.Struct):
    limit: Annotated[int, msgspec.Meta(ge=1, le=CAPACITY)] = 100


class _Explained(msgspec.Struct):
    """A chat of one message, to be explained."""

    model: Annotated[str, msgspec.Meta(max_length=512)]
    prompt: Annotated[str, msgspec.Meta(max_length=8192)] = ""
    session: Annotated[str, msgspec.Meta(max_length=512)] = ""


def admin_keys(fleet_keys: Iterable[bytes]) -> list[str]:
    """Keys for the internal routes; none without a fleet key, which leaves them open."""
    return [internal_key(key, ADMIN_KEY_UID) for key in fleet_keys]


def build_admin(
    fleet: Fleet,
    metrics: Metrics,
    decisions: AttemptLog,
    refusals: RefusalLog,
    keys: KeyRing,
    names: Collection[str],
    application: RouterApplication,
    overviews: Overviews,
    loads: LoadReports,
    name: str,
) -> Starlette:
    """Build the admin application.

    Args:
        names: host names that requests may use if there are no `keys`; addresses and localhost are always allowed.
        loads: makes the reports by which the operator scales.
        name: the router's name in reports.
    """

    def guard(request: Request) -> None:
        if keys:
            if not keys.accepts(request.headers.get("authorization")):
                raise Unauthorized("missing or wrong admin key")
        elif not _is_ours(request.headers.get("host", ""), names):
            raise Forbidden("the admin port does not accept this host name; --admin-name allows it")

    async def health(_: Request) -> Response:
        return _json(b"{}")

    async def ready(_: Request) -> Response:
        return _json(b"{}", 200 if application.is_ready else 503)

    async def exposition(_: Request) -> Response:
        return Response(await metrics.scrape(), headers={"content-type": CONTENT_TYPE.decode()})

    async def report(request: Request) -> Response:
        asked = _query(request, _ReportPoll)
        if asked.wait and asked.after >= 0:
            await fleet.wait_for_change(asked.after, asked.wait)
        found = fleet.report(name, since=asked.after, epoch=asked.epoch)
        return _json(msgspec.json.encode(found))

    async def load(request: Request) -> Response:
        asked = _query(request, _Poll)
        if asked.wait and asked.after >= 0:
            await loads.wait_for_hold(asked.after, asked.wait)
        return _json(msgspec.json.encode(loads.now(name)))

    async def latest(request: Request) -> Response:
        asked = _query(request, _Latest)
        records = decisions.latest(asked.limit, asked.model)
        return _json(msgspec.json.encode([record.as_dict() for record in records]))

    async def refused(request: Request) -> Response:
        records = refusals.latest(_query(request, _LatestRefusals).limit)
        return _json(msgspec.json.encode([record.as_dict() for record in records]))

    async def explain_request(request: Request) -> Response:
        if request.method == "POST":
            session = request.headers.get(SESSION_HEADER.decode(), "").encode("latin-1")
            return _json(explain_body(fleet, await _body(request, MAX_EXPLAINED_BYTES), session))
        asked = _query(request, _Explained)
        message = {"role": "user", "content": asked.prompt}
        body = msgspec.json.encode({"model": asked.model, "messages": [message]})
        return _json(explain_body(fleet, body, asked.session.encode()))

    async def overview(_: Request) -> Response:
        view = await overviews.now(is_ready=application.is_ready, is_draining=application.is_draining)
        return _json(msgspec.json.encode(view))

    async def chat(request: Request) -> Response:
        if not keys and not application.is_open:
            raise Forbidden(
                "the playground is disabled, because clients need keys and the router has no admin key"
            )
        inner = RouterRequest(
            b"POST", b"/v1/chat/completions", list(request.headers.raw), is_http10=False, keep_alive=True
        )
        inner.body = await _body(request, MAX_CHAT_BYTES)
        client = PlaygroundClient()
        application.chat(client, inner)
        gone = asyncio.ensure_future(request.receive())  # the body was read, so only a disconnect can follow
        await asyncio.wait((client.head, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not client.head.done():
            client.leave()
            return Response(status_code=CLIENT_GONE)
        status, headers = client.head.result()
        answer = StreamingResponse(client.body(), status)
        answer.raw_headers = headers
        return answer

    def guarded(path: str, handler: Handler, *methods: str) -> Route:
        async def answer(request: Request) -> Response:
            guard(request)
            return await handler(request)

        return Route(path, answer, methods=methods or ("GET",))

    page = files("argosy_router.admin").joinpath("page")
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", exposition),
            guarded(REPORT_PATH, report),
            guarded(LOAD_PATH, load),
            guarded("/decisions", latest),
            guarded("/refusals", refused),
            guarded("/explain", explain_request, "GET", "POST"),
            guarded("/overview", overview),
            guarded("/playground/chat/completions", chat, "POST"),
            *(
                _file(path, page.joinpath(file).read_bytes(), content_type)
                for path, (file, content_type) in PAGE.items()
            ),
        ],
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_route},
    )


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.http_status, error.headers(), _JSON)


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Refuse a path or a method that there is none of."""
    assert isinstance(error, HTTPException)
    refusal: ApiError = NotFound(f"the admin port has no {request.url.path[:256]}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "").split(", ")
        refusal = MethodNotAllowed(f"{request.method[:16]} is not allowed here", allowed)
    return await _refuse(request, refusal)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type=_JSON)


def _is_ours(authority: str, names: Collection[str]) -> bool:
    """Whether a `Host` header names this machine whatever DNS says (an address, localhost), or one of `names`."""
    try:
        host = (urlsplit(f"//{authority}").hostname or "").removesuffix(".")
        if (
            host == "localhost"
            or host.endswith(".localhost")
            or host in {name.lower() for name in names if name}
        ):
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _file(path: str, content: bytes, content_type: str) -> Route:
    """Serve a static file of the page without a key: it has no secrets, and all data it shows need the key."""

    async def file(_: Request) -> Response:
        return Response(content, headers=PAGE_HEADERS | {"content-type": content_type})

    return Route(path, file)


def _query(request: Request, kind: type[Q]) -> Q:
    """The parameters of a request's URL; others are ignored.

    Raises:
        BadRequest: one is missing or out of its bounds.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None


async def _body(request: Request, limit: int) -> bytes:
    """Read a request's body.

    Raises:
        PayloadTooLarge: it is longer than `limit` bytes.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise PayloadTooLarge(f"the request body exceeds the limit of {limit} bytes")
    return bytes(body)


class _Kind(msgspec.Struct):
    """Field that distinguishes a chat from a completion."""

    messages: msgspec.Raw = msgspec.Raw()


def explain_body(fleet: Fleet, body: bytes, session: bytes) -> bytes:
    """Explain the routing of a request's body, as JSON.

    Raises:
        BadRequest, NotFound: as the main port would.
    """
    try:
        is_chat = bool(bytes(msgspec.json.decode(body, type=_Kind).messages))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"request body is not a JSON object: {str(error)[:200]}") from None
    asked, prompts = examine("chat/completions" if is_chat else "completions", body, has_state=False)
    service, adapter = find_service(fleet, asked.model)
    declared = session_of(asked.session, session)
    if declared and not adapter:  # otherwise a canary is drawn by the request id, which does not exist yet
        service = fleet.answering(service, declared)
    measured = measure(prompts, service.hasher.seed(adapter, asked.cache_salt or ""))
    prompt = prompt_of(service, asked.model, measured, declared, adapter, drawn_by=declared)
    return msgspec.json.encode(explain(fleet, service, prompt, time.monotonic()))


class AdminServer(uvicorn.Server):
    """uvicorn in the router's event loop, without its signal handlers."""

    def __init__(self, app: Starlette, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is the port's SSL context; None for plain HTTP."""
        config = uvicorn.Config(
            app,
            http=partial(AdminConnection, silent={}),  # type: ignore[arg-type]
            host=host,
            port=port,
            log_config=None,
            ws="none",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            limit_concurrency=MAX_CONNECTIONS,
        )
        config.load()
        config.ssl = tls  # uvicorn's own context would never be reloaded
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`. uvicorn's own method has no bound for handshakes, and a minute for each."""
        config, loop = self.config, asyncio.get_running_loop()
        await self.lifespan.startup()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = config.http_protocol_class(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )  # type: ignore[call-arg]
            return made

        self.servers = [
            await loop.create_server(protocol, sock=listening, backlog=config.backlog)
            if config.ssl is None
            else TlsServer(listening, config.backlog, config.ssl, protocol)
            for listening in sockets or ()
        ]
        self.started = True
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; valid once it listens."""
        listening: socket.socket = self.servers[0].sockets[0]
        host, port = listening.getsockname()[:2]
        return host, port
