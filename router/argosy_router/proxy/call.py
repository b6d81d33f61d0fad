"""A client's request, decoded once.

Owns: what the router needs to know about a request after reading it. Must not know: connections, replicas.
Invariant: the body that is forwarded is the client's own bytes, except for the value of `model` where the engine
would not know the name the client used, of `priority` where the client's key or the engine has a say in it, of
`cache_salt` where the key's cache is private, and of `stream_options` where a stream would not tell its usage. Towards
engines that are not ours it also lacks the fields that `foreign_body` does not list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from argosy_protocol.embeddings import decode_embedding_request
from argosy_protocol.errors import BadRequest, NotFound
from argosy_protocol.headers import MODEL_NAME, RESPONSE_ID, TENANT
from argosy_protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    Endpoint,
    GenerationRequest,
    InternalFields,
    StreamOptions,
    decode_request,
)
from argosy_protocol.prompt_view import prompt_view
from argosy_protocol.tokenization import only_model
from argosy_router.admission.accounts import Account
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Prompt, Service
from argosy_router.http.messages import Request
from argosy_router.proxy import headers
from argosy_router.proxy.body import with_another, with_fields
from argosy_router.proxy.estimate import TokenEstimate, estimate_of
from argosy_router.proxy.foreign_body import foreign_body
from argosy_router.proxy.migration import StreamShape, resumable_shape
from argosy_router.proxy.renaming import Renaming
from argosy_router.proxy.usage import asking_usage

if TYPE_CHECKING:
    from argosy_router.records.tracing import Trace


class UnsupportedMediaType(BadRequest):
    """A body that is not plain JSON. Requiring the content type also keeps web pages of other origins out: it makes
    their requests subject to CORS."""

    http_status = 415


class Call:
    """One generation request."""

    __slots__ = (
        "account",
        "asked_model",
        "body",
        "canary_of",
        "estimate",
        "headers",
        "hides_usage",
        "internal_headers",
        "is_for_any_engine",
        "is_stream",
        "path",
        "priority",
        "prompt",
        "renaming",
        "request_id",
        "service",
        "shape",
        "trace",
    )

    def __init__(
        self,
        service: Service,
        prompt: Prompt,
        request_id: bytes,
        headers: bytes,
        body: bytes,
        path: bytes,
        account: Account,
        estimate: TokenEstimate,
    ) -> None:
        self.service = service
        self.prompt = prompt
        self.request_id = request_id
        self.headers = headers
        """Lines as every replica gets them, without ids and the length."""
        tenant = xxh3_64_hexdigest(account.name.encode()).encode() if account.name else b""
        self.internal_headers = b"%b: %b\r\n" % (_RESPONSE_ID, request_id)
        """Lines that our own engines get besides."""
        if tenant:
            self.internal_headers += b"%b: %b\r\n" % (_TENANT, tenant)
        self.body = body
        self.is_for_any_engine = False
        """Whether `body` has been reduced to what engines of another make get."""
        self.path = path
        self.asked_model = ""
        """What the client, and so the body, calls the model, where all engines were to be told that by a header."""
        self.account = account
        self.estimate = estimate
        """What it takes of its key's limits and of the service, before that is known."""
        self.priority = 0
        self.is_stream = False
        self.shape: StreamShape | None = None
        """Of a stream that can be resumed."""
        self.hides_usage = False
        """The client did not ask its stream for the usage; we did."""
        self.renaming: Renaming | None = None
        """Where the engine knows the model by another name than the client used."""
        self.canary_of: Service | None = None
        """The service the client named, where that has a canary, which may be `service`."""
        self.trace: Trace | None = None
        """Where requests are traced."""

    def reduce_body(self) -> None:
        """Leaves of the body what engines of another make get. Ours would ignore the rest."""
        if not self.is_for_any_engine:
            self.is_for_any_engine = True
            self.body = foreign_body(self.body)

    def rename_body(self, replica: Replica) -> None:
        """Has the request name the model as `replica` does, which cannot be told what the client calls it. It has come
        after those that could; its answer will have its own name."""
        name = replica.announced_name or self.service.spec.model
        if self.asked_model and name != self.asked_model:
            self.body = with_fields(self.body, {"model": name})

    @property
    def key_name(self) -> str:
        """Name of the client's API key; empty where no keys are needed."""
        return self.account.name


_RESPONSE_ID: Final = RESPONSE_ID.encode()
_MODEL_NAME: Final = MODEL_NAME.encode()
_TENANT: Final = TENANT.encode()

SESSION_HEADER = b"x-session-id"
"""The header llm-d's and Dynamo's clients use too."""

_INTERNAL: Final = frozenset(InternalFields.__struct_fields__)

RoutedEndpoint = Endpoint | Literal["embeddings", "tokenize", "detokenize"]

_JSON = b"application/json"


