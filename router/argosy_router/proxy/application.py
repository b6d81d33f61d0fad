"""The routes of the main port, and which of them need an API key (`auth.key_table` refuses requests without one).

Owns: which path answers what, and to whom.
Must not know: HTTP framing, how a generation request is handled.
Invariant: deny by default: if there are keys, only `/health`, `/ping`, `/ready` and `/version` answer without one, and
a browser that asks whether a page of an allowed origin may send a request.
Other requests without a key are refused before their body is read, and an unknown path answers 401 before 404.
Paths are compared as received, never normalised.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, unquote

import msgspec

from argosy_protocol import __version__
from argosy_protocol.batch_program import (
    ACCOUNT,
    ACCOUNT_GONE,
    BACKGROUND_PRIORITY,
    ROOM_PATH,
    RoomReport,
    account_name,
)
from argosy_protocol.bearer_keys import KeyRing
from argosy_protocol.errors import ApiError, BadRequest, Forbidden, NotFound, TooManyRequests
from argosy_protocol.model_lists import ANTHROPIC_HEADER, CODEX_QUERY, encoded_model, encoded_models
from argosy_protocol.openai import ModelCard
from argosy_protocol.openapi_document import document_page
from argosy_protocol.response_object import compaction_not_supported
from argosy_router.auth.accounts import ANONYMOUS, Account
from argosy_router.auth.key_table import KeyTable
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.http.cross_origin import CrossOrigin
from argosy_router.http.messages import Request
from argosy_router.http.server_interface import Client
from argosy_router.metrics.registry import CONTENT_TYPE
from argosy_router.proxy.accounting.request_accounting import RequestAccounting
from argosy_router.proxy.background_load import BackgroundLoad
from argosy_router.proxy.downstream.api_shape import error_body, id_headers
from argosy_router.proxy.downstream.error_headers import error_headers
from argosy_router.proxy.downstream.model_renaming import RenamingClient
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.request.call_decoding import (
    CallDraft,
    decode_call,
    no_route,
    require_json,
    require_method,
)
from argosy_router.proxy.request.examination import RoutedEndpoint
from argosy_router.proxy.request.large_bodies import LARGE_BODY_BYTES, LargeBodies, is_large
from argosy_router.proxy.request.model_names import may_use, names_for, no_such_model, unknown_model
from argosy_router.proxy.request.request_id import request_id_for
from argosy_router.proxy.request_handler import RequestHandler
from argosy_router.proxy.response_routes import ResponseRoutes
from argosy_router.proxy.stored_routes import StoredRoutes
from argosy_router.ratelimit.key_limits import RateLimited

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

Responder = Callable[[], tuple[int, bytes, bytes]]
"""Returns status, header lines and body."""


class _List(NamedTuple):
    """A list of models as it was encoded last. A replica may change its state as often as it likes; what the list shows
    changes seldom."""

    names: list[tuple[str, Service]]
    """The same object until services or their names have changed."""
    lengths: list[int | None]
    """Of the models."""
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
        self.stored: StoredRoutes | None = None
        """Answers the routes of files and batches; None without `argosy batch`."""
        self.responses: ResponseRoutes | None = None
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
            return self._stored_routes().on_head(request, account)
        is_generation = request.path in _ENDPOINTS
        if is_generation and request.method == b"POST":
            self._charge(request, account)
        if request.path == _MODELS or request.path.startswith(_MODEL_PREFIX):
            self._charge(request, account)
        if self.responses is not None and _is_response(request.path):
            return self.responses.is_body_used(request)
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
        request_id = request_id_for(request.header(b"x-request-id"))
        try:
            self._route(client, request, request_id)
        except ApiError as error:
            _return_charge(request, error)
            self.refuse(client, request_id, error, request.path)

    def chat(self, client: Client, request: Request) -> None:
        """Answer a chat whose client the caller has authorised."""
        request_id = request_id_for(None)
        try:
            self._generate(client, request, "chat/completions", request_id, ANONYMOUS)
        except ApiError as error:
            self.refuse(client, request_id, error, request.path)

    @property
    def endpoints(self) -> list[str]:
        """Paths of the requests that are sent to replicas."""
        return [path.decode() for path in _ENDPOINTS]

    def serves(self, path: str) -> bool:
        """Whether requests of this path are sent to replicas."""
        return path.encode() in _ENDPOINTS

    def create_response(
        self, client: Client, request: Request, account: Account, request_id: bytes, response_id: bytes
    ) -> None:
        """Generate a response whose request has the whole conversation, or count the tokens of its prompt, by the path.

        Raises:
            ApiError: the request is refused.
        """
        self._generate(client, request, _ENDPOINTS[request.path], request_id, account, response_id)

    @property
    def is_open(self) -> bool:
        """Whether the routes of models need no key."""
        return self._keys.is_open

    def refuse(self, client: Client, request_id: bytes, error: ApiError, path: bytes) -> None:
        """Answer with an error, in the shape of the path's API, a request that was not decoded into a call."""
        lines = self._refusal(request_id, error, path)
        client.respond(error.http_status, lines, error_body(error, path))

    def _refusal(self, request_id: bytes, error: ApiError, path: bytes) -> bytes:
        """Count a refusal and return its header lines."""
        self._accounting.count_rejection(request_id, error.http_status, error.reason())
        return error_headers(error) + id_headers(request_id, path)

    def _route(self, client: Client, request: Request, request_id: bytes) -> None:
        path = request.path
        if self._cross_origin.is_preflight(request):
            lines = self._cross_origin.preflight_lines(request)
            client.respond(200, lines + b"x-request-id: %b\r\n" % request_id, b"")
            return
        responder = self._public.get(path)
        if responder is None:
            if request.refusal is not None:
                raise request.refusal
            account = request.grant
            assert isinstance(account, Account), "`on_head` lets only accounts in"
            if request.is_background:
                self._answer_batch(client, request, request_id, account)
                return
            if self.responses is not None and _is_response(path):
                self.responses.on_request(client, request, account, request_id)
                return
            endpoint = _ENDPOINTS.get(path)
            if endpoint is not None:
                require_method(request, b"POST")
                self._generate(client, request, endpoint, request_id, account)
                return
            if _is_stored(path):
                self._stored_routes().on_request(client, request, account, request_id)
                return
            responder = self._authorised_responder(request, account)
        require_method(request, b"GET", b"HEAD", *([b"POST"] if path == _PING else []))
        status, lines, body = responder()
        client.respond(status, lines + b"x-request-id: %b\r\n" % request_id, body)

    def _answer_batch(self, client: Client, request: Request, request_id: bytes, account: Account) -> None:
        """Answer `argosy batch`: a request of a batch, or how many more of them there is room for."""
        endpoint = _ENDPOINTS.get(request.path)
        if endpoint is not None:
            require_method(request, b"POST")
            self._generate(client, request, endpoint, request_id, account)
            return
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
            200, _JSON + b"x-request-id: %b\r\n" % request_id, msgspec.json.encode(RoomReport(room))
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

    def _stored_routes(self) -> StoredRoutes:
        if self.stored is None:
            raise NotFound("this router keeps no files and batches; start it with --batch-url")
        return self.stored

    def decode_for_gateway(
        self, client: Client, request: Request, request_id: bytes, on_call: Callable[[Call], None]
    ) -> bool:
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
            account = request.grant
            assert isinstance(account, Account), "`on_head` lets only accounts in"
            self._decode(client, request, endpoint, request_id, account, b"", on_call)
        except ApiError as error:
            _return_charge(request, error)
            self.refuse(client, request_id, error, request.path)
        return True

    def _generate(
        self,
        client: Client,
        request: Request,
        endpoint: RoutedEndpoint,
        request_id: bytes,
        account: Account,
        response_id: bytes = b"",
    ) -> None:
        started = self._requests.now()
        self._decode(
            client,
            request,
            endpoint,
            request_id,
            account,
            response_id,
            lambda call: self._handle(client, request, endpoint, call, started),
        )

    def _handle(
        self,
        client: Client,
        request: Request,
        endpoint: RoutedEndpoint,
        call: Call,
        started: float,
    ) -> None:
        if request.is_background:
            call.priority = max(call.priority, BACKGROUND_PRIORITY)
            try:
                client = self._background.begin(client, call.service)
            except TooManyRequests as refusal:  # no fault of the account's
                if call.is_charged:
                    call.account.return_request()
                self.refuse(client, call.request_id, refusal, request.path)
                return
        request.body = b""  # the call has it, perhaps rewritten: one copy is enough
        if call.renaming is not None:
            client = RenamingClient(
                client, call.renaming, has_own_fields=endpoint in ("messages", "responses")
            )
        self._requests.handle(client, call, started)

    def _decode(
        self,
        client: Client,
        request: Request,
        endpoint: RoutedEndpoint,
        request_id: bytes,
        account: Account,
        response_id: bytes,
        on_call: Callable[[Call], None],
    ) -> None:
        """Decode a request and pass the call on: now, or later if another process reads the body.

        Raises:
            ApiError: the request is refused; later the client is told.
        """
        if is_large(request.body, account, self._requests.now()):
            self._decode_later(client, request, endpoint, request_id, account, response_id, on_call)
            return
        trace = self._begin_trace(request, endpoint)
        call = decode_call(self._fleet, endpoint, request, request_id, account, response_id)
        call.trace = trace
        on_call(call)

    def _decode_later(
        self,
        client: Client,
        request: Request,
        endpoint: RoutedEndpoint,
        request_id: bytes,
        account: Account,
        response_id: bytes,
        on_call: Callable[[Call], None],
    ) -> None:
        """Have another process read a large body, and pass the call on later, unless its client is lost or it is
        refused.

        Raises:
            ApiError: the head does not go with a body.
        """
        require_json(request)
        trace = self._begin_trace(request, endpoint)

        def done(call: Call) -> None:
            call.trace = trace
            on_call(call)

        def refused(error: ApiError) -> None:
            _return_charge(request, error)
            self.refuse(client, request_id, error, request.path)

        self._large_bodies.read(
            client,
            endpoint,
            request.body,
            account,
            lambda examined: CallDraft(
                self._fleet, endpoint, request, examined, request_id, account, response_id
            ),
            has_state=bool(response_id),
            on_call=done,
            on_refused=refused,
        )

    def _begin_trace(self, request: Request, endpoint: RoutedEndpoint) -> Trace | None:
        """Begin the trace of a request, whose headers then name it; None without tracing."""
        if self._tracer is None:
            return None
        trace, request.headers = self._tracer.begin(request.headers, endpoint)
        return trace

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
        lengths = [service.max_model_len for _, service in names]
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
