"""Routes of /v1/responses: create, retrieve, delete, cancel, and list the input items.

Owns: which stored responses a request needs and leaves behind, and whose they are.
Must not know: how a response is generated.
Invariant: a response's id cannot be guessed, and only its owner finds it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from argosy_engine.api.error_translation import translated_error
from argosy_engine.api.http.http_responses import json_response, response_event_stream
from argosy_engine.api.http.request_body import read_body
from argosy_engine.api.openai.prompt_token_count import prompt_token_count
from argosy_engine.api.request_headers import client_key, request_id_of, serving_of
from argosy_engine.api.responses.response_job import ResponseJob
from argosy_engine.api.responses.response_store import ResponseStore
from argosy_engine.api.routes.request_context import context_of, report_skipped
from argosy_engine.api.served_engine import Engine
from argosy_engine.api.server_defaults import apply_flags
from argosy_protocol import headers
from argosy_protocol.errors import ApiError, BadRequest
from argosy_protocol.response_history import (
    DEFAULT_PAGE,
    MAX_PAGE,
    StoredResponse,
    identified_items,
    page_of_items,
    referenced_responses,
    resolved_items,
    response_not_found,
)
from argosy_protocol.response_object import (
    ID_PREFIX,
    DeletedResponse,
    InputTokenCount,
    ResponseObject,
    compaction_not_supported,
)
from argosy_protocol.responses import ResponseItem, ResponsesRequest, decode_responses_request
from argosy_protocol.responses_chat import input_items, name_responses_field, translated_response

_ID_BYTES = 24
_MAX_NUMBER = 1 << 40
_TRUE = frozenset(("true", "True", "1"))
_FALSE = frozenset(("false", "False", "0", ""))


def add_response_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`."""

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        raw = await read_body(request)
        body = decode_responses_request(raw)
        return await _create(engine, request, body, len(raw))

    @app.post("/v1/responses/input_tokens")
    async def counted_input_tokens(request: Request) -> Response:
        raw = await read_body(request)
        body = decode_responses_request(raw)
        return await _count(engine, request, body, len(raw))

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compacted_response() -> Response:
        raise compaction_not_supported()

    @app.get("/v1/responses/{name}")
    async def response(request: Request, name: str) -> Response:
        owner, query = owner_of(request), request.query_params
        record = await _stored(engine, owner, name)
        if _truth(query.get("stream"), "stream"):
            after = _number(query.get("starting_after"), "starting_after", -1, _MAX_NUMBER)
            events = engine.responses.events(owner, name, after)
            return response_event_stream(events, {}, translated_error)
        return Response(bytes(record.response), media_type="application/json")

    @app.delete("/v1/responses/{name}")
    async def deleted_response(request: Request, name: str) -> Response:
        owner = owner_of(request)
        await _stored(engine, owner, name)
        await engine.responses.cancel(owner, name)
        engine.responses.forget(owner, name)
        await engine.responses.store.delete(owner, name)
        return _json(DeletedResponse(id=name))

    @app.post("/v1/responses/{name}/cancel")
    async def cancelled_response(request: Request, name: str) -> Response:
        owner = owner_of(request)
        record = await _stored(engine, owner, name)
        if not record.state().background:
            raise BadRequest("Cannot cancel a synchronous response.", param="response_id")
        await engine.responses.cancel(owner, name)
        record = await _stored(engine, owner, name)
        return Response(bytes(record.response), media_type="application/json")

    @app.get("/v1/responses/{name}/input_items")
    async def listed_items(request: Request, name: str) -> Response:
        query = request.query_params
        limit = _number(query.get("limit"), "limit", DEFAULT_PAGE, MAX_PAGE, minimum=1)
        order = _order(query.get("order", "desc"))
        record = await _stored(engine, owner_of(request), name)
        return _json(page_of_items(record, after=query.get("after"), limit=limit, order=order))


def owner_of(request: Request) -> str:
    """Return whose responses a request may read: its tenant's, if a router names one, else its key's."""
    tenant = request.headers.get(headers.TENANT)
    if tenant:
        return f"tenant {tenant}"
    key = client_key(request)
    return f"key {hashlib.sha256(key.encode()).hexdigest()}" if key else ""


