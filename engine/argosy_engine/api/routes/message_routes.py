"""Routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import FastAPI, Request

from argosy_engine.api.answers import message_answer, message_stream_answer
from argosy_engine.api.anthropic.messages import count_tokens, create_message, stream_message
from argosy_engine.api.http.http_responses import WatchedResponse
from argosy_engine.api.http.request_body import read_body
from argosy_engine.api.request_headers import check_resume, request_id_of, resumption_of, serving_of
from argosy_engine.api.routes.request_context import context_of, report_skipped
from argosy_engine.api.served_engine import Engine
from argosy_protocol.anthropic import decode_count_tokens_request, decode_messages_request
from argosy_protocol.anthropic_chat import as_chat
from argosy_protocol.skipped_content import MESSAGES_KINDS, Skipped


def add_message_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`."""

    @app.post("/v1/messages")
    async def messages(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_messages_request(raw)
        skipped = Skipped(MESSAGES_KINDS)
        chat = as_chat(body, skipped)
        check_resume(request, chat)
        context = context_of(engine, request, chat)
        lines = report_skipped(engine, "messages", skipped)
        if body.stream:
            with_ids = resumption_of(request)["has_id_comments"]
            events = stream_message(
                context.serving, chat, body, context.response_id, len(raw), has_id_comments=with_ids
            )
            return message_stream_answer(engine, events, context.request_id, request.url.path, lines)
        answer = create_message(context.serving, chat, context.response_id, len(raw))
        return message_answer(engine, answer, context.request_id, request.url.path, lines)

    @app.post("/v1/messages/count_tokens")
    async def counted_tokens(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        skipped = Skipped(MESSAGES_KINDS)
        chat = as_chat(decode_count_tokens_request(raw), skipped)
        lines = report_skipped(engine, "messages", skipped)
        answer = count_tokens(serving_of(engine, request), chat, len(raw))
        return message_answer(engine, answer, request_id_of(request, None), request.url.path, lines)
