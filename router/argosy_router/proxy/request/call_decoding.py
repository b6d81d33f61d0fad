"""Decoding of a client's request into a call.

Owns: which requests are refused for their content, and which fields of the body the router rewrites.
Must not know: connections, attempts, how a replica is chosen.
"""

from __future__ import annotations

import re
from typing import Final, Literal
from urllib.parse import quote

import msgspec
from xxhash import xxh3_64_intdigest

from argosy_protocol import errors
from argosy_protocol.allowed_tools import ALLOWED_TOOLS
from argosy_protocol.anthropic import decode_count_tokens_request, decode_messages_request
from argosy_protocol.anthropic_chat import as_chat
from argosy_protocol.chat_batch import decode_batch_request
from argosy_protocol.embeddings import decode_embedding_request
from argosy_protocol.errors import BadRequest, MethodNotAllowed, NotFound
from argosy_protocol.headers import MODEL_NAME, RESOLVED
from argosy_protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    Endpoint,
    InternalFields,
    StreamOptions,
    decode_request,
)
from argosy_protocol.pooling import decode_classification_request, decode_pooling_request
from argosy_protocol.prompt_segments import prompt_segments
from argosy_protocol.responses import ResponsesRequest, decode_responses_request
from argosy_protocol.responses_chat import responses_as_chat
from argosy_protocol.scoring import decode_rerank_request, decode_score_request
from argosy_protocol.tokenization import only_model
from argosy_router.auth.accounts import Account
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.http.messages import Request
from argosy_router.prompts.prompt_hash import Prompt
from argosy_router.prompts.prompt_length_model import tokens_of
from argosy_router.proxy.request.body_rewrite import with_another, with_fields, with_usage_requested
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.request.header_policy import forwarded as forwarded_headers
from argosy_router.proxy.request.model_names import (
    Renaming,
    engine_name,
    find_service,
    may_use,
    unknown_model,
)
from argosy_router.proxy.request.request_id import request_id_in_body
from argosy_router.proxy.request.stream_shape import resumable_shape
from argosy_router.proxy.request.token_estimate import estimate_of

SESSION_HEADER = b"x-session-id"
"""The header llm-d's and Dynamo's clients use too."""

RoutedEndpoint = (
    Endpoint
    | Literal["chat/completions/batch", "embeddings", "classify", "pooling", "score", "rerank"]
    | Literal["messages", "messages/count_tokens", "responses", "responses/input_tokens"]
    | Literal["tokenize", "detokenize"]
)

_MODEL_NAME: Final = MODEL_NAME.encode()
_INTERNAL: Final = frozenset((*InternalFields.__struct_fields__, "data_parallel_rank"))
_ALLOWED_TOOLS: Final = ALLOWED_TOOLS.encode()
_REPORTING: Final = frozenset(("messages", "responses"))
"""Endpoints whose streams report their usage in any case."""
_RESOLVED: Final = b"%b: 1\r\n" % RESOLVED.encode()
_JSON: Final = b"application/json"
_WITHOUT_STORAGE: Final = {
    "background": "wait for the answer, or stream it",
    "previous_response_id": "send the whole conversation as input",
}
"""Fields of responses that a router without a storage refuses -> what to do instead."""


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
    try:
        decoded = _decode(endpoint, body, has_state=bool(response_id))
    except BadRequest as error:
        named = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
        if named == "resume" or named in _INTERNAL:
            raise _internal(named) from None
        raise
    request_id = request_id_in_body(decoded.request_id, request.header(b"x-request-id"), request_id)
    if decoded.resume is not None:
        raise _internal("resume")
    if decoded.data_parallel_rank is not None:  # the router's balance rests on the engine's choice
        raise _internal("data_parallel_rank")
    if decoded.vllm_xargs and not _INTERNAL.isdisjoint(decoded.vllm_xargs):
        raise BadRequest("vllm_xargs has a field that is internal to engines", param="vllm_xargs")
    service, adapter = find_service(fleet, decoded, account)
    if not may_use(account, decoded.model, service, adapter):
        raise unknown_model(fleet, decoded.model, account)
    session = session_of(decoded, request.header(SESSION_HEADER))
    named = service
    if not adapter:
        service = fleet.answering(named, session or request_id)
    priority = account.priority(decoded.priority)
    changes: dict[str, str | int | StreamOptions | msgspec.Raw] = {}
    if (
        _ALLOWED_TOOLS in body
        and isinstance(decoded, ChatCompletionRequest)
        and decoded.tools
        and decoded.tool_choice in ("auto", "required")
    ):  # vLLM does not know allowed_tools
        changes["tool_choice"] = decoded.tool_choice
        changes["tools"] = msgspec.Raw(msgspec.json.encode(decoded.tools))
    if endpoint == "responses" and not response_id:
        changes["store"] = False
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
    is_message = endpoint == "messages"
    reports_usage = endpoint in _REPORTING or (options is not None and options.include_usage)
    hides_usage = decoded.stream and not reports_usage
    if hides_usage and options is not None:
        changes["stream_options"] = msgspec.structs.replace(
            options, include_usage=True, continuous_usage_stats=False
        )
    if changes:
        body = with_fields(body, changes)
    if asked is None and salt is not None:
        body = with_another(body, b'"cache_salt":"%b"' % salt.encode())  # hexadecimal
    if hides_usage and options is None:
        body = with_usage_requested(body)
    prompt = prompt_of(service, decoded, session, adapter, drawn_by=session or request_id)
    call = Call(
        service,
        prompt,
        request_id,
        forwarded_headers(request.headers),
        body,
        b"/classify" if endpoint == "classify" else request.path,  # vLLM's engines have no /v1/classify
        account,
        estimate_of(
            decoded,
            tokens_of(prompt, account.bytes_per_token),
            account.usual_output_tokens,
            service_prompt_tokens=service.lengths.tokens(prompt),
        ),
    )
    call.endpoint = endpoint
    call.priority = priority
    call.is_stream = decoded.stream
    if endpoint in ("responses", "responses/input_tokens"):
        call.internal_headers += _RESOLVED
        if response_id:
            call.name_response(response_id)
    else:
        call.shape = resumable_shape(decoded, is_message=is_message)
    call.hides_usage = hides_usage
    if model != decoded.model:
        call.renaming = Renaming(model, decoded.model)
    if not adapter and (model != service.spec.engine_name or decoded.model != model):
        call.asked_model = decoded.model if service.takes_model_names else ""
        call.internal_headers += b"%b: %b\r\n" % (_MODEL_NAME, quote(decoded.model, safe="/:").encode())
    if named.spec.canary is not None:
        call.canary_of = named
    return call


