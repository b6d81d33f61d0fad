"""A client's request as the router handles it: its service, prompt, headers and body.

Owns: request ids, headers that cross the router, which service a model name means and which keys may use it, and which
fields of a body the router rewrites. Must not know: connections, attempts, how a replica is chosen.
Invariants: only the headers listed here cross the router, so that a client cannot forge the router's headers towards an
engine (`x-data-parallel-rank`), nor an engine those towards a client. The body that is forwarded is the client's own
bytes, except for the value of `model` where the engine would not know the name the client used, of `priority` where the
client's key or the engine has a say in it, of `cache_salt` where the key's cache is private, and of `stream_options`
where a stream would not report its usage, or an engine of another make would not report it all along. Engines of other
makes get only the fields that `request_body` lists.
"""

from __future__ import annotations

import re
import secrets
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from argosy_protocol import errors
from argosy_protocol.errors import BadRequest, MethodNotAllowed, NotFound, Unavailable
from argosy_protocol.headers import (
    DROPPED_TOOLS,
    MODEL_NAME,
    REQUEST_ID_FORM,
    RESOLVED,
    RESOURCE_BUSY,
    RESPONSE_ID,
    TENANT,
)
from argosy_protocol.openai import StreamOptions
from argosy_router.auth.accounts import Account
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Service
from argosy_router.http.messages import Headers, Request, connection_options, render_headers
from argosy_router.prefixes import (
    MODEL_ITSELF,
    MeasuredPrompts,
    Prompt,
    ServedName,
    measure,
    prompt_from,
    tokens_of,
)
from argosy_router.proxy.decoded_types import Examined
from argosy_router.proxy.request_body import (
    RoutedEndpoint,
    TokenEstimate,
    examine,
    keep_foreign_fields,
    takes_long,
    with_another,
    with_fields,
)

if TYPE_CHECKING:
    from argosy_router.observability.tracing import Trace


_REQUEST_ID: Final = re.compile(REQUEST_ID_FORM.encode())
_process: Final = secrets.token_hex(8).encode()
_numbers: Final = count(1)


def request_id_in_body(asked: str | None, sent: bytes | None, made: bytes) -> bytes:
    """Return the id that the body asks for (vLLM's `request_id`), if no header does and it is safe to pass on.

    Args:
        sent: the header's value.
        made: the request's id otherwise.
    """
    if asked is None or made == sent:
        return made
    name = asked.encode()
    return name if _REQUEST_ID.fullmatch(name) else made


def request_id_for(sent: bytes | None) -> bytes:
    """Return the id that the client sent if it is safe to pass on, else a new one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return b"%b-%d" % (_process, next(_numbers))


_FORWARDED: Final = frozenset(
    (
        *(b"accept", b"anthropic-beta", b"anthropic-version"),
        *(b"content-type", b"traceparent", b"tracestate", b"user-agent"),
    )
)
"""Towards engines: what describes the body and the answer, trace context, and the user agent, for the engine's log. Not
`accept-encoding`: answers are read for usage and event boundaries."""
_RETURNED: Final = frozenset(
    (
        b"cache-control",
        b"content-encoding",
        b"content-language",
        b"content-type",
        b"date",
        b"openai-model",
        b"openai-processing-ms",
        b"openai-version",
        b"retry-after",
        b"retry-after-ms",
        b"x-accel-buffering",
        DROPPED_TOOLS.encode(),
        RESOURCE_BUSY.encode(),
        b"x-should-retry",
    )
)
"""Towards clients: what describes the body, and what OpenAI's SDKs and proxies in front of the router obey."""


def forwarded_headers(headers: Headers) -> bytes:
    """Render a client's headers as an engine gets them."""
    return _only(headers, _FORWARDED)


def returned_headers(headers: Headers) -> bytes:
    """Render an engine's headers as the client gets them."""
    return _only(headers, _RETURNED)


def _only(headers: Headers, names: frozenset[bytes]) -> bytes:
    options = connection_options(headers)
    return render_headers([(name, value) for name, value in headers if name in names and name not in options])


