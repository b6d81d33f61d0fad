"""The routes of the main port.

Owns: which path answers what, and who may ask.
Must not know: connections' bytes, attempts.
Invariant: deny by default: without a key only `/health`, `/ready`, `/version` and `/metrics` answer, and an
unknown path answers 401 before it answers 404. Paths are compared as received, never normalised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import unquote

import msgspec

from argosy_engine import __version__
from argosy_engine.protocol.errors import (
    ApiError,
    MethodNotAllowed,
    NotFound,
    Unauthorized,
)
from argosy_engine.protocol.keys import KeyRing
from argosy_engine.protocol.openai import Endpoint, ModelCard, ModelList
from argosy_router.fleet import Fleet
from argosy_router.http.messages import Request
from argosy_router.http.server import Client
from argosy_router.metrics import CONTENT_TYPE, Metrics
from argosy_router.proxy import headers
from argosy_router.proxy.books import Books
from argosy_router.proxy.call import decode_call, unknown_model
from argosy_router.proxy.dispatcher import Dispatcher
from argosy_router.proxy.exchange import Exchange
from argosy_router.service import Service

_JSON = b"content-type: application/json\r\n"
_MODEL_PREFIX = b"/v1/models/"
_ENDPOINTS: dict[bytes, Endpoint] = {
    b"/v1/chat/completions": "chat/completions",
    b"/v1/completions": "completions",
}

Keys = Callable[[], KeyRing]


class RouterApplication:
    """Answers requests of the main port."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        metrics: Metrics,
        books: Books,
        keys: Keys,
        *,
        guards_metrics: bool = False,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._books = books
        self._keys = keys
        self._created = int(time.time())
        self.is_draining = False
        self._public: dict[bytes, Callable[[], tuple[int, bytes, bytes]]] = {
            b"/health": lambda: (200, _JSON, b"{}"),
            b"/ready": self._ready,
            b"/version": lambda: (200, _JSON, msgspec.json.encode({"version": __version__})),
        }
        self._guarded: dict[bytes, Callable[[], tuple[int, bytes, bytes]]] = {b"/v1/models": self._models}
        metrics_routes = self._guarded if guards_metrics else self._public
        metrics_routes[b"/metrics"] = lambda: (
            200,
            b"content-type: " + CONTENT_TYPE + b"\r\n",
            metrics.render(),
        )

    @property
    def is_ready(self) -> bool:
        """Discovery has spoken and we are not leaving. Replicas are not needed: readiness of pods waits for us."""
        return self._fleet.is_loaded and not self.is_draining

    def on_request(self, connection: Client, request: Request) -> None:
        request_id = headers.request_id(request.header(b"x-request-id"))
        try:
            self._route(connection, request, request_id)
        except ApiError as error:
            self._refuse(connection, request_id, error)

    def chat(self, client: Client, request: Request) -> None:
        """Answers a chat of somebody whose right to ask was checked elsewhere."""
        request_id = headers.request_id(None)
        try:
            self._generate(client, request, "chat/completions", request_id)
        except ApiError as error:
            self._refuse(client, request_id, error)

    @property
    def is_open(self) -> bool:
        """Whether the routes of models need no key."""
        return not self._keys()

    def _refuse(self, connection: Client, request_id: bytes, error: ApiError) -> None:
        self._books.refuse(request_id, error.http_status)
        connection.respond(
            error.http_status,
            self._dispatcher.error_headers(error) + b"x-request-id: %b\r\n" % request_id,
            error.body(),
        )

    def _route(self, connection: Client, request: Request, request_id: bytes) -> None:
        path = request.target.partition(b"?")[0]
        public = self._public.get(path)
        if public is None:
            self._authorise(request)
        endpoint = _ENDPOINTS.get(path)
        if endpoint is not None:
            _require(request, b"POST")
            self._generate(connection, request, endpoint, request_id)
            return
        if public is None and path.startswith(_MODEL_PREFIX):
            answer = lambda: self._model(path)  # noqa: E731
        else:
            found = public or self._guarded.get(path)
            if found is None:
                raise NotFound("no such route")
            answer = found
        _require(request, b"GET", b"HEAD")
        status, lines, body = answer()
        connection.respond(status, lines + b"x-request-id: %b\r\n" % request_id, body)

    def _authorise(self, request: Request) -> None:
        keys = self._keys()
        if not keys:
            return
        value = request.header(b"authorization")
        if not keys.accepts(value.decode("latin-1") if value is not None else None):
            raise Unauthorized("missing or wrong API key: send `Authorization: Bearer KEY`")

    def _generate(self, connection: Client, request: Request, endpoint: Endpoint, request_id: bytes) -> None:
        started = self._dispatcher.now()
        call = decode_call(self._fleet, endpoint, request, request_id)
        exchange = Exchange(self._dispatcher, connection, call, started)
        self._dispatcher.begin()
        connection.attach(exchange)
        exchange.start()

    def _ready(self) -> tuple[int, bytes, bytes]:
        if self.is_ready:
            return 200, _JSON, b'{"ready":true}'
        return 503, _JSON, b'{"ready":false}'

    def _models(self) -> tuple[int, bytes, bytes]:
        cards = []
        for service in self._fleet.services.values():
            names = dict.fromkeys((service.spec.model, *service.spec.aliases))
            cards += [self._card(name, service) for name in names if self._fleet.service_of(name) is service]
        return 200, _JSON, msgspec.json.encode(ModelList(data=cards))

    def _model(self, path: bytes) -> tuple[int, bytes, bytes]:
        name = unquote(path[len(_MODEL_PREFIX) :].decode("latin-1"))
        service = self._fleet.service_of(name)
        if service is None:
            raise unknown_model(name)
        return 200, _JSON, msgspec.json.encode(self._card(name, service))

    def _card(self, name: str, service: Service) -> ModelCard:
        lengths = [replica.hello.max_model_len for replica in service.replicas.values() if replica.hello]
        return ModelCard(
            id=name,
            created=self._created,
            root=service.spec.model,
            max_model_len=min(lengths) if lengths else None,
        )


def _require(request: Request, *methods: bytes) -> None:
    if request.method not in methods:
        raise MethodNotAllowed(f"method must be {' or '.join(method.decode() for method in methods)}")
