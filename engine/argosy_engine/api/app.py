"""The engine's FastAPI application: routes, and the engine's states from loading to drained.

The server listens from the first second: while the model loads, /health answers 200 (the process lives), /ready 503
with the phase, and requests 503 with a retry hint.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any
from urllib.parse import unquote

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from argosy_engine.api.admin import add_admin_routes
from argosy_engine.api.anthropic.messages import count_tokens, create_message, stream_message
from argosy_engine.api.http.error_response import error_body
from argosy_engine.api.http.http_responses import (
    WatchedResponse,
    event_stream,
    json_response,
    message_event_stream,
)
from argosy_engine.api.http.request_ids import is_request_id
from argosy_engine.api.observability.load_report import FORMAT_HEADER, LoadReport
from argosy_engine.api.observability.metrics import EngineMetrics
from argosy_engine.api.observability.stats_log import StatsLog
from argosy_engine.api.observability.telemetry import TelemetryHub
from argosy_engine.api.openai.chat import chat, chat_stream
from argosy_engine.api.openai.classification import classify
from argosy_engine.api.openai.completions import completion, completion_stream
from argosy_engine.api.openai.embeddings import embed
from argosy_engine.api.openai.error_fields import RequestBody, name_field
from argosy_engine.api.openai.openai_serving import OpenAIServing, to_api_error
from argosy_engine.api.openai.pooled_data import pool
from argosy_engine.api.openai.scoring import rerank, score
from argosy_engine.api.openai.tokenization import detokenize, tokenize
from argosy_engine.api.openapi_document import add_openapi_routes
from argosy_engine.api.responses.background_runs import BackgroundRuns
from argosy_engine.api.responses.response_routes import RequestContext, ResponseRoutes, add_response_routes
from argosy_engine.api.responses.response_store import InMemoryResponseStore
from argosy_engine.api.sagemaker import add_sagemaker_routes
from argosy_engine.api.server_args import ITERATION_TIMEOUT_S, ServerArgs
from argosy_engine.api.server_defaults import apply_flags, log_request
from argosy_engine.api.server_info import add_info_routes
from argosy_engine.errors import EngineError
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_protocol import __version__, headers
from argosy_protocol.anthropic import (
    decode_count_tokens_request,
    decode_messages_request,
    is_messages_path,
)
from argosy_protocol.anthropic_chat import as_chat
from argosy_protocol.anthropic_chat import name_field as name_messages_field
from argosy_protocol.embeddings import decode_embedding_request
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    TooManyRequests,
    Unavailable,
)
from argosy_protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    decode_request,
)
from argosy_protocol.pooling import PoolingFields, decode_classification_request, decode_pooling_request
from argosy_protocol.program.log_format import format_frames
from argosy_protocol.responses import ResponsesRequest
from argosy_protocol.scoring import decode_rerank_request, decode_score_request
from argosy_protocol.tokenization import decode_detokenize_request, decode_tokenize_request

logger = logging.getLogger("argosy.api")

_ASLEEP_RETRY_S = 10.0
"""Retry-After of a sleeping engine. When it wakes up is unknown; the router tries other replicas meanwhile."""

_DEFAULT_OPTIONS = ServerArgs()
_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before its response."""

MAX_TENANT_LENGTH = 64
"""Routers send 16 characters."""
_MAX_RANK_DIGITS = 6


