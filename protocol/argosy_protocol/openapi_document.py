"""The OpenAPI document of an engine or a router, made of the types by which both decode and encode.

Owns: which types belong to which path, and how an operation is described.
Must not know: which paths a server has. Bounds and types of fields come from the wire types, so that the document
cannot contradict them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

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
    ModelCard,
    ModelList,
)
from argosy_protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    PoolingRequest,
    PoolingResponse,
)
from argosy_protocol.response_history import MAX_PAGE
from argosy_protocol.response_object import DeletedResponse, InputTokenCount, ItemList, ResponseObject
from argosy_protocol.responses import NAMES_OF_CHAT_FIELDS, REFUSED_FIELDS, ResponsesRequest
from argosy_protocol.scoring import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from argosy_protocol.tokenization import (
    ChatTokenizeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TextTokenizeRequest,
    TokenizeResponse,
)

Schema = Mapping[str, Any]

_REFUSED = {
    **{name: values for name, values in NEUTRAL_VALUES.items() if name not in BEAM_SEARCH_FIELDS},
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), ()),
    "resume": (),
    **dict.fromkeys(("mcp_servers", "container"), ([], {})),
}
"""Fields that are refused -> the values besides null with which they are accepted."""
_REFUSED_OF_RESPONSES: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(REFUSED_FIELDS, (False,)),
    **dict.fromkeys(NAMES_OF_CHAT_FIELDS, ()),
    "n": (1,),
}
_REF = "#/components/schemas/{name}"
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


class Operation(NamedTuple):
    """What is known of a method of a path."""

    requests: Sequence[Any] = ()
    """Types of a JSON body: any of them."""
    response: Any = None
    """Type of the answer's JSON body."""
    is_streamed: bool = False
    """Whether the answer may also be a stream of events."""
    query: Mapping[str, Schema] = {}
    """Schemas of the parameters in the URL."""
    body: Mapping[str, Schema] = {}
    """Schemas of other bodies, by content type."""
    answer: Mapping[str, Schema] = {}
    """Schemas of other answers, by content type."""


class Route(NamedTuple):
    """A method of a path of a server."""

    method: str
    path: str
    """Its parameters are in braces, as `{name}`."""
    operation: Operation
    name: str = ""
    """Unique among the document's; made of the other two if it is empty."""


BOOLEAN: Final[Schema] = {"type": "boolean"}
TEXT: Final[Schema] = {"type": "string"}
ORDER: Final[Schema] = {"enum": ["asc", "desc"]}

_CLASSIFICATION = Operation([ClassificationRequest], ClassificationResponse)
_SCORE = Operation([ScoreRequest], ScoreResponse)
_RERANK = Operation([RerankRequest], RerankResponse)
_ITEMS_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": ORDER,
    "after": TEXT,
}
_EVENTS_QUERY = {"stream": BOOLEAN, "starting_after": {"type": "integer", "minimum": 0}}

CREATE_RESPONSE: Final = Operation([ResponsesRequest], ResponseObject, True)
STORED_RESPONSES: Final[Sequence[Route]] = (
    Route("GET", "/v1/responses/{name}", Operation((), ResponseObject, True, _EVENTS_QUERY)),
    Route("DELETE", "/v1/responses/{name}", Operation((), DeletedResponse)),
    Route("POST", "/v1/responses/{name}/cancel", Operation((), ResponseObject)),
    Route("GET", "/v1/responses/{name}/input_items", Operation((), ItemList, query=_ITEMS_QUERY)),
)
"""Routes of a server that keeps responses."""
GENERATION: Final[Mapping[str, Operation]] = {
    "/v1/chat/completions": Operation([ChatCompletionRequest], ChatCompletion, True),
    "/v1/chat/completions/batch": Operation([BatchChatCompletionRequest], ChatCompletion),
    "/v1/completions": Operation([CompletionRequest], Completion, True),
    "/v1/embeddings": Operation([EmbeddingRequest], EmbeddingResponse),
    "/v1/messages": Operation([MessagesRequest], Message, True),
    "/v1/messages/count_tokens": Operation([CountTokensRequest], TokenCount),
    "/v1/responses": CREATE_RESPONSE,
    "/v1/responses/input_tokens": Operation([ResponsesRequest], InputTokenCount),
    **dict.fromkeys(("/classify", "/v1/classify"), _CLASSIFICATION),
    "/pooling": Operation([PoolingRequest], PoolingResponse),
    **dict.fromkeys(("/score", "/v1/score"), _SCORE),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RERANK),
    "/tokenize": Operation([TextTokenizeRequest, ChatTokenizeRequest], TokenizeResponse),
    "/detokenize": Operation([DetokenizeRequest], DetokenizeResponse),
}
"""What is posted to a model, by path."""
MODELS: Final[Sequence[Route]] = (
    Route("GET", "/v1/models", Operation((), ModelList)),
    Route("GET", "/v1/models/{name}", Operation((), ModelCard)),
)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>API</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#page", deepLinking: true})</script>
</body>
</html>
"""


def document_page() -> bytes:
    """Return an HTML page that shows the `openapi.json` beside it, with scripts that the browser loads from a CDN."""
    return _PAGE.encode()


def openapi_document(title: str, routes: Iterable[Route]) -> dict[str, Any]:
    """Return the document of a server that has these routes."""
    listed = list(routes)
    requests = [kind for route in listed for kind in route.operation.requests]
    answers = [route.operation.response for route in listed if route.operation.response is not None]
    kinds = list(dict.fromkeys((*requests, *answers)))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for kind in requests:
        properties = components[kind.__name__].get("properties", {})
        refused = _REFUSED_OF_RESPONSES if kind is ResponsesRequest else _REFUSED
        for name in refused.keys() & properties.keys():
            properties[name] = {"enum": [None, *refused[name]], "description": "not supported"}
    types = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, types)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, **_ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(route: Route, types: Mapping[Any, Schema]) -> dict[str, Any]:
    known = route.operation
    error = _REF.format(name="MessagesError" if is_messages_path(route.path) else "Error")
    answers = dict(known.answer)
    if known.response is not None:
        answers["application/json"] = types[known.response]
    if known.is_streamed:
        answers["text/event-stream"] = TEXT
    operation: dict[str, Any] = {
        "operationId": route.name or _identifier(route),
        "responses": {
            "200": _content("the answer" if answers else "success", answers),
            "default": _content("an error", {"application/json": {"$ref": error}}),
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": dict(schema)} for name, schema in known.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    bodies = dict(known.body)
    if known.requests:
        forms = [types[kind] for kind in known.requests]
        bodies["application/json"] = forms[0] if len(forms) == 1 else {"anyOf": forms}
    if bodies:
        operation["requestBody"] = {"required": True, "content": _content("", bodies)["content"]}
    return operation


def _identifier(route: Route) -> str:
    return "_".join([route.method.lower(), *re.findall(r"\w+", route.path)])


def _content(description: str, schemas: Mapping[str, Schema]) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"description": description, **({"content": content} if content else {})}
