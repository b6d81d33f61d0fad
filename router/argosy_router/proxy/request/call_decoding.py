"""Decoding of a client's request into a call.

Owns: which service a request is for, and which fields of its body the router rewrites.
Must not know: connections, attempts, how a replica is chosen.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

import msgspec
from xxhash import xxh3_64_intdigest

from argosy_protocol import errors
from argosy_protocol.errors import BadRequest, MethodNotAllowed, NotFound
from argosy_protocol.headers import MODEL_NAME, RESOLVED
from argosy_protocol.openai import StreamOptions
from argosy_router.auth.accounts import Account
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.http.messages import Request
from argosy_router.prompts.prompt_hash import MeasuredPrompts, Prompt, measure, prompt_from
from argosy_router.prompts.prompt_length_model import tokens_of
from argosy_router.proxy.request.body_rewrite import with_another, with_fields
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.request.examination import RoutedEndpoint, examine
from argosy_router.proxy.request.examined import Examined
from argosy_router.proxy.request.header_policy import forwarded as forwarded_headers
from argosy_router.proxy.request.model_names import (
    Renaming,
    engine_name,
    find_service,
    may_use,
    unknown_model,
)
from argosy_router.proxy.request.request_id import request_id_in_body
from argosy_router.proxy.request.stream_shape import StreamShape
from argosy_router.proxy.request.token_estimate import Outputs, estimate_of

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


def decode_call(
    fleet: Fleet,
    endpoint: RoutedEndpoint,
    request: Request,
    request_id: bytes,
    account: Account,
    response_id: bytes = b"",
) -> Call:
    """Decode a request of `account` and find its service.

    Args:
        response_id: the id of a response that the router stores, whose conversation the request has; empty if the
            router stores none.

    Raises:
        BadRequest: not JSON, wrong types, out of bounds.
        NotFound: no service has this model name, or the account may not use it.
    """
    require_json(request)
    body = request.body
    examined, prompts = examine(endpoint, body, has_state=bool(response_id))
    draft = CallDraft(fleet, endpoint, request, examined, request_id, account, response_id)
    if draft.changes:
        body = with_fields(body, draft.changes)
    return draft.call(draft.with_additions(body), measure(prompts, draft.seed))


class CallDraft:
    """A call whose service is known, and whose prompts are not measured yet."""

    __slots__ = (
        "_account",
        "_adapter",
        "_endpoint",
        "_examined",
        "_hides_progress",
        "_hides_usage",
        "_model",
        "_named",
        "_priority",
        "_request",
        "_request_id",
        "_response_id",
        "_service",
        "_session",
        "additions",
        "changes",
        "seed",
    )

    def __init__(
        self,
        fleet: Fleet,
        endpoint: RoutedEndpoint,
        request: Request,
        examined: Examined,
        request_id: bytes,
        account: Account,
        response_id: bytes,
    ) -> None:
        """Find the service of a request that was examined; the arguments are those of `decode_call`.

        Raises:
            ApiError: as `decode_call` does.
        """
        self._examined = examined
        self._endpoint = endpoint
        self._request = request
        self._account = account
        self._response_id = response_id
        self._request_id = request_id_in_body(
            examined.request_id, request.header(b"x-request-id"), request_id
        )
        service, self._adapter = find_service(fleet, examined.model, account)
        if not may_use(fleet, account, examined.model, service, self._adapter):
            raise unknown_model(fleet, examined.model, account)
        self._session = session_of(examined.session, request.header(SESSION_HEADER))
        self._named = service
        if not self._adapter:
            service = fleet.answering(service, self._session or self._request_id)
        self._service = service
        salt = account.cache_salt(examined.cache_salt)
        self.seed = service.hasher.seed(self._adapter, salt or "")
        """Of the hashes of its prompts: the router's must equal the engine's."""
        self._priority = account.priority(examined.priority)
        self._model = model = engine_name(service, examined.model, self._adapter)
        options = examined.stream_options
        reports_usage = endpoint in _REPORTING or (options is not None and options.include_usage)
        self._hides_usage = examined.stream and not reports_usage
        changes: dict[str, str | int | StreamOptions | msgspec.Raw] = {}
        if examined.tool_choice is not None:
            changes["tool_choice"] = examined.tool_choice
            changes["tools"] = msgspec.Raw(examined.tools)
        if endpoint == "responses" and not response_id:
            changes["store"] = False
        if model != examined.model:
            changes["model"] = model
        forwarded = self._priority if self._priority and service.schedules_by_priority else 0
        if forwarded != examined.priority:
            changes["priority"] = forwarded
        asked = examined.cache_salt
        if asked is not None and salt is not None and salt != asked:
            changes["cache_salt"] = salt
        self._hides_progress = (
            examined.stream
            and endpoint in _WITH_PROGRESS
            and service.has_foreign_replicas  # ours tell token ids
            and not request.is_from_gateway
            and not (reports_usage and options is not None and options.continuous_usage_stats)
        )
        if self._hides_progress or (self._hides_usage and options is not None):
            changes["stream_options"] = msgspec.structs.replace(
                options or StreamOptions(), include_usage=True, continuous_usage_stats=self._hides_progress
            )
        self.changes = changes
        """Other values of fields of the body (`with_fields`)."""
        self.additions: list[tuple[str, bytes]] = []
        """Fields that the body has not, or as null, and their values as JSON."""
        if asked is None and salt is not None:
            self.additions.append(("cache_salt", b'"%b"' % salt.encode()))  # hexadecimal
        if self._hides_usage and "stream_options" not in changes:
            self.additions.append(("stream_options", _WITH_USAGE))

    def with_additions(self, body: bytes) -> bytes:
        """Return the body with `additions`."""
        for name, value in self.additions:
            body = with_another(body, b'"%b":%b' % (name.encode(), value))
        return body

    @property
    def is_for_foreign_engines(self) -> bool:
        """Whether a replica that may answer is an engine of another make."""
        return self._service.has_foreign_replicas

    def call(self, body: bytes, measured: MeasuredPrompts) -> Call:
        """Return the call.

        Args:
            body: with `changes` and `additions`.
        """
        examined, endpoint, account = self._examined, self._endpoint, self._account
        service, adapter, model = self._service, self._adapter, self._model
        prompt = prompt_of(
            service,
            examined.model,
            measured,
            self._session,
            adapter,
            drawn_by=self._session or self._request_id,
            is_cut=examined.is_cut,
        )
        call = Call(
            service,
            prompt,
            self._request_id,
            forwarded_headers(self._request.headers),
            body,
            b"/classify"
            if endpoint == "classify"
            else self._request.path,  # vLLM's engines have no /v1/classify
            account,
            estimate_of(
                Outputs(*examined.outputs),
                tokens_of(prompt, account.bytes_per_token),
                account.usual_output_tokens,
                service_prompt_tokens=service.lengths.tokens(prompt),
            ),
        )
        call.endpoint = endpoint
        call.client_model = examined.model
        call.is_charged = self._request.is_charged
        call.priority = self._priority
        call.is_stream = examined.stream
        call.shape = None if examined.shape is None else StreamShape(*examined.shape)
        if endpoint in ("responses", "responses/input_tokens"):
            call.internal_headers += _RESOLVED
            if self._response_id:
                call.name_response(self._response_id)
        call.hides_usage = self._hides_usage
        call.hides_progress = self._hides_progress
        call.stream_interval = examined.stream_interval
        if model != examined.model:
            call.renaming = Renaming(model, examined.model)
        if not adapter and (model != service.spec.engine_name or examined.model != model):
            call.asked_model = examined.model if service.takes_model_names else ""
            name = quote(examined.model, safe="/:").encode()
            call.internal_headers += b"%b: %b\r\n" % (_MODEL_NAME, name)
        if self._named.spec.canary is not None:
            call.canary_of = self._named
        return call


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
    return prompt_from(measured, number, side + (adapter or alias), is_cut=is_cut)