class Engine:
    """The application's state. `llm` and what depends on it exist once the model is loaded."""

    def __init__(
        self,
        names: tuple[str, ...],
        iteration_timeout_s: float = ITERATION_TIMEOUT_S,
        *,
        takes_any_name: bool = False,
        options: ServerArgs = _DEFAULT_OPTIONS,
    ) -> None:
        self.names = names
        self.takes_any_name = takes_any_name
        self.options = options
        self.iteration_timeout_s = iteration_timeout_s
        self.phase = "starting"
        self.is_draining = False
        self.llm: AsyncLLM | None = None
        self._serving: OpenAIServing | None = None
        self._metrics: EngineMetrics | None = None
        self._load_report: LoadReport | None = None
        self._telemetry: TelemetryHub | None = None
        self._num_accepted = 0
        self._none_accepted = asyncio.Event()
        self._none_accepted.set()
        self.responses = BackgroundRuns(InMemoryResponseStore(), self.accepted, _translated)

    def attach(self, llm: AsyncLLM) -> None:
        self._serving = OpenAIServing(llm, self.names, takes_any_name=self.takes_any_name)
        self._metrics = EngineMetrics(llm.config)
        self._telemetry = TelemetryHub(llm, llm.config)
        self._load_report = LoadReport(llm.config.data_parallel_size)
        llm.observers.extend((self._metrics, self._telemetry, self._load_report))
        if not self.options.disable_log_stats:
            llm.observers.append(StatsLog(llm.config.data_parallel_size))
        self.llm = llm
        self.phase = "ready"

    @property
    def is_ready(self) -> bool:
        return self.llm is not None and not self.is_draining and not self.is_sleeping and self.is_healthy

    @property
    def is_sleeping(self) -> bool:
        return self.llm is not None and self.llm.is_sleeping

    @property
    def status(self) -> str:
        """Status in the body of /ready: loading, ready, sleeping or draining."""
        return "sleeping" if self.phase == "ready" and self.is_sleeping else self.phase

    @property
    def is_healthy(self) -> bool:
        """Whether the core lives and its loop runs; a core that is still loading counts as healthy."""
        llm = self.llm
        return llm is None or (not llm.is_dead and llm.heartbeat_age_s < self.iteration_timeout_s)

    @property
    def serving(self) -> OpenAIServing:
        """The endpoints' model. Raises Unavailable while it loads, and while the engine sleeps or drains."""
        if self._serving is None:
            raise Unavailable(f"the model is loading ({self.phase})", retry_after_s=1.0)
        if self.is_draining:
            raise Unavailable("this engine is shutting down", retry_after_s=1.0)
        if self.is_sleeping:
            raise Unavailable("this engine is asleep", retry_after_s=_ASLEEP_RETRY_S)
        return self._serving

    @property
    def metrics(self) -> bytes:
        if self._metrics is None or self.llm is None:
            return b""
        self._metrics.set_sleep_level(self.llm.sleep_level)
        return self._metrics.render()

    def load_headers(self, form: str | None) -> dict[str, str]:
        """Return the headers with the load, in the form that a request asks for."""
        return {} if self._load_report is None else self._load_report.headers(form)

    @property
    def telemetry(self) -> TelemetryHub:
        if self._telemetry is None:
            raise Unavailable(f"the model is loading ({self.phase})", retry_after_s=1.0)
        if not self._telemetry.has_room:
            raise TooManyRequests("too many telemetry readers", retry_after_s=5.0)
        return self._telemetry

    @property
    def num_live(self) -> int:
        """Choices that have not ended; requests, if there are more, whose choices may not have begun."""
        return max(self._num_accepted, self.llm.num_live if self.llm is not None else 0)

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """Let `drain` wait for a request that the core may not have yet: its prompts are rendered first, and a beam
        search pauses between two tokens."""
        self._num_accepted += 1
        self._none_accepted.clear()
        try:
            yield
        finally:
            self._num_accepted -= 1
            if not self._num_accepted:
                self._none_accepted.set()

    async def drain(self) -> None:
        """Reject new requests, and return when the accepted ones are done."""
        self.is_draining = True
        self.phase = "draining"
        if self._telemetry is not None:
            self._telemetry.drain()
        await asyncio.sleep(0)  # those that were not rejected are counted in this turn of the event loop
        await self._none_accepted.wait()
        if self.llm is not None:
            await self.llm.drain()

    async def close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
        await self.responses.close()
        if self._serving is not None:
            self._serving.close()
        if self.llm is not None:
            await self.llm.close()