def _internal(field: str) -> BadRequest:
    return BadRequest(f"{field} is internal to engines and refused from clients", param=field)


def _decode(
    endpoint: RoutedEndpoint, body: bytes, *, has_state: bool
) -> ChatCompletionRequest | CompletionRequest:
    if endpoint == "embeddings":
        return decode_embedding_request(body).as_generation()
    if endpoint == "classify":
        return decode_classification_request(body).as_generation()
    if endpoint == "pooling":
        return decode_pooling_request(body).as_generation()
    if endpoint == "score":
        return decode_score_request(body).as_completion()
    if endpoint == "rerank":
        return decode_rerank_request(body).as_completion()
    if endpoint == "chat/completions/batch":
        return decode_batch_request(body)
    if endpoint in ("chat/completions", "completions"):
        return decode_request(endpoint, body)
    if endpoint == "messages":
        return as_chat(decode_messages_request(body))
    if endpoint == "responses":
        asked = decode_responses_request(body)
        return responses_as_chat(asked if has_state else _stateless(asked))
    if endpoint == "responses/input_tokens":
        asked = decode_responses_request(body)
        if not has_state:
            _stateless(asked)
        return ChatCompletionRequest(
            messages=[], model=asked.model, max_tokens=0, cache_salt=asked.cache_salt, priority=asked.priority
        )
    if endpoint == "messages/count_tokens":
        model = decode_count_tokens_request(body).model
        return ChatCompletionRequest(messages=[], model=model, max_tokens=0)  # nothing is computed or cached
    return only_model(body)


def _stateless(request: ResponsesRequest) -> ResponsesRequest:
    """Refuse what needs stored responses."""
    for field, remedy in _WITHOUT_STORAGE.items():
        if getattr(request, field):
            raise BadRequest(
                f"{field} needs stored responses, which a router has with --storage, but not for requests of batches; "
                f"{remedy}",
                param=field,
            )
    return request


def session_of(decoded: ChatCompletionRequest | CompletionRequest, header: bytes | None) -> bytes:
    """Return the session that a client declares, empty for none; `header` is the value of `SESSION_HEADER`."""
    return header or (decoded.prompt_cache_key or decoded.session_id or "").encode("utf-8", "surrogatepass")


def prompt_of(
    service: Service,
    decoded: ChatCompletionRequest | CompletionRequest,
    session: bytes,
    adapter: str = "",
    drawn_by: bytes = b"",
) -> Prompt:
    """Return what routing needs to know of a request's prompt.

    Args:
        drawn_by: what the side of a canary rollout is drawn by; empty to draw none.
    """
    number = xxh3_64_intdigest(session) if session else 0
    alias = decoded.model if decoded.model in service.candidates.partial_aliases else ""
    side = service.side(drawn_by) if drawn_by else ""
    return service.hasher.prompt(decoded, prompt_segments(decoded), number, adapter, alias, side)