async def _create(engine: Engine, request: Request, body: ResponsesRequest, size: int) -> Response:
    owner = owner_of(request)
    is_resolved = headers.RESOLVED in request.headers
    conversation = input_items(body)
    if not is_resolved:
        conversation, num_bytes = await _conversation(engine.responses.store, owner, body)
        size += num_bytes
    translation = translated_response(body, conversation)
    chat = translation.chat
    apply_flags(engine.options, chat)
    context = context_of(engine, request, chat)
    given_id = context.given_response_id if is_resolved else None
    response_id = ID_PREFIX + (given_id or secrets.token_hex(_ID_BYTES))
    is_stored = body.store and not is_resolved
    items = identified_items(conversation, response_id) if is_stored else []
    engine.responses.store.check(sum(len(bytes(item)) for item in items))

    def translated(error: Exception) -> ApiError:
        return name_responses_field(translated_error(error), body, translation.tools)

    async def prepared() -> ResponseJob:
        return await ResponseJob.prepare(context.serving, body, translation, response_id, size, items)

    async def answer() -> ResponseObject:
        try:
            with engine.accepted():
                job = await prepared()
                await job.complete()
                if is_stored:
                    await engine.responses.keep(owner, job)
                return job.response
        except Exception as error:
            raise translated(error) from error

    async def events() -> AsyncGenerator[bytes, None]:
        with engine.accepted():
            job = await prepared()
            async with aclosing(job.stream(translated)) as stream:
                async for added in stream:
                    if is_stored and job.events.is_over:  # who reads the last event may continue at once
                        await engine.responses.keep(owner, job)
                    yield b"".join(added)

    async def background() -> Response:
        try:
            with engine.accepted():
                job = await prepared()
                queued = await engine.responses.start(owner, job, is_streamed=body.stream)
        except Exception as error:
            raise translated(error) from error
        if body.stream:
            return response_event_stream(engine.responses.events(owner, response_id), lines, translated)
        return Response(queued, 200, lines, "application/json")

    lines = {
        headers.REQUEST_ID: context.request_id,
        **report_skipped(engine, "responses", translation.skipped),
    }
    if body.background and not is_resolved:  # a router waits itself
        return await background()
    return (
        response_event_stream(events(), lines, translated) if body.stream else json_response(answer(), lines)
    )


async def _count(engine: Engine, request: Request, body: ResponsesRequest, size: int) -> Response:
    """Count the tokens of the prompt that a response would be generated from."""
    conversation = input_items(body)
    if headers.RESOLVED not in request.headers:
        conversation, num_bytes = await _conversation(engine.responses.store, owner_of(request), body)
        size += num_bytes
    translation = translated_response(body, conversation)
    chat = translation.chat
    apply_flags(engine.options, chat)
    serving = serving_of(engine, request)

    async def answer() -> InputTokenCount:
        try:
            with engine.accepted():
                return InputTokenCount(input_tokens=await prompt_token_count(serving, chat, size))
        except Exception as error:
            raise name_responses_field(translated_error(error), body, translation.tools) from error

    lines = {
        headers.REQUEST_ID: request_id_of(request, None),
        **report_skipped(engine, "responses", translation.skipped),
    }
    return json_response(answer(), lines)


async def _conversation(
    store: ResponseStore, owner: str, body: ResponsesRequest
) -> tuple[list[ResponseItem], int]:
    """Return the whole conversation, and how many bytes of it were stored."""
    found: dict[str, StoredResponse] = {}
    for response_id in referenced_responses(body):
        record = await store.get(owner, response_id)
        if record is not None:
            found[response_id] = record
    return resolved_items(body, found), sum(record.size for record in found.values())


async def _stored(engine: Engine, owner: str, response_id: str) -> StoredResponse:
    record = await engine.responses.store.get(owner, response_id)
    if record is None:
        raise response_not_found(response_id)
    return record


def _truth(value: str | None, name: str) -> bool:
    if value is None or value in _FALSE:
        return False
    if value not in _TRUE:
        raise BadRequest(f"{name} must be true or false", param=name)
    return True


def _number(value: str | None, name: str, default: int, maximum: int, *, minimum: int = 0) -> int:
    if value is None:
        return default
    is_number = value.isascii() and value.isdigit() and len(value) <= len(str(maximum))
    if not is_number or not minimum <= int(value) <= maximum:
        raise BadRequest(
            f"{name} must be a number from {minimum} to {maximum}, not {value[:64]!r}", param=name
        )
    return int(value)


def _order(value: str) -> Literal["asc", "desc"]:
    if value == "asc":
        return "asc"
    if value == "desc":
        return "desc"
    raise BadRequest("order must be asc or desc", param="order")


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