def build_app(engine: Engine) -> FastAPI:
    """Build the application, without the layers around it (`http.auth_middleware`, `http.request_limits`)."""
    app = FastAPI(title="Argosy engine", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine = engine

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_request("chat/completions", raw)
        assert isinstance(body, ChatCompletionRequest)
        _check_resume(request, body)
        _choose_rank(request, body)
        apply_flags(engine.options, body)
        request_id, serving = _request_id(request, body.request_id), _serving(engine, request)
        response_id = _response_id(request, request_id)
        log_request(engine.options, body, response_id)
        if body.stream:
            chunks = chat_stream(serving, body, response_id, len(raw), **_resumption(request))
            return _stream(engine, chunks, request_id, body)
        return _answer(
            engine, chat(serving, body, response_id, len(raw)), request_id, body, _load_form(request)
        )

    @app.post("/v1/completions")
    async def completions(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_request("completions", raw)
        assert isinstance(body, CompletionRequest)
        _check_resume(request, body)
        _choose_rank(request, body)
        apply_flags(engine.options, body)
        request_id, serving = _request_id(request, body.request_id), _serving(engine, request)
        response_id = _response_id(request, request_id)
        log_request(engine.options, body, response_id)
        if body.stream:
            chunks = completion_stream(serving, body, response_id, len(raw), **_resumption(request))
            return _stream(engine, chunks, request_id, body)
        answer = completion(serving, body, response_id, len(raw))
        return _answer(engine, answer, request_id, body, _load_form(request))

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_embedding_request(raw)
        _choose_rank(request, body)
        request_id, serving = _request_id(request, body.request_id), _serving(engine, request)
        response_id = _response_id(request, request_id)
        log_request(engine.options, body, response_id)
        answer = embed(serving, body, response_id, len(raw))
        return _answer(engine, answer, request_id, body)

    @app.post("/classify")
    async def classifications(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_classification_request(raw)
        _choose_rank(request, body)
        request_id = _request_id(request, body.request_id)
        answer = classify(_serving(engine, request), body, _response_id(request, request_id), len(raw))
        return _answer(engine, answer, request_id, body)

    @app.post("/pooling")
    async def poolings(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_pooling_request(raw)
        _choose_rank(request, body)
        request_id = _request_id(request, body.request_id)
        answer = pool(_serving(engine, request), body, _response_id(request, request_id), len(raw))
        return _answer(engine, answer, request_id, body)

    @app.post("/score")
    @app.post("/v1/score")
    async def scores(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_score_request(raw)
        _choose_rank(request, body)
        request_id = _request_id(request, body.request_id)
        answer = score(_serving(engine, request), body, _response_id(request, request_id), len(raw))
        return _answer(engine, answer, request_id, body)

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def reranked(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_rerank_request(raw)
        _choose_rank(request, body)
        request_id = _request_id(request, body.request_id)
        answer = rerank(_serving(engine, request), body, _response_id(request, request_id), len(raw))
        return _answer(engine, answer, request_id, body)

    @app.post("/tokenize")
    async def tokenized(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_tokenize_request(raw)
        answer = tokenize(_serving(engine, request), body, len(raw))
        return _answer(engine, answer, _request_id(request, None), body)

    @app.post("/detokenize")
    async def detokenized(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_detokenize_request(raw)
        answer = detokenize(_serving(engine, request), body, len(raw))
        return _answer(engine, answer, _request_id(request, None), body)

    @app.post("/v1/messages")
    async def messages(request: Request) -> WatchedResponse:
        raw = await request.body()
        body = decode_messages_request(raw)
        chat = as_chat(body)
        _check_resume(request, chat)
        _choose_rank(request, chat)
        request_id, serving = _request_id(request, None), _serving(engine, request)
        response_id = _response_id(request, request_id)
        log_request(engine.options, body, response_id)
        if body.stream:
            with_ids = _resumption(request)["has_id_comments"]
            events = stream_message(serving, chat, body, response_id, len(raw), has_id_comments=with_ids)
            return message_event_stream(
                _counted(engine, events), _message_headers(request_id), _logged_of_messages, request.url.path
            )
        answer = create_message(serving, chat, response_id, len(raw))
        return _answer_message(engine, answer, request_id, request.url.path)

    @app.post("/v1/messages/count_tokens")
    async def counted_tokens(request: Request) -> WatchedResponse:
        raw = await request.body()
        answer = count_tokens(_serving(engine, request), as_chat(decode_count_tokens_request(raw)), len(raw))
        return _answer_message(engine, answer, _request_id(request, None), request.url.path)

    def response_context(
        request: Request, body: ResponsesRequest, chat: ChatCompletionRequest
    ) -> RequestContext:
        _choose_rank(request, chat)
        apply_flags(engine.options, chat)
        request_id, serving = _request_id(request, body.request_id), _serving(engine, request)
        log_request(engine.options, chat, request_id)
        return RequestContext(serving, request_id, _given_response_id(request))

    add_response_routes(app, ResponseRoutes(response_context, engine.accepted, _translated, engine.responses))

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(engine.serving.models())

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(engine.serving.model(name))

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.is_healthy else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return _json({"status": engine.status}, 200 if engine.is_ready else 503)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        return _json({"server_load": engine.llm.num_live if engine.llm else 0})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get(headers.TELEMETRY_PATH)
    async def telemetry() -> StreamingResponse:
        return StreamingResponse(engine.telemetry.stream(), media_type=headers.TELEMETRY_CONTENT_TYPE)

    async def pooled_inputs(request: Request) -> WatchedResponse:
        pooling = None if engine.llm is None else engine.llm.config.pooling
        is_classifier = pooling is not None and pooling.task == "classify"
        return await (classifications(request) if is_classifier else embeddings(request))

    add_sagemaker_routes(
        app,
        {
            "messages": chat_completions,
            "prompt": completions,
            "input": pooled_inputs,
            "query": reranked,
            **dict.fromkeys(("queries", "text_1", "data_1"), scores),
        },
        health,
    )
    add_admin_routes(app, lambda: _loaded(engine))
    add_info_routes(app, lambda: _loaded(engine), engine.options.enable_tokenizer_info_endpoint)
    if not engine.options.disable_fastapi_docs:
        add_openapi_routes(app)
    _handle_errors(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    """Send all errors in the shape of the API that the path belongs to."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        path, lines = request.url.path, error.headers()
        if is_messages_path(path):
            lines |= _message_headers(_request_id(request, None))
        return Response(error_body(error, path), error.http_status, lines, "application/json")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path[:128]
        known = {
            404: NotFound(f"no route {method} {path}"),
            405: MethodNotAllowed(f"{path} does not take {method}"),
        }
        return await api_error(request, known.get(error.status_code) or to_api_error(error))

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)  # the client has left

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Not logged here: Starlette raises it once more, and uvicorn logs it.
        return await api_error(request, to_api_error(error))


def _request_id(request: Request, in_body: str | None) -> str:
    for candidate in (request.headers.get(headers.REQUEST_ID), in_body):
        if candidate is not None and is_request_id(candidate):
            return candidate
    return f"{int(time.time()):x}{secrets.token_hex(12)}"


def _loaded(engine: Engine) -> AsyncLLM:
    """Return the model. Raises Unavailable while it loads or the engine drains; a sleeping engine is loaded."""
    if engine.llm is None:
        raise Unavailable(f"the model is loading ({engine.phase})", retry_after_s=1.0)
    if engine.is_draining:
        raise Unavailable("this engine is shutting down", retry_after_s=1.0)
    return engine.llm


def _serving(engine: Engine, request: Request) -> OpenAIServing:
    """Return what serves a request: under the model name and for the tenant that a router gave, if one did.

    A tenant that is longer than a router's is ignored, because the core keeps tenants.
    """
    name, tenant = request.headers.get(headers.MODEL_NAME), request.headers.get(headers.TENANT, "")
    if len(tenant) > MAX_TENANT_LENGTH:
        tenant = ""
    if name is None and not tenant:
        return engine.serving
    return engine.serving.answering_as(None if name is None else unquote(name), tenant)


def _response_id(request: Request, request_id: str) -> str:
    """Return the id that response ids derive from: the same for all attempts of a router at one request."""
    return _given_response_id(request) or request_id


def _given_response_id(request: Request) -> str | None:
    given = request.headers.get(headers.RESPONSE_ID)
    return given if given is not None and is_request_id(given) else None


def _is_resumable(request: Request) -> bool:
    """Whether the request comes from a router that can let another engine continue the stream."""
    return headers.RESUME in request.headers


def _resumption(request: Request) -> dict[str, bool]:
    """Return how a stream carries token ids for a router."""
    given = request.headers.get(headers.RESUME)
    return {"resumable": given is not None, "has_id_comments": given == headers.IN_COMMENTS}


def _check_resume(request: Request, body: GenerationRequest) -> None:
    """Reject `resume` from clients: it is for routers, which remove their internal headers from clients' requests."""
    if body.resume is not None and not (body.stream and _is_resumable(request)):
        raise BadRequest("resume is an internal field of streams", param="resume")


def _choose_rank(request: Request, body: GenerationRequest | PoolingFields) -> None:
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


def _load_form(request: Request) -> str | None:
    """Return the form in which a request asks for the load."""
    return request.headers.get(FORMAT_HEADER)


def _answer(
    engine: Engine,
    produce: Awaitable[msgspec.Struct],
    request_id: str,
    body: RequestBody,
    load_form: str | None = None,
) -> WatchedResponse:
    async def translated() -> msgspec.Struct:
        try:
            with engine.accepted():
                return await produce
        except Exception as error:
            raise _logged(error, body) from error

    lines = {headers.REQUEST_ID: request_id}
    return json_response(translated(), lines, last_headers=lambda: engine.load_headers(load_form))


def _answer_message(
    engine: Engine, produce: Awaitable[msgspec.Struct], request_id: str, path: str
) -> WatchedResponse:
    async def translated() -> msgspec.Struct:
        with engine.accepted():
            try:
                return await produce
            except Exception as error:
                raise _logged_of_messages(error) from error

    return json_response(translated(), _message_headers(request_id), path)


def _message_headers(request_id: str) -> dict[str, str]:
    """Return the headers of an answer of Anthropic's API, whose clients read the id as `request-id`."""
    return {headers.REQUEST_ID: request_id, headers.ANTHROPIC_REQUEST_ID: request_id}


def _stream(
    engine: Engine, events: AsyncGenerator[Any, None], request_id: str, body: RequestBody
) -> WatchedResponse:
    def logged(error: Exception) -> ApiError:
        return _logged(error, body)

    return event_stream(_counted(engine, events), {headers.REQUEST_ID: request_id}, logged)


async def _counted(engine: Engine, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Count a stream's request as accepted until its first event; later the core has it."""
    async with aclosing(events):
        with engine.accepted():
            first = await anext(events, None)
        if first is not None:
            yield first
        async for event in events:
            yield event


def _logged(error: Exception, body: RequestBody) -> ApiError:
    """Translate an error with the request's own field names; log an unexpected one.

    The log has its type and stack, but not its message, which may quote a prompt.
    """
    return name_field(_translated(error), body)


def _logged_of_messages(error: Exception) -> ApiError:
    """As `_logged`, of a Messages request."""
    return name_messages_field(_translated(error))


def _translated(error: Exception) -> ApiError:
    if not isinstance(error, ApiError | EngineError):
        logger.error(
            "a request failed with %s\n%s", type(error).__qualname__, format_frames(error.__traceback__)
        )
    return to_api_error(error)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
