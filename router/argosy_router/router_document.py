"""The OpenAPI document of the router's main port.

Owns: which routes the document has: those of generation requests, and of what the router keeps if it has a storage.
Must not know: how they are answered.
"""

# Not compiled: made once.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import msgspec

from argosy_protocol.batch_objects import MAX_LISTED as MAX_BATCHES
from argosy_protocol.batch_objects import BatchObject, CreateBatch
from argosy_protocol.file_objects import (
    MAX_EXPIRY_S,
    MAX_LISTED,
    MIN_EXPIRY_S,
    DeletedFile,
    FileObject,
    Page,
)
from argosy_protocol.openapi_document import (
    GENERATION,
    MODELS,
    ORDER,
    STORED_RESPONSES,
    TEXT,
    Operation,
    Route,
    Schema,
    openapi_document,
)

_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
    "additionalProperties": False,
}
_BINARY: Mapping[str, Schema] = {"application/octet-stream": {}}
_FILES_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
    "order": ORDER,
    "after": TEXT,
    "purpose": TEXT,
}
_BATCHES_QUERY = {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_BATCHES}, "after": TEXT}
_STATE = (
    *(Route("GET", path, Operation()) for path in ("/health", "/ping", "/ready", "/version", "/load")),
    Route("POST", "/ping", Operation()),
    Route("GET", "/metrics", Operation(answer={"text/plain": TEXT})),
    Route("GET", "/openapi.json", Operation()),
    Route("GET", "/docs", Operation(answer={"text/html": TEXT})),
)
_STORED = (
    *STORED_RESPONSES,
    Route("GET", "/v1/files", Operation((), Page[FileObject], query=_FILES_QUERY)),
    Route("POST", "/v1/files", Operation((), FileObject, body={"multipart/form-data": _FORM})),
    Route("GET", "/v1/files/{name}", Operation((), FileObject)),
    Route("DELETE", "/v1/files/{name}", Operation((), DeletedFile)),
    Route("GET", "/v1/files/{name}/content", Operation(answer=_BINARY)),
    Route("GET", "/v1/batches", Operation((), Page[BatchObject], query=_BATCHES_QUERY)),
    Route("POST", "/v1/batches", Operation([CreateBatch], BatchObject)),
    Route("GET", "/v1/batches/{name}", Operation((), BatchObject)),
    Route("POST", "/v1/batches/{name}/cancel", Operation((), BatchObject)),
)


def documented_routes(endpoints: Iterable[str], *, has_storage: bool) -> Iterator[Route]:
    """Yield the routes of the main port.

    Args:
        endpoints: paths of the requests that the router sends to replicas.
    """
    for path in endpoints:
        yield Route("POST", path, GENERATION[path])
    yield from MODELS
    if has_storage:
        yield from _STORED
    yield from _STATE


@cache
def encoded_document(endpoints: tuple[str, ...], *, has_storage: bool) -> bytes:
    """Return the document as JSON. The first time takes a tenth of a second."""
    return msgspec.json.encode(
        openapi_document("Argosy router", documented_routes(endpoints, has_storage=has_storage))
    )
