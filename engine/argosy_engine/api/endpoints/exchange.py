"""An HTTP exchange as all endpoints have it: what headers and flags say of a request, its answer, and its errors.

An accepted request is counted until the core has it. An error reaches a client in the shape of the API that it asked,
about a field by the client's own name of it: the engine has one name for what clients can say in several ways, such as
a prompt, which arrives as `messages` or `input`. An unexpected error is logged with its type and stack, without its
message, which may quote a prompt.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec
from fastapi import Request
from starlette.responses import Response

from argosy_engine.api.http.asgi_layers import is_request_id
from argosy_engine.api.http.http_responses import (
    MESSAGES_STREAM,
    OPENAI_STREAM,
    WatchedResponse,
    event_stream,
    json_response,
)
from argosy_engine.api.observability.telemetry import FORMAT_HEADER
from argosy_engine.api.served_engine import Engine, OpenAIServing
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.errors import (
    EngineBusy,
    EngineDead,
    EngineError,
    InvalidRequest,
    PromptTooLong,
    RequestFailed,
    ResourceBusy,
)
from argosy_engine.frontend.input_processor import format_field
from argosy_engine.frontend.observer import SkippingApi, current_record
from argosy_engine.structured.structured_outputs_params import KINDS
from argosy_protocol import headers
from argosy_protocol.anthropic import name_field as name_messages_field
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    ContextLengthExceeded,
    InternalError,
    ResourceUnavailable,
    Unavailable,
)
from argosy_protocol.headers import DROPPED_TOOLS, bearer_token
from argosy_protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    StreamOptions,
    TextTokenizeRequest,
)
from argosy_protocol.pooling import PoolingFields, PromptFields, ScoringFields
from argosy_protocol.program.process import format_frames
from argosy_protocol.skipped_content import Skipped, num_noted_images

logger = logging.getLogger("argosy.api")

_requests_logger = logging.getLogger("argosy.requests")

MAX_TENANT_LENGTH = 64
"""Routers send 16 characters."""

_MAX_RANK_DIGITS = 6


Endpoint = Callable[[Request], Awaitable[Response]]


_Answer = TypeVar("_Answer", bound=msgspec.Struct)

RequestBody = GenerationRequest | PoolingFields | TextTokenizeRequest | DetokenizeRequest


class RequestContext(NamedTuple):
    serving: OpenAIServing
    request_id: str
    given_response_id: str | None
    """The id that a router has chosen; None without one."""

    @property
    def response_id(self) -> str:
        """The id that response ids derive from: the same for all attempts of a router at one request."""
        return self.given_response_id or self.request_id


def context_of(engine: Engine, request: Request, body: GenerationRequest | PoolingFields) -> RequestContext:
    """Return the context of a decoded request, after setting the rank in `body` that a header names.

    Raises:
        BadRequest: the rank is no number, or not that of the body.
        Unavailable: the model loads, or the engine sleeps or drains.
    """
    choose_rank(request, body)
    context = RequestContext(
        serving_of(engine, request), request_id_of(request, body.request_id), given_response_id(request)
    )
    record = current_record.get()
    if record is not None:
        record.request_id = context.response_id
        record.model = body.model or context.serving.check_model("")
        record.tenant = context.serving.tenant
    log_request(engine.options, body, context.response_id)
    return context


def add_unseen_images(engine: Engine, skipped: Skipped, chat: ChatCompletionRequest, kind: str) -> None:
    """Count the images of another API's request for which the model gets notes, if it sees none."""
    count = num_noted_images(chat.messages)
    if count and not engine.sees_images:
        skipped.add(kind, count)


def report_skipped(engine: Engine, api: SkippingApi, skipped: Skipped) -> dict[str, str]:
    """Count what the chat of a request leaves out of it, and return the headers that tell its client."""
    if not (skipped.content or skipped.tools):
        return {}
    for observer in engine.serving.llm.observers:
        observer.on_skipped(api, skipped)
    return {DROPPED_TOOLS: skipped.dropped_tools} if skipped.tools else {}


def request_id_of(request: Request, in_body: str | None) -> str:
    """Return the id of the header, else of the body, else a new one."""
    for candidate in (request.headers.get(headers.REQUEST_ID), in_body):
        if candidate is not None and is_request_id(candidate):
            return candidate
    return f"{int(time.time()):x}{secrets.token_hex(12)}"


