"""The routes of the main port, and which of them need an API key (`auth.api_keys` refuses requests without one).

Owns: which path answers what, and to whom; how many requests of batches are in flight.
Must not know: HTTP framing, how a generation request is handled.
Invariant: deny by default: if there are keys, only `/health`, `/ping`, `/ready` and `/version` answer without one, and
a browser that asks whether a page of an allowed origin may send a request.
Other requests without a key are refused before their body is read, and an unknown path answers 401 before 404.
Paths are compared as received, never normalised.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import parse_qs, unquote

import msgspec

from argosy_protocol import __version__
from argosy_protocol.api_descriptions import (
    ANTHROPIC_HEADER,
    CODEX_QUERY,
    document_page,
    encoded_model,
    encoded_models,
)
from argosy_protocol.batch_program import (
    ACCOUNT,
    ACCOUNT_GONE,
    BACKGROUND_PRIORITY,
    NO_ROOM,
    ROOM_PATH,
    RoomReport,
    account_name,
)
from argosy_protocol.errors import ApiError, BadRequest, Forbidden, NotFound, TooManyRequests
from argosy_protocol.headers import KeyRing
from argosy_protocol.openai import ModelCard
from argosy_protocol.responses import compaction_not_supported
from argosy_router.auth.accounts import ANONYMOUS, Account, RateLimited
from argosy_router.auth.api_keys import KeyTable
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.flow_control import FlowController
from argosy_router.http.messages import Client, CrossOrigin, Request
from argosy_router.metrics import CONTENT_TYPE
from argosy_router.proxy.accounting import RequestAccounting
from argosy_router.proxy.answer import error_body, error_headers, id_headers
from argosy_router.proxy.call import (
    Call,
    CallDraft,
    account_of,
    decode_call,
    is_large,
    may_use,
    names_for,
    no_route,
    no_such_model,
    request_id_for,
    require_json,
    require_method,
    unknown_model,
)
from argosy_router.proxy.exchange import RequestHandler
from argosy_router.proxy.large_bodies import LargeBodies
from argosy_router.proxy.request_body import LARGE_BODY_BYTES, RoutedEndpoint

if TYPE_CHECKING:
    from argosy_router.observability.tracing import Trace, Tracer

_JSON = b"content-type: application/json\r\n"
_MODELS = b"/v1/models"
_MODEL_PREFIX = b"/v1/models/"
MAX_LIST_BYTES = 16 << 20
"""Of lists of models that are kept encoded: that of a thousand services takes 200 KB, and some milliseconds."""
_CODEX_QUERY = re.compile(rb"[?&]%b=" % CODEX_QUERY.encode())
_RESPONSES = b"/v1/responses"
_COMPACT = b"/v1/responses/compact"
_METRICS = b"/metrics"
_LOAD = b"/load"
_PING = b"/ping"
_DOCUMENT = b"/openapi.json"
_DOCUMENT_PAGE = b"/docs"
_ROOM = ROOM_PATH.encode()
_ACCOUNT = ACCOUNT.encode()
_STORED = (b"/v1/files", b"/v1/batches")
_ENDPOINTS: dict[bytes, RoutedEndpoint] = {
    b"/v1/chat/completions": "chat/completions",
    b"/v1/chat/completions/batch": "chat/completions/batch",
    b"/v1/completions": "completions",
    b"/v1/embeddings": "embeddings",
    b"/classify": "classify",
    b"/v1/classify": "classify",
    b"/pooling": "pooling",
    b"/score": "score",
    b"/v1/score": "score",
    b"/rerank": "rerank",
    b"/v1/rerank": "rerank",
    b"/v2/rerank": "rerank",
    b"/v1/messages": "messages",
    b"/v1/messages/count_tokens": "messages/count_tokens",
    b"/v1/responses": "responses",
    b"/v1/responses/input_tokens": "responses/input_tokens",
    b"/tokenize": "tokenize",
    b"/detokenize": "detokenize",
}


class BackgroundLoad:
    """Counts the requests of batches of one router, so that interactive requests find capacity. They have no more than
    `share` of what a service's replicas can take, one at least, and no further one is taken while an interactive
    request is queued for the service. They also have the lowest priority in the queue, and in engines that schedule by
    priority."""

    def __init__(
        self, flow_control: FlowController, share: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`share` is of what a service's replicas can take, from 0 to 1."""
        self._flow_control = flow_control
        self._share = share
        self._now = now
        self._running: Counter[Service] = Counter()

    @property
    def inflight(self) -> int:
        """Requests of batches in flight."""
        return self._running.total()

    def room(self, service: Service) -> int:
        """How many more requests of batches for a service are taken now."""
        running = self._running.get(service, 0)
        room = self._flow_control.background_room(service, self._now(), running, self._share)
        return max(room, 0 if running else 1)

    def begin(self, service: Service) -> None:
        """Count a request, until `end`.

        Raises:
            TooManyRequests: there is no room for it.
        """
        if self.room(service) <= 0:
            raise TooManyRequests(
                "the service has no room for further requests of batches", code=NO_ROOM, retry_after_s=1.0
            )
        self._running[service] += 1

    def end(self, service: Service) -> None:
        """Note the end of a request."""
        self._running[service] -= 1
        if not self._running[service]:
            del self._running[service]