_RETRY_AFTER_S: Final = 1.0
_SHOWN_NAMES: Final = 8
"""Names of models in one message."""
_MAX_KEPT_LISTS: Final = 64
"""Lists of names that are kept: keys that may use the same models have one, and that of a thousand services takes 100
KB. Finding it takes some milliseconds."""


class Renaming(NamedTuple):
    """The two names of one model."""

    engine: str
    client: str


def find_service(fleet: Fleet, name: str, account: Account | None = None) -> tuple[Service, str]:
    """Return the service that has a name, and the adapter if it is one's, else the empty string. Whether `account` may
    use it is not checked: the error names what it may use.

    Raises:
        BadRequest: the name is empty.
        NotFound: no service has this model name.
        Unavailable: none has it yet, and some replicas have not told their models.
    """
    if not name:
        raise BadRequest("you must provide a model parameter", param="model")
    service = fleet.service_of(name)
    if service is None:
        raise no_such_model(fleet, name, account)
    return service, fleet.adapter_of(name)


def engine_name(service: Service, asked: str, adapter: str) -> str:
    """Return the name under which the engine gets the model that the client calls `asked`: the same if a header tells
    the engines that name, else the engines' own."""
    if adapter:
        return adapter
    if service.takes_model_names:
        return asked
    spec = service.spec
    if spec.engine_model and (announced := service.announced_name):
        return announced  # an older engine, which has the names it was started with
    return asked if asked in spec.aliases else spec.started_name


def may_use(fleet: Fleet, account: Account, name: str, service: Service, adapter: str = "") -> bool:
    """Whether the account may call the service by this name: a key that lists one of its main names means all of it,
    and one that lists `MODEL:ADAPTER` means the adapter by all its names. A name that another service has is none of
    its own, whatever it claims."""
    model = service.model
    if fleet.service_of(model) is not service:
        return account.may_use(name, service.name)
    return account.may_use(name, model, service.name, f"{model}:{adapter}" if adapter else name)


def names_for(fleet: Fleet, account: Account) -> list[tuple[str, Service]]:
    """Return the names that the account may give in requests, each with its service; the list is shared."""
    kept = fleet.permitted.get(account.models)
    if kept is not None:
        return kept
    found: list[tuple[str, Service]] = []
    for service in fleet.services.values():
        spec = service.spec
        adapters = [f"{spec.model}:{adapter}" for adapter in spec.adapters]
        found += [
            (name, service)
            for name in dict.fromkeys((spec.model, *spec.aliases, *adapters))
            if fleet.service_of(name) is service
            and may_use(fleet, account, name, service, fleet.adapter_of(name))
        ]
    if len(fleet.permitted) >= _MAX_KEPT_LISTS:
        fleet.permitted.clear()
    fleet.permitted[account.models] = found
    return found


def unknown_model(fleet: Fleet, name: str, account: Account | None) -> NotFound:
    """Return the error for a name that no service has, or that the account may not use, with the names that it may use;
    None: whoever asks sees no names."""
    names = names_for(fleet, account) if account is not None else []
    shown = ", ".join(repr(found[:256]) for found, _ in names[:_SHOWN_NAMES])
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    there = f"; models: {shown}{more}" if shown else ""
    return NotFound(f"the model `{name[:256]}` does not exist{there}", param="model", code="model_not_found")


def no_such_model(fleet: Fleet, name: str, account: Account | None) -> NotFound | Unavailable:
    """Return the error for a name that no service has: another one while some replicas have not told their models."""
    if fleet.knows_all_models:
        return unknown_model(fleet, name, account)
    return Unavailable(
        f"the model `{name[:256]}` is not known yet: the router has not heard of all of its replicas; retry",
        param="model",
        retry_after_s=_RETRY_AFTER_S,
    )


_RESPONSE_ID: Final = RESPONSE_ID.encode()
_TENANT: Final = TENANT.encode()