def serving_of(engine: Engine, request: Request) -> OpenAIServing:
    """Return what serves a request: under the model name and for the tenant that a router gave, if one did.

    A tenant that is longer than a router's is ignored, because the core keeps tenants.
    """
    name, tenant = request.headers.get(headers.MODEL_NAME), request.headers.get(headers.TENANT, "")
    if len(tenant) > MAX_TENANT_LENGTH:
        tenant = ""
    if name is None and not tenant:
        return engine.serving
    return engine.serving.answering_as(None if name is None else unquote(name), tenant)


def client_key(request: Request) -> str:
    """Return a client's key, whichever of the two headers has it; empty if it sent none."""
    authorization = request.headers.get("authorization")
    if authorization is None:
        return request.headers.get("x-api-key", "").strip()
    token = bearer_token(authorization)
    return authorization if token is None else token


def given_response_id(request: Request) -> str | None:
    """Return the id that a router has chosen for the answer; None without one."""
    given = request.headers.get(headers.RESPONSE_ID)
    return given if given is not None and is_request_id(given) else None


def resumption_of(request: Request) -> dict[str, bool]:
    """Return how a stream carries token ids for a router."""
    given = request.headers.get(headers.RESUME)
    return {"resumable": given is not None, "has_id_comments": given == headers.IN_COMMENTS}


def check_resume(request: Request, body: GenerationRequest) -> None:
    """Reject `resume` from clients: it is for routers, which remove their internal headers from clients' requests."""
    if body.resume is not None and not (body.stream and headers.RESUME in request.headers):
        raise BadRequest("resume is internal to engines and refused from clients", param="resume")


def choose_rank(request: Request, body: GenerationRequest | PoolingFields) -> None:
    """Set the body's `data_parallel_rank` to that of the header, if there is one."""
    given = request.headers.get(headers.DATA_PARALLEL_RANK)
    if given is None:
        return
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_RANK_DIGITS):
        raise BadRequest(f"{headers.DATA_PARALLEL_RANK} must be a number from 0", param="data_parallel_rank")
    if body.data_parallel_rank not in (None, int(given)):
        raise BadRequest(
            f"data_parallel_rank differs from the header {headers.DATA_PARALLEL_RANK}",
            param="data_parallel_rank",
        )
    body.data_parallel_rank = int(given)


def apply_flags(options: ServerArgs, request: GenerationRequest) -> None:
    """Set the fields of a request that flags determine."""
    if options.enable_force_include_usage and request.stream:
        request.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    if options.stream_interval > 1:
        request.stream_interval = max(request.stream_interval or 1, options.stream_interval)
    if request.return_tokens_as_token_ids is None and options.return_tokens_as_token_ids:
        request.return_tokens_as_token_ids = True


def log_request(options: ServerArgs, request: msgspec.Struct, request_id: str) -> None:
    """Log a request's id and its numbers, if `--enable-log-requests` is given. Texts may be prompts and stay out."""
    if options.enable_log_requests:
        _requests_logger.info("Received request %s: %s", request_id, _numbers(request))


def _numbers(request: msgspec.Struct) -> str:
    """Return the fields that are numbers or truth values and not the default, as `name=value`."""
    shown = []
    for field in msgspec.structs.fields(request):
        value = getattr(request, field.name)
        if isinstance(value, int | float) and value != field.default:
            shown.append(f"{field.name}={value}")
    return " ".join(shown)


def translated_error(error: Exception) -> ApiError:
    """Return `error` as the API shows it; log an unexpected one."""
    if not isinstance(error, ApiError | EngineError):
        logger.error(
            "a request failed with %s\n%s", type(error).__qualname__, format_frames(error.__traceback__)
        )
    return to_api_error(error)


def to_api_error(error: Exception) -> ApiError:
    """Translate an engine error for clients; an unexpected one becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ContextLengthExceeded(str(error), param=error.param)
        case InvalidRequest():
            return BadRequest(str(error), param=error.param)
        case ResourceBusy():
            return ResourceUnavailable(f"{error}; retry later", retry_after_s=error.retry_after_s)
        case EngineBusy():
            return Unavailable(f"{error}; retry later", retry_after_s=error.retry_after_s)
        case RequestFailed():
            return InternalError(str(error))
        case RecursionError():
            return BadRequest("the request is nested too deeply")
        case EngineDead():
            return Unavailable("the engine is not running; retry", retry_after_s=1.0)
        case _:
            return InternalError("internal error")


def name_field(error: ApiError, request: RequestBody) -> ApiError:
    """Return the error with the request's own name of the field, in `param` and at the start of the message."""
    given = error.param
    if given is None or (asked := _asked(given, request)) == given:
        return error
    error.param = asked
    if error.message.startswith(f"{given} "):
        error.message = asked + error.message.removeprefix(given)
    return error