class StorageRoutes(Protocol):
    """Answers requests for files and batches, or for stored responses. Such routes import the proxy."""

    def on_head(self, request: Request) -> bool:
        """Look at the head of a request for one of these routes; return whether its body will be used. May give the
        request a sink.

        Raises:
            ApiError: the request is refused before its body is read.
        """
        ...

    def on_request(self, client: Client, request: Request) -> None:
        """Answer now, or later: attach a listener to the client first.

        Raises:
            ApiError: the request is refused.
        """
        ...


Responder = Callable[[], tuple[int, bytes, bytes]]
"""Returns status, header lines and body."""


class _List(NamedTuple):
    """A list of models as it was encoded last. A replica may change its state as often as it likes; what the list shows
    changes seldom."""

    names: list[tuple[str, Service]]
    """The same object until services or their names have changed."""
    lengths: int
    """`Fleet.model_lengths`"""
    body: bytes


class RouterApplication:
    """Answers requests of the main port."""

    def __init__(
        self,
        fleet: Fleet,
        requests: RequestHandler,
        accounting: RequestAccounting,
        keys: KeyTable,
        *,
        cross_origin: CrossOrigin,
        large_bodies: LargeBodies,
        batch_keys: KeyRing,
        background: BackgroundLoad,
        tracer: Tracer | None = None,
        admin_port: int | None = None,
    ) -> None:
        """
        Args:
            batch_keys: those of `argosy batch`, which sends requests on behalf of accounts.
            background: the requests of batches.
            admin_port: is named in answers to clients; None keeps it from them.
        """
        self._fleet = fleet
        self._admin_port = admin_port
        self._requests = requests
        self._accounting = accounting
        self._keys = keys
        self._cross_origin = cross_origin
        self._large_bodies = large_bodies
        self._batch_keys = batch_keys
        self._background = background
        self._tracer = tracer
        self._created = int(time.time())
        self._lists: dict[tuple[tuple[str, ...], bool, bool], _List] = {}
        """Lists of models, by what a key may use and the form."""
        self._lists_bytes = 0
        self.is_draining = False
        self.document: Callable[[], bytes] | None = None
        """Returns the OpenAPI document of the main port."""
        self.stored: StorageRoutes | None = None
        """Answers the routes of files and batches; None without `argosy batch`."""
        self.responses: StorageRoutes | None = None
        """Answers requests for responses; None if the router stores none, and only routes their creation."""
        self._public: dict[bytes, Responder] = {
            b"/health": lambda: (200, _JSON, b"{}"),
            _PING: lambda: (200, _JSON, b"{}"),
            b"/ready": self._ready,
            b"/version": lambda: (200, _JSON, msgspec.json.encode({"version": __version__})),
        }

    @property
    def is_ready(self) -> bool:
        """Whether the fleet has been discovered and its replicas were tried, and the router is not draining. Replicas
        that answer are not needed, because the readiness of their pods waits for the router; but while all of them
        refuse the key of a new router, or that cannot read its key file, the others answer."""
        return (
            self._fleet.is_initialized
            and not self.is_draining
            and not self._fleet.is_shut_out
            and not self._keys.is_awaited
        )

    def on_head(self, request: Request) -> bool:
        """Reject unauthenticated requests before reading the body."""
        self._cross_origin.mark(request)
        if request.path in self._public or self._cross_origin.is_preflight(request):
            return False
        account = self._behind_batch(request)
        if account is None:
            account = self._keys.authenticate(request.header(b"authorization"), request.header(b"x-api-key"))
        request.grant = account
        request.account = None if account is ANONYMOUS else account
        if request.is_background:
            if request.path in _ENDPOINTS and request.method == b"POST":
                self._charge(request, account)
                return True
            return False
        if request.path == _COMPACT and request.method == b"POST":
            raise compaction_not_supported()
        if _is_stored(request.path):
            return self._stored_routes().on_head(request)
        is_generation = request.path in _ENDPOINTS
        if is_generation and request.method == b"POST":
            self._charge(request, account)
        if request.path == _MODELS or request.path.startswith(_MODEL_PREFIX):
            self._charge(request, account)
        if self.responses is not None and _is_response(request.path):
            return self.responses.on_head(request)
        return is_generation

    def _behind_batch(self, request: Request) -> Account | None:
        """The account on whose behalf `argosy batch` sends a request, which it may for its key; None for clients.

        Raises:
            Forbidden: there is no such account.
        """
        name = request.header(_ACCOUNT)
        if name is None:
            return None
        if not self._batch_keys.accepts((request.header(b"authorization") or b"").decode("latin-1")):
            return None
        if request.path == _ROOM:
            account: Account | None = ANONYMOUS
        else:
            account = self._keys.account_named(account_name(name.decode("latin-1")))
        if account is None:
            raise Forbidden("no key has this account", code=ACCOUNT_GONE)
        request.is_background = True
        return account

    def _charge(self, request: Request, account: Account) -> None:
        """Charge a request to its key's limits. One over them is refused at once if its body is large; else
        `on_request` refuses it, and the connection stays."""
        try:
            self._requests.charge(request, account)
        except RateLimited as refusal:
            if not _has_short_body(request):
                raise
            request.refusal = refusal

    def on_refused(self, error: ApiError, request: Request | None) -> tuple[bytes, bytes]:
        if request is not None:
            _return_charge(request, error)
        path, sent = (b"", None) if request is None else (request.path, request.header(b"x-request-id"))
        return self._refusal(request_id_for(sent), error, path), error_body(error, path)

    def on_request(self, client: Client, request: Request) -> None:
        request.id = request_id_for(request.header(b"x-request-id"))
        try:
            self._route(client, request)
        except ApiError as error:
            _return_charge(request, error)
            self.refuse(client, request, error)

    def chat(self, client: Client, request: Request) -> None:
        """Answer a chat whose client the caller has authorised."""
        request.id, request.grant = request_id_for(None), ANONYMOUS
        try:
            self._generate(client, request, "chat/completions")
        except ApiError as error:
            self.refuse(client, request, error)

    @property
    def endpoints(self) -> list[str]:
        """Paths of the requests that are sent to replicas."""
        return [path.decode() for path in _ENDPOINTS]

    def serves(self, path: str) -> bool:
        """Whether requests of this path are sent to replicas."""
        return path.encode() in _ENDPOINTS

    def create_response(self, client: Client, request: Request, response_id: bytes) -> None:
        """Generate a response whose request has the whole conversation, or count the tokens of its prompt, by the path.

        Raises:
            ApiError: the request is refused.
        """
        self._generate(client, request, _ENDPOINTS[request.path], response_id)

    @property
    def is_open(self) -> bool:
        """Whether the routes of models need no key."""
        return self._keys.is_open

    def refuse(self, client: Client, request: Request, error: ApiError) -> None:
        """Answer with an error, in the shape of the path's API, a request that was not decoded into a call."""
        lines = self._refusal(request.id, error, request.path)
        client.respond(error.http_status, lines, error_body(error, request.path))

    def _refusal(self, request_id: bytes, error: ApiError, path: bytes) -> bytes:
        """Count a refusal and return its header lines."""
        self._accounting.count_rejection(request_id, error.http_status, error.reason())
        return error_headers(error) + id_headers(request_id, path)

    def _route(self, client: Client, request: Request) -> None:
        path = request.path
        if self._cross_origin.is_preflight(request):
            lines = self._cross_origin.preflight_lines(request)
            client.respond(200, lines + b"x-request-id: %b\r\n" % request.id, b"")
            return
        responder = self._public.get(path)
        if responder is None:
            if request.refusal is not None:
                raise request.refusal
            if not request.is_background and self.responses is not None and _is_response(path):
                self.responses.on_request(client, request)
                return
            endpoint = _ENDPOINTS.get(path)
            if endpoint is not None:
                require_method(request, b"POST")
                self._generate(client, request, endpoint)
                return
            if request.is_background:
                self._tell_room(client, request)
                return
            if _is_stored(path):
                self._stored_routes().on_request(client, request)
                return
            responder = self._authorised_responder(request, account_of(request))
        require_method(request, b"GET", b"HEAD", *([b"POST"] if path == _PING else []))
        status, lines, body = responder()
        client.respond(status, lines + b"x-request-id: %b\r\n" % request.id, body)

    def _tell_room(self, client: Client, request: Request) -> None:
        """Tell `argosy batch` for how many more requests of batches there is room."""
        if request.path != _ROOM:
            raise no_route(request)
        require_method(request, b"GET")
        try:
            asked = parse_qs(request.target.partition(b"?")[2].decode("latin-1"), max_num_fields=8)
        except ValueError:
            raise BadRequest("the question for room has too many fields") from None
        service = self._fleet.service_of(asked.get("model", [""])[0])
        room = 1 if service is None else self._background.room(service)
        client.respond(
            200, _JSON + b"x-request-id: %b\r\n" % request.id, msgspec.json.encode(RoomReport(room))
        )

    def _authorised_responder(self, request: Request, account: Account) -> Responder:
        path = request.path
        if path == _MODELS:
            return lambda: self._models(request, account)
        if _is_response(path):
            raise NotFound("this router keeps no responses; start it with --batch-url")
        if path.startswith(_MODEL_PREFIX):
            return lambda: self._model(request, account)
        if path == _LOAD:
            load = {"server_load": self._requests.inflight}
            return lambda: (200, _JSON, msgspec.json.encode(load))
        if path == _DOCUMENT and self.document is not None:
            document = self.document
            return lambda: (200, _JSON, document())
        if path == _DOCUMENT_PAGE and self.document is not None:
            return lambda: (200, b"content-type: text/html; charset=utf-8\r\n", document_page())
        if path == _METRICS:
            if self._keys.is_open:
                raise NotFound("metrics are on the admin port (--admin-host, --admin-port)")
            return lambda: self._own_metrics(account)
        raise no_route(request)

    def _stored_routes(self) -> StorageRoutes:
        if self.stored is None:
            raise NotFound("this router keeps no files and batches; start it with --batch-url")
        return self.stored

    def decode_for_gateway(self, client: Client, request: Request, on_call: Callable[[Call], None]) -> bool:
        """Decode a request that `on_head` let in and a gateway forwards, and pass the call on, now or later; return
        False if it is not one for a replica. A request that is refused is answered.

        Args:
            on_call: not called once the client is lost.
        """
        endpoint = _ENDPOINTS.get(request.path)
        if endpoint is None:
            return False
        try:
            require_method(request, b"POST")
            self._decode(client, request, endpoint, b"", on_call)
        except ApiError as error:
            _return_charge(request, error)
            self.refuse(client, request, error)
        return True

    def _generate(
        self, client: Client, request: Request, endpoint: RoutedEndpoint, response_id: bytes = b""
    ) -> None:
        started = self._requests.now()

        def handle(call: Call) -> None:
            self._handle(client, request, call, started)

        self._decode(client, request, endpoint, response_id, handle)

    def _decode(
        self,
        client: Client,
        request: Request,
        endpoint: RoutedEndpoint,
        response_id: bytes,
        on_call: Callable[[Call], None],
    ) -> None:
        """Decode a request and pass the call on: now, or later if another process reads the body, unless its client is
        lost by then.

        Raises:
            ApiError: the request is refused; later the client is told.
        """
        account = account_of(request)
        is_now = not is_large(request.body, account, self._requests.now())
        require_json(request)
        trace: Trace | None = None
        if self._tracer is not None:
            trace, request.headers = self._tracer.begin(request.headers, endpoint)
        if is_now:
            call = decode_call(self._fleet, endpoint, request, account, response_id)
            call.trace = trace
            on_call(call)
            return

        def done(call: Call) -> None:
            call.trace = trace
            on_call(call)

        def refused(error: ApiError) -> None:
            _return_charge(request, error)
            self.refuse(client, request, error)

        self._large_bodies.read(
            client,
            endpoint,
            request.body,
            account,
            lambda examined: CallDraft(self._fleet, endpoint, request, examined, account, response_id),
            has_state=bool(response_id),
            on_call=done,
            on_refused=refused,
        )

    def _handle(self, client: Client, request: Request, call: Call, started: float) -> None:
        on_end: Callable[[], None] | None = None
        if request.is_background:
            call.priority = max(call.priority, BACKGROUND_PRIORITY)
            try:
                self._background.begin(call.service)
            except TooManyRequests as refusal:  # no fault of the account's
                if call.is_charged:
                    call.account.return_request()
                request.id = call.request_id
                self.refuse(client, request, refusal)
                return
            on_end = partial(self._background.end, call.service)
        request.body = b""  # the call has it, perhaps rewritten: one copy is enough
        self._requests.handle(client, call, started, on_end)

    def _ready(self) -> tuple[int, bytes, bytes]:
        if self.is_ready:
            return 200, _JSON, b'{"ready":true}'
        return 503, _JSON, b'{"ready":false}'

    def _own_metrics(self, account: Account) -> tuple[int, bytes, bytes]:
        """Render what the account's key has used. All other metrics concern other keys, and are on the admin port."""
        where = b"" if self._admin_port is None else b" (%d)" % self._admin_port
        note = b"# Usage of this API key only. The router's metrics are on its admin port%b.\n" % where
        return 200, b"content-type: " + CONTENT_TYPE + b"\r\n", note + self._accounting.usage_of(account.name)

    def _models(self, request: Request, account: Account) -> tuple[int, bytes, bytes]:
        is_anthropic = _is_anthropic(request)
        is_codex = _CODEX_QUERY.search(request.target) is not None
        names = names_for(self._fleet, account)
        lengths = self._fleet.model_lengths()
        form = (account.models, is_anthropic, is_codex)
        kept = self._lists.get(form)
        if kept is None or kept.names is not names or kept.lengths != lengths:
            if self._lists_bytes > MAX_LIST_BYTES:
                self._lists.clear()
                self._lists_bytes, kept = 0, None
            cards = [self._card(name, service) for name, service in names]
            body = encoded_models(cards, is_anthropic=is_anthropic, is_codex=is_codex)
            self._lists_bytes += len(body) - (0 if kept is None else len(kept.body))
            self._lists[form] = kept = _List(names, lengths, body)
        return 200, _JSON, kept.body

    def _model(self, request: Request, account: Account) -> tuple[int, bytes, bytes]:
        name = unquote(request.path[len(_MODEL_PREFIX) :].decode("latin-1"))
        service = self._fleet.service_of(name)
        if service is None:
            raise no_such_model(self._fleet, name, account)
        if not may_use(self._fleet, account, name, service, self._fleet.adapter_of(name)):
            raise unknown_model(self._fleet, name, account)
        return 200, _JSON, encoded_model(self._card(name, service), is_anthropic=_is_anthropic(request))

    def _card(self, name: str, service: Service) -> ModelCard:
        model, adapter = service.spec.model, self._fleet.adapter_of(name)
        return ModelCard(
            id=name,
            created=self._created,
            root=adapter or model,
            parent=model if adapter else None,
            max_model_len=service.max_model_len,
        )


def _is_anthropic(request: Request) -> bool:
    return request.header(ANTHROPIC_HEADER.encode()) is not None


def _return_charge(request: Request, error: ApiError) -> None:
    """Return what the request was charged at its head if it is refused for no fault of its own."""
    account = request.grant
    if request.is_charged and error.http_status >= 500 and isinstance(account, Account):
        request.is_charged = False
        account.return_request()


def _has_short_body(request: Request) -> bool:
    """Whether the head declares a body that is not large, and the client sends it without being asked."""
    length = request.header(b"content-length")
    if request.header(b"transfer-encoding") is not None or request.header(b"expect") is not None:
        return False
    digits = b"" if length is None else length.lstrip(b"0")
    return not digits or (digits.isdigit() and len(digits) < 10 and int(digits) <= LARGE_BODY_BYTES)


def _is_stored(path: bytes) -> bool:
    return path.startswith(_STORED) and b"/".join(path.split(b"/", 3)[:3]) in _STORED


def _is_response(path: bytes) -> bool:
    return path == _RESPONSES or path.startswith(_RESPONSES + b"/")
