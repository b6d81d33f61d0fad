"""Routes of OpenAI's endpoints for text, chats, completions and models, and of vLLM's for tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from argosy_engine.api.answers import json_answer, stream_answer
from argosy_engine.api.http.direct_body import direct_body
from argosy_engine.api.http.http_responses import WatchedResponse
from argosy_engine.api.http.request_body import read_body
from argosy_engine.api.openai.chat import chat, chat_stream
from argosy_engine.api.openai.chat_batch_answer import chat_batch
from argosy_engine.api.openai.completions import completion, completion_stream
from argosy_engine.api.openai.tokenization import detokenize, tokenize
from argosy_engine.api.request_headers import (
    check_resume,
    load_form_of,
    request_id_of,
    resumption_of,
    serving_of,
)
from argosy_engine.api.routes.request_context import context_of, report_skipped
from argosy_engine.api.routes.sagemaker_routes import Endpoint
from argosy_engine.api.served_engine import Engine
from argosy_engine.api.server_defaults import apply_flags
from argosy_protocol.chat_batch import decode_batch_request
from argosy_protocol.chat_history import skipped_parts
from argosy_protocol.model_lists import ANTHROPIC_HEADER, CODEX_QUERY, encoded_model, encoded_models
from argosy_protocol.openai import ChatCompletionRequest, CompletionRequest, decode_request
from argosy_protocol.tokenization import decode_detokenize_request, decode_tokenize_request


def add_openai_routes(app: FastAPI, engine: Engine) -> dict[str, Endpoint]:
    """Add the routes to `app`; return endpoints by the field that only their requests have."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_request("chat/completions", raw)
        assert isinstance(body, ChatCompletionRequest)
        check_resume(request, body)
        apply_flags(engine.options, body)
        context = context_of(engine, request, body)
        report_skipped(engine, "chat_completions", skipped_parts(body.messages))
        if body.stream:
            chunks = chat_stream(
                context.serving,
                body,
                context.response_id,
                len(raw),
                direct=direct_body(request.scope),
                **resumption_of(request),
            )
            return stream_answer(engine, chunks, context.request_id, body)
        answer = chat(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body, load_form_of(request))

    @app.post("/v1/chat/completions/batch")
    async def chat_completions_batch(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_batch_request(raw)
        apply_flags(engine.options, body)
        context = context_of(engine, request, body)
        answer = chat_batch(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body)

    @app.post("/v1/completions")
    async def completions(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_request("completions", raw)
        assert isinstance(body, CompletionRequest)
        check_resume(request, body)
        apply_flags(engine.options, body)
        context = context_of(engine, request, body)
        if body.stream:
            chunks = completion_stream(
                context.serving,
                body,
                context.response_id,
                len(raw),
                direct=direct_body(request.scope),
                **resumption_of(request),
            )
            return stream_answer(engine, chunks, context.request_id, body)
        answer = completion(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body, load_form_of(request))

    @app.post("/tokenize")
    async def tokenized(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_tokenize_request(raw)
        answer = tokenize(serving_of(engine, request), body, len(raw))
        return json_answer(engine, answer, request_id_of(request, None), body)

    @app.post("/detokenize")
    async def detokenized(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_detokenize_request(raw)
        answer = detokenize(serving_of(engine, request), body, len(raw))
        return json_answer(engine, answer, request_id_of(request, None), body)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return _json(
            encoded_models(
                engine.serving.models().data,
                is_anthropic=ANTHROPIC_HEADER in request.headers,
                is_codex=CODEX_QUERY in request.query_params,
            )
        )

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        card = engine.serving.model(name)
        return _json(encoded_model(card, is_anthropic=ANTHROPIC_HEADER in request.headers))

    return {"messages": chat_completions, "prompt": completions}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
