"""/openapi.json and /docs: the OpenAPI document, made of the types by which the server decodes and encodes.

Owns: which types belong to which path. Bounds and types of fields come from the wire types, paths from the application,
so that the document cannot contradict them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from starlette.responses import HTMLResponse, Response

from argosy_protocol import __version__
from argosy_protocol.anthropic import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    TokenCount,
    is_messages_path,
)
from argosy_protocol.chat_batch import BatchChatCompletionRequest
from argosy_protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from argosy_protocol.openai import (
    BEAM_SEARCH_FIELDS,
    NEUTRAL_VALUES,
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
)
from argosy_protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    PoolingRequest,
    PoolingResponse,
)
from argosy_protocol.response_object import ResponseObject
from argosy_protocol.responses import REFUSED_FIELDS, ResponsesRequest
from argosy_protocol.scoring import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from argosy_protocol.tokenization import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TextTokenizeRequest,
    TokenizeResponse,
)

_REFUSED = {
    **{name: values for name, values in NEUTRAL_VALUES.items() if name not in BEAM_SEARCH_FIELDS},
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "resume"), ()),
    **dict.fromkeys(("mcp_servers", "container", "context_management"), ([], {})),
}
"""Fields that are refused -> the values besides null with which they are accepted."""
_REFUSED_OF_RESPONSES: Mapping[str, Sequence[Any]] = dict.fromkeys(REFUSED_FIELDS, (False,))
_REF = "#/components/schemas/{name}"
_PRIVATE = "/internal/"
_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
            },
        },
    },
}
_ERRORS = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}


class _Operation(NamedTuple):
    requests: Sequence[type]
    """Forms of the body."""
    response: type
    is_streamed: bool = False


_OPERATIONS = {
    "/v1/chat/completions": _Operation([ChatCompletionRequest], ChatCompletion, True),
    "/v1/chat/completions/batch": _Operation([BatchChatCompletionRequest], ChatCompletion),
    "/v1/completions": _Operation([CompletionRequest], Completion, True),
    "/v1/embeddings": _Operation([EmbeddingRequest], EmbeddingResponse),
    "/v1/messages": _Operation([MessagesRequest], Message, True),
    "/v1/messages/count_tokens": _Operation([CountTokensRequest], TokenCount),
    "/v1/responses": _Operation([ResponsesRequest], ResponseObject, True),
    "/classify": _Operation([ClassificationRequest], ClassificationResponse),
    "/pooling": _Operation([PoolingRequest], PoolingResponse),
    **dict.fromkeys(("/score", "/v1/score"), _Operation([ScoreRequest], ScoreResponse)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _Operation([RerankRequest], RerankResponse)),
    "/tokenize": _Operation([TextTokenizeRequest, ChatTokenizeRequest], TokenizeResponse),
    "/detokenize": _Operation([DetokenizeRequest], DetokenizeResponse),
}


def add_openapi_routes(app: FastAPI) -> None:
    """Add /openapi.json, and /docs, a page that shows it (with scripts that the browser loads from a CDN)."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(openapi_document(app))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(encoded(), media_type="application/json")

    @app.get("/docs")
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the document of all routes that the application has by now."""
    types = [kind for operation in _OPERATIONS.values() for kind in (*operation.requests, operation.response)]
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    for kind in types:
        properties = components[kind.__name__].get("properties", {})
        refused = _REFUSED_OF_RESPONSES if kind is ResponsesRequest else _REFUSED
        for name in refused.keys() & properties.keys():
            properties[name] = {"enum": [None, *refused[name]], "description": "not supported"}
    paths: dict[str, dict[str, Any]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute) and not route.path.startswith(_PRIVATE):
            for method in route.methods or ():
                path = route.path.replace(":path}", "}")
                paths.setdefault(path, {})[method.lower()] = _operation(route, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": app.title, "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, **_ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(route: APIRoute, method: str) -> dict[str, Any]:
    error = "MessagesError" if is_messages_path(route.path) else "Error"
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{route.name}",
        "responses": {"200": {"description": "success"}, "default": _content("an error", {error})},
    }
    if "{name" in route.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    known = _OPERATIONS.get(route.path)
    if known is not None and method == "POST":
        body = _content("", {kind.__name__ for kind in known.requests})
        operation["requestBody"] = {"required": True, "content": body["content"]}
        operation["responses"]["200"] = _content("the answer", {known.response.__name__})
        if known.is_streamed:
            stream = {"text/event-stream": {"schema": {"type": "string"}}}
            operation["responses"]["200"]["content"].update(stream)
    return operation


def _content(description: str, names: set[str]) -> dict[str, Any]:
    references = [{"$ref": _REF.format(name=name)} for name in sorted(names)]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