SESSION_HEADER = b"x-session-id"
"""The header llm-d's and Dynamo's clients use too."""

_MODEL_NAME: Final = MODEL_NAME.encode()
_REPORTING: Final = frozenset(("messages", "responses"))
"""Endpoints whose streams report their usage in any case."""
_WITH_PROGRESS: Final = frozenset(("chat/completions", "completions"))
"""Endpoints whose streams can report their usage in every event."""
_RESOLVED: Final = b"%b: 1\r\n" % RESOLVED.encode()
_WITH_USAGE: Final = b'{"include_usage":true}'
_JSON: Final = b"application/json"
_SMALL_BODY_BYTES: Final = 64 << 10
"""Bodies up to this size are large by their values only: reading one takes some milliseconds at most."""


class UnsupportedMediaType(BadRequest):
    """The body is not plain JSON. Requiring the content type also keeps out web pages of other origins, because it
    makes their requests subject to CORS."""

    http_status = 415
    default_code = "unsupported_media_type"


def require_method(request: Request, *allowed: bytes) -> bytes:
    """Return the request's method. Raises MethodNotAllowed if it is another one than those of the path."""
    if request.method not in allowed:
        names = [method.decode() for method in allowed]
        raise MethodNotAllowed(f"method must be {' or '.join(names)}", names)
    return request.method


def no_route(request: Request) -> NotFound:
    """Return the error of a path that nothing answers."""
    return errors.no_route(request.method.decode("latin-1"), request.path.decode("latin-1"))


def require_json(request: Request) -> None:
    """Raises UnsupportedMediaType if the body is not plain JSON by its head."""
    content_type = request.header(b"content-type") or b""
    if content_type != _JSON and content_type.partition(b";")[0].strip().lower() != _JSON:
        raise UnsupportedMediaType("content-type must be application/json")
    if request.header(b"content-encoding") is not None:
        raise UnsupportedMediaType("content-encoding is not supported")


def account_of(request: Request) -> Account:
    """Return the account that a request has shown a key of."""
    account = request.grant
    assert isinstance(account, Account), "`on_head` lets only accounts in"
    return account


def is_large(body: bytes, account: Account, now: float) -> bool:
    """Whether another process reads a body: a long one, or if its account sends much in little time. A body of more
    than `_SMALL_BODY_BYTES` that is read here is counted as sent."""
    if takes_long(body):
        return True
    size = len(body)
    return size > _SMALL_BODY_BYTES and not account.may_read_at_once(size, now)


def decode_call(
    fleet: Fleet,
    endpoint: RoutedEndpoint,
    request: Request,
    account: Account,
    response_id: bytes = b"",
) -> Call:
    """Decode a request of `account`, whose head says that it is JSON, and find its service.

    Args:
        response_id: the id of a response that the router stores, whose conversation the request has; empty if the
            router stores none.

    Raises:
        BadRequest: not JSON, wrong types, out of bounds.
        NotFound: no service has this model name, or the account may not use it.
    """
    body = request.body
    examined, prompts = examine(endpoint, body, has_state=bool(response_id))
    draft = CallDraft(fleet, endpoint, request, examined, account, response_id)
    if draft.changes:
        body = with_fields(body, draft.changes)
    return draft.call(draft.with_additions(body), measure(prompts, draft.seed))