def decode_call(
    fleet: Fleet, endpoint: RoutedEndpoint, request: Request, request_id: bytes, account: Account
) -> Call:
    """Reads a request of `account` and finds its service.

    Raises:
        BadRequest: not JSON, wrong types, out of bounds.
        NotFound: no service has this model name, or the account may not use it.
    """
    content_type = request.header(b"content-type") or b""
    if content_type != _JSON and content_type.partition(b";")[0].strip().lower() != _JSON:
        raise UnsupportedMediaType("content-type must be application/json")
    if request.header(b"content-encoding") is not None:
        raise UnsupportedMediaType("content-encoding is not supported")
    body = request.body
    decoded = _decode(endpoint, body)
    if decoded.resume is not None:
        raise BadRequest("resume is an internal field", param="resume")
    if decoded.vllm_xargs and not _INTERNAL.isdisjoint(decoded.vllm_xargs):
        raise BadRequest("vllm_xargs has a field that is internal to engines", param="vllm_xargs")
    service, adapter = find_service(fleet, decoded)
    if not may_use(account, decoded.model, service, adapter):
        raise unknown_model(decoded.model)
    session = session_of(decoded, request.header(SESSION_HEADER))
    named = service
    if not adapter:
        service = fleet.answering(named, session or request_id)
    priority = account.priority(decoded.priority)
    changes: dict[str, str | int | StreamOptions] = {}
    model = engine_name(service, decoded.model, adapter)
    if model != decoded.model:
        changes["model"] = model
    forwarded = priority if priority and service.schedules_by_priority else 0
    if forwarded != decoded.priority:
        changes["priority"] = forwarded
    salt = account.cache_salt(decoded.cache_salt)
    asked = decoded.cache_salt
    decoded.cache_salt = salt  # the router's hashes must equal the engine's
    if asked is not None and salt is not None and salt != asked:
        changes["cache_salt"] = salt
    options = decoded.stream_options
    hides_usage = decoded.stream and not (options is not None and options.include_usage)
    if hides_usage and options is not None:
        changes["stream_options"] = msgspec.structs.replace(options, include_usage=True)
    if changes:
        body = with_fields(body, changes)
    if asked is None and salt is not None:
        body = with_another(body, b'"cache_salt":"%b"' % salt.encode())  # hexadecimal
    if hides_usage and options is None:
        body = asking_usage(body)
    prompt = prompt_of(service, decoded, session, adapter)
    call = Call(
        service,
        prompt,
        request_id,
        headers.forwarded(request.headers),
        body,
        request.path,
        account,
        estimate_of(decoded, service.estimate_tokens(prompt), account.usual_output_tokens),
    )
    call.priority = priority
    call.is_stream = decoded.stream
    call.shape = resumable_shape(decoded)
    call.hides_usage = hides_usage
    if model != decoded.model:
        call.renaming = Renaming(model, decoded.model)
    if not adapter and (model != service.spec.engine_name or decoded.model != model):
        call.asked_model = decoded.model if service.takes_model_names else ""
        call.internal_headers += b"%b: %b\r\n" % (_MODEL_NAME, quote(decoded.model, safe="/:").encode())
    if named.spec.canary is not None:
        call.canary_of = named
    return call


def _decode(endpoint: RoutedEndpoint, body: bytes) -> ChatCompletionRequest | CompletionRequest:
    if endpoint == "embeddings":
        return decode_embedding_request(body).as_completion()
    if endpoint in ("chat/completions", "completions"):
        return decode_request(endpoint, body)
    return only_model(body)


def find_service(fleet: Fleet, decoded: GenerationRequest) -> tuple[Service, str]:
    """The service a request names, and the adapter of it if it names one.

    Raises:
        BadRequest: it names none.
        NotFound: no service has this model name.
    """
    if not decoded.model:
        raise BadRequest("you must provide a model parameter", param="model")
    service = fleet.service_of(decoded.model)
    if service is None:
        raise unknown_model(decoded.model)
    return service, fleet.adapter_of(decoded.model)


def engine_name(service: Service, asked: str, adapter: str) -> str:
    """What the request calls the model that the client calls `asked`: the same, where a header tells the engines, else
    what they call it themselves."""
    if adapter:
        return adapter
    if service.takes_model_names:
        return asked
    spec = service.spec
    if spec.engine_model and (announced := service.announced_name):
        return announced  # an engine from before: it has the names it was started with
    return asked if asked == spec.model or asked in spec.aliases else spec.model


def session_of(decoded: ChatCompletionRequest | CompletionRequest, header: bytes | None) -> bytes:
    """The session a client declares, empty for none; `header` is the value of `SESSION_HEADER`."""
    return header or (decoded.prompt_cache_key or decoded.session_id or "").encode("utf-8", "surrogatepass")


def prompt_of(
    service: Service,
    decoded: ChatCompletionRequest | CompletionRequest,
    session: bytes,
    adapter: str = "",
) -> Prompt:
    """What routing knows about a request's prompt."""
    number = xxh3_64_intdigest(session) if session else 0
    alias = decoded.model if decoded.model in service.partial_aliases else ""
    return service.prompt(decoded, prompt_view(decoded), number, adapter, alias)


def may_use(account: Account, name: str, service: Service, adapter: str = "") -> bool:
    """Whether the account may call the service by this name: a key that lists one of its main names means all of it,
    and one that lists `MODEL:ADAPTER` means the adapter by all its names."""
    model = service.model
    return account.may_use(name, model, service.name, f"{model}:{adapter}" if adapter else name)


def unknown_model(name: str) -> NotFound:
    return NotFound(f"the model `{name[:256]}` does not exist", param="model", code="model_not_found")