def _asked(field: str, request: RequestBody) -> str:
    """Return the field of `request` that the engine calls `field`."""
    match field:
        case "prompt":
            return _prompt(request)
        case "extra_args":
            return "vllm_xargs"
    if isinstance(request, PoolingFields):
        return _prompt(request) if field == "n" else field
    if not isinstance(request, GenerationRequest):
        return field
    match field:
        case "n":  # the limit on choices; with one choice per prompt, there are too many prompts
            return field if (request.n or 1) > 1 else _prompt(request)
        case "beam_width":
            return _beam_width(request)
        case "max_tokens" if isinstance(request, ChatCompletionRequest):
            return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        case "grammar":
            return _shape(request)
    return field


def _prompt(request: RequestBody) -> str:
    if isinstance(request, ChatCompletionRequest):
        return "messages"
    if isinstance(request, PromptFields):
        return "messages" if request.messages is not None else "input"
    if isinstance(request, ScoringFields):
        return request.names()[1]
    return "prompt"


def _beam_width(request: GenerationRequest) -> str:
    if isinstance(request, CompletionRequest) and request.best_of is not None:
        return "best_of"
    return "n"


def _shape(request: GenerationRequest) -> str:
    """Return the field that requests a structured output."""
    asked = request.structured_outputs
    if asked is None:
        return "tools" if request.response_format is None else format_field(request)
    kinds = [kind for kind in KINDS if asked.get(kind)] if isinstance(asked, dict) else []
    return f"structured_outputs.{kinds[0]}" if len(kinds) == 1 else "structured_outputs"


async def accepted_answer(
    engine: Engine, produce: Awaitable[_Answer], named: Callable[[ApiError], ApiError]
) -> _Answer:
    """Return what `produce` returns, while its request counts as accepted, or raise its error for clients.

    Args:
        named: gives an error the request's own name of the field that it is about.
    """
    try:
        with engine.accepted():
            return await produce
    except Exception as error:
        raise named(translated_error(error)) from error


def json_answer(
    engine: Engine,
    produce: Awaitable[msgspec.Struct],
    request_id: str,
    body: RequestBody,
    request: Request | None = None,
) -> WatchedResponse:
    """Answer with what `produce` returns, and with the load in a header if `request` asks for it."""
    load_form = None if request is None else request.headers.get(FORMAT_HEADER)
    answer = accepted_answer(engine, produce, lambda error: name_field(error, body))
    lines = {headers.REQUEST_ID: request_id}
    return json_response(answer, lines, last_headers=lambda: engine.load_headers(load_form))


def stream_answer(
    engine: Engine, events: AsyncGenerator[bytes, None], request_id: str, body: RequestBody
) -> WatchedResponse:
    """Answer with the events, pieces of one or more chunks of OpenAI's API."""
    return event_stream(
        events,
        {headers.REQUEST_ID: request_id},
        lambda error: name_field(translated_error(error), body),
        OPENAI_STREAM,
        accepted=engine.accepted,
    )


def message_headers(request_id: str) -> dict[str, str]:
    """Return the headers of an answer of Anthropic's API, whose clients read the id as `request-id`."""
    return {headers.REQUEST_ID: request_id, headers.ANTHROPIC_REQUEST_ID: request_id}


def message_answer(
    engine: Engine, produce: Awaitable[msgspec.Struct], request_id: str, path: str, lines: dict[str, str]
) -> WatchedResponse:
    """As `json_answer`, of Anthropic's API, with further headers."""
    answer = accepted_answer(engine, produce, name_messages_field)
    return json_response(answer, {**message_headers(request_id), **lines}, path)


def message_stream_answer(
    engine: Engine, events: AsyncGenerator[bytes, None], request_id: str, path: str, lines: dict[str, str]
) -> WatchedResponse:
    """As `stream_answer`, of Anthropic's API, with further headers."""
    return event_stream(
        events,
        {**message_headers(request_id), **lines},
        lambda error: name_messages_field(translated_error(error)),
        MESSAGES_STREAM,
        path=path,
        accepted=engine.accepted,
    )
