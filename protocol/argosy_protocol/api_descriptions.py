"""What a server says of its API: its models, and the OpenAPI document.

/v1/models is answered in the forms of those who ask: OpenAI's, Anthropic's, and the list that the agent Codex reads.
Anthropic's clients send a header, and Codex (0.171) its version as a query parameter. What Codex does not find in its
own list of models it takes from ours: the context that a model has, and that it reads text only. Without it Codex warns
at each start, and assumes a context of its own.

The OpenAPI document is made of the types by which engine and router decode and encode, so that it cannot contradict
them. Must not know: which paths a server has, where models come from, who may use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from argosy_protocol import __version__
from argosy_protocol.anthropic import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    TokenCount,
    is_messages_path,
)
from argosy_protocol.openai import (
    BEAM_SEARCH_FIELDS,
    NEUTRAL_VALUES,
    BatchChatCompletionRequest,
    ChatCompletion,
    ChatCompletionRequest,
    ChatTokenizeRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TextTokenizeRequest,
    TokenizeResponse,
)
from argosy_protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from argosy_protocol.response_history import MAX_PAGE
from argosy_protocol.responses import (
    NAMES_OF_CHAT_FIELDS,
    REFUSED_FIELDS,
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)

ANTHROPIC_HEADER: Final = "anthropic-version"
CODEX_QUERY: Final = "client_version"

_MAX_OUTPUT_TOKENS: Final = 10_000
"""Tokens of a tool's output that Codex shows its own models."""
_OUTPUT_SHARE: Final = 8
"""A tool's output takes this part of a small context at most."""
_INSTRUCTIONS: Final = """\
You are a coding agent. You work in the user's terminal, in the directory that the conversation names, with the tools \
that you are given.

- Look before you change: read the files that matter, and search with `rg`, or with `grep` where there is none.
- Do the whole task, and nothing beside it. Keep to the style of the code that is there.
- Edit files by commands, a few lines by `apply_patch`. Do not commit unless you are asked to.
- Run what shows that your change works, such as the tests nearest to it. If something fails, find out why.
- Say in a sentence what you are about to do before you call tools. At the end say briefly what you have done, and \
what is left. Claim nothing that you have not seen.
"""
"""What Codex tells a model before everything else. The field is required; Codex's own texts are for its own models."""


class AnthropicModel(Struct, frozen=True, kw_only=True, tag="model", tag_field="type"):
    id: str
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int | None = None
    max_tokens: int | None = None


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class CodexTruncation(Struct, frozen=True, kw_only=True):
    mode: str = "tokens"
    limit: int


class CodexModel(Struct, frozen=True, kw_only=True):
    """The fields that Codex requires, and those in which a model of ours differs from its defaults."""

    slug: str
    display_name: str
    base_instructions: str = _INSTRUCTIONS
    context_window: int | None
    default_reasoning_level: None = None
    supported_reasoning_levels: tuple[()] = ()
    supports_reasoning_summaries: bool = False
    shell_type: str = "unified_exec"
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int
    support_verbosity: bool = False
    supports_parallel_tool_calls: bool = True
    truncation_policy: CodexTruncation
    input_modalities: tuple[str, ...] = ("text",)
    experimental_supported_tools: tuple[()] = ()


class CodexModelList(ModelList, frozen=True, kw_only=True):
    models: list[CodexModel]


def encoded_models(cards: Sequence[ModelCard], *, is_anthropic: bool, is_codex: bool) -> bytes:
    """Encode a list of models.

    Args:
        is_anthropic: the request has `ANTHROPIC_HEADER`.
        is_codex: its query has `CODEX_QUERY`.
    """
    if is_anthropic:
        models = [_anthropic_model(card) for card in cards]
        first, last = (models[0].id, models[-1].id) if models else (None, None)
        return msgspec.json.encode(AnthropicModelList(data=models, first_id=first, last_id=last))
    if is_codex:
        known = [_codex_model(card, priority) for priority, card in enumerate(cards)]
        return msgspec.json.encode(CodexModelList(data=list(cards), models=known))
    return msgspec.json.encode(ModelList(data=list(cards)))


def encoded_model(card: ModelCard, *, is_anthropic: bool) -> bytes:
    """Encode one model; see `encoded_models`."""
    shown: Any = _anthropic_model(card) if is_anthropic else card
    return msgspec.json.encode(shown)


def _anthropic_model(card: ModelCard) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    limit = card.max_model_len
    return AnthropicModel(
        id=card.id, display_name=card.id, created_at=created, max_input_tokens=limit, max_tokens=limit
    )


def _codex_model(card: ModelCard, priority: int) -> CodexModel:
    limit = card.max_model_len
    shown = _MAX_OUTPUT_TOKENS if limit is None else min(_MAX_OUTPUT_TOKENS, limit // _OUTPUT_SHARE)
    return CodexModel(
        slug=card.id,
        display_name=card.id,
        context_window=limit,
        priority=priority,
        truncation_policy=CodexTruncation(limit=max(1, shown)),
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
