"""/openapi.json and /docs of an engine.

Owns: which routes the document has: all that the application has by then, but those that are between our own programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response

from argosy_protocol.openapi_document import (
    GENERATION,
    MODELS,
    STORED_RESPONSES,
    TEXT,
    Operation,
    Route,
    document_page,
    openapi_document,
)

_PRIVATE = "/internal/"
_OPERATIONS = {
    **{("POST", path): operation for path, operation in GENERATION.items()},
    **{(route.method, route.path): route.operation for route in (*STORED_RESPONSES, *MODELS)},
    ("POST", "/sleep"): Operation(query={"level": {"enum": [1, 2]}, "mode": {"enum": ["abort", "wait"]}}),
    ("GET", "/server_info"): Operation(query={"config_format": {"enum": ["text", "json"]}}),
    ("GET", "/metrics"): Operation(answer={"text/plain": TEXT}),
    ("GET", "/docs"): Operation(answer={"text/html": TEXT}),
}


def add_openapi_routes(app: FastAPI) -> None:
    """Add /openapi.json, and /docs, a page that shows it."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(openapi_document(app.title, documented_routes(app)))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(encoded(), media_type="application/json")

    @app.get("/docs")
    async def docs() -> Response:
        return Response(document_page(), media_type="text/html; charset=utf-8")


def documented_routes(app: FastAPI) -> Iterator[Route]:
    """Yield the routes that the document of the application has."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema and not route.path.startswith(_PRIVATE):
            path = route.path.replace(":path}", "}")
            for method in sorted(route.methods or ()):
                yield Route(method, path, _OPERATIONS.get((method, path), Operation()))