class CallDraft:
    """A call whose service is known, and whose prompts are not measured yet."""

    def __init__(
        self,
        fleet: Fleet,
        endpoint: RoutedEndpoint,
        request: Request,
        examined: Examined,
        account: Account,
        response_id: bytes,
    ) -> None:
        """Find the service of a request that was examined; the arguments are those of `decode_call`.

        Raises:
            ApiError: as `decode_call` does.
        """
        self.examined = examined
        self.endpoint = endpoint
        self.request = request
        self.account = account
        self.response_id = response_id
        self.request_id = request_id_in_body(examined.request_id, request.header(b"x-request-id"), request.id)
        service, self.adapter = find_service(fleet, examined.model, account)
        if not may_use(fleet, account, examined.model, service, self.adapter):
            raise unknown_model(fleet, examined.model, account)
        self.session = session_of(examined.session, request.header(SESSION_HEADER))
        self.named = service
        if not self.adapter:
            service = fleet.answering(service, self.session or self.request_id)
        self.service = service
        salt = account.cache_salt(examined.cache_salt)
        self.seed = service.hasher.seed(self.adapter, salt or "")
        """Of the hashes of its prompts: the router's must equal the engine's."""
        self.priority = account.priority(examined.priority)
        self.model = model = engine_name(service, examined.model, self.adapter)
        options = examined.stream_options
        reports_usage = endpoint in _REPORTING or (options is not None and options.include_usage)
        self.hides_usage = examined.stream and not reports_usage
        changes: dict[str, str | int | StreamOptions | msgspec.Raw] = {}
        if examined.tool_choice is not None:
            changes["tool_choice"] = examined.tool_choice
            changes["tools"] = msgspec.Raw(examined.tools)
        if endpoint == "responses" and not response_id:
            changes["store"] = False
        if model != examined.model:
            changes["model"] = model
        forwarded = self.priority if self.priority and service.schedules_by_priority else 0
        if forwarded != examined.priority:
            changes["priority"] = forwarded
        asked = examined.cache_salt
        if asked is not None and salt is not None and salt != asked:
            changes["cache_salt"] = salt
        self.hides_progress = (
            examined.stream
            and endpoint in _WITH_PROGRESS
            and service.has_foreign_replicas  # ours tell token ids
            and not request.is_from_gateway
            and not (reports_usage and options is not None and options.continuous_usage_stats)
        )
        if self.hides_progress or (self.hides_usage and options is not None):
            changes["stream_options"] = msgspec.structs.replace(
                options or StreamOptions(), include_usage=True, continuous_usage_stats=self.hides_progress
            )
        self.changes = changes
        """Other values of fields of the body (`with_fields`)."""
        self.additions: list[tuple[str, bytes]] = []
        """Fields that the body has not, or as null, and their values as JSON."""
        if asked is None and salt is not None:
            self.additions.append(("cache_salt", b'"%b"' % salt.encode()))  # hexadecimal
        if self.hides_usage and "stream_options" not in changes:
            self.additions.append(("stream_options", _WITH_USAGE))

    def with_additions(self, body: bytes) -> bytes:
        """Return the body with `additions`."""
        for name, value in self.additions:
            body = with_another(body, b'"%b":%b' % (name.encode(), value))
        return body

    @property
    def is_for_foreign_engines(self) -> bool:
        """Whether a replica that may answer is an engine of another make."""
        return self.service.has_foreign_replicas

    def call(self, body: bytes, measured: MeasuredPrompts) -> Call:
        """Return the call. `body` has `changes` and `additions`."""
        return Call(self, body, measured)


class Call:
    """One generation request."""

    def __init__(self, draft: CallDraft, body: bytes, measured: MeasuredPrompts) -> None:
        """`body` has the draft's `changes` and `additions`."""
        examined, account, request = draft.examined, draft.account, draft.request
        service, endpoint = draft.service, draft.endpoint
        self.service = service
        self.prompt = prompt = prompt_of(
            service,
            examined.model,
            measured,
            draft.session,
            draft.adapter,
            drawn_by=draft.session or draft.request_id,
            is_cut=examined.is_cut,
        )
        self.request_id = draft.request_id
        self.headers = forwarded_headers(request.headers)
        """Header lines that every replica gets, without ids and the length."""
        is_response = endpoint in ("responses", "responses/input_tokens")
        engine_id = draft.request_id  # engines name a response after it
        if is_response and draft.response_id:
            engine_id = draft.response_id.removeprefix(b"resp_")
        self.internal_headers = b"%b: %b\r\n" % (_RESPONSE_ID, engine_id)
        """Header lines that only Argosy engines get."""
        if account.name:
            tenant = xxh3_64_hexdigest(account.name.encode()).encode()
            self.internal_headers += b"%b: %b\r\n" % (_TENANT, tenant)
        if is_response:
            self.internal_headers += _RESOLVED
        self.endpoint = endpoint
        """Endpoint of the API, by which `request_body` has a list of fields."""
        self.body = body
        self.is_body_reduced = False
        """Whether `body` has been reduced to the fields that engines of other makes get."""
        self.path = (
            b"/classify" if endpoint == "classify" else request.path
        )  # vLLM's engines have no /v1/classify
        self.client_model = examined.model
        """What the client calls the model."""
        self.asked_model = ""
        """What the client, and so the body, calls the model, if a header tells all engines that name; else empty."""
        self.renaming: Renaming | None = None
        """Set if the engine knows the model by another name than the client used."""
        if draft.model != examined.model:
            self.renaming = Renaming(draft.model, examined.model)
        if not draft.adapter and (draft.model != service.spec.engine_name or self.renaming is not None):
            self.asked_model = examined.model if service.takes_model_names else ""
            name = quote(examined.model, safe="/:").encode()
            self.internal_headers += b"%b: %b\r\n" % (_MODEL_NAME, name)
        self.account = account
        self.estimate = TokenEstimate(
            examined.outputs,
            tokens_of(prompt, account.bytes_per_token),
            account.usual_output_tokens,
            service_prompt_tokens=service.lengths.tokens(prompt),
        )
        """What the request is expected to take of its key's limits and of the service."""
        self.priority = draft.priority
        self.is_stream = examined.stream
        self.shape = examined.shape
        """The shape of a stream that can be continued by another replica; else None."""
        self.is_charged = request.is_charged
        """Whether the request was charged to its key's limits at its head."""
        self.hides_usage = draft.hides_usage
        """Whether the router, not the client, asked the stream for its usage."""
        self.hides_progress = draft.hides_progress
        """Whether the router, not the client, asked the stream to report its usage in every event."""
        self.stream_interval = examined.stream_interval
        """Tokens of a sequence that an engine may keep back until an event has as many."""
        self.canary_of = draft.named if draft.named.spec.canary is not None else None
        """The service the client named, if it has a canary, which may be `service`."""
        self.trace: Trace | None = None
        """Set if requests are traced."""

    def reduce_body(self) -> None:
        """Reduce the body to the fields that engines of other makes get; an Argosy engine would ignore the others."""
        if not self.is_body_reduced:
            self.is_body_reduced = True
            self.body = keep_foreign_fields(self.body, self.endpoint)

    def rename_body(self, replica: Replica) -> None:
        """Put into the body the name by which `replica` knows the model, if no header can tell it the client's. Such a
        replica joined after the request was decoded; its answer will have its own name for the model."""
        name = replica.announced_name or self.service.spec.started_name
        if self.asked_model and name != self.asked_model:
            self.body = with_fields(self.body, {"model": name})

    @property
    def key_name(self) -> str:
        """Name of the client's API key; empty where no keys are needed."""
        return self.account.name


def session_of(declared: str, header: bytes | None) -> bytes:
    """Return a client's session, empty for none: `header` is the value of `SESSION_HEADER`, `declared` the body's."""
    return header or declared.encode("utf-8", "surrogatepass")


def prompt_of(
    service: Service,
    model: str,
    measured: MeasuredPrompts,
    session: bytes,
    adapter: str = "",
    drawn_by: bytes = b"",
    *,
    is_cut: bool = False,
) -> Prompt:
    """Return what routing needs to know of a request's prompts.

    Args:
        model: as the client named it.
        drawn_by: what the side of a canary rollout is drawn by; empty to draw none.
        is_cut: see `Prompt`.
    """
    number = xxh3_64_intdigest(session) if session else 0
    alias = model if model in service.candidates.partial_aliases else ""
    side = service.side(drawn_by) if drawn_by else ""
    name = ServedName(adapter or alias, side) if adapter or alias or side else MODEL_ITSELF
    return prompt_from(measured, number, name, is_cut=is_cut)
