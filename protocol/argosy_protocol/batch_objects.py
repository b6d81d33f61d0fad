"""What is stored and shown of a batch.

Owns: the types, the fields of a request that makes a batch, and which status follows which.
Must not know: HTTP, the storage, how a batch is run.

    validating -> failed
        |
    in_progress -> finalizing -> completed
        |                     -> expired
    cancelling -> cancelled            (from validating and in_progress)
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_protocol import object_ids
from argosy_protocol.errors import BadRequest, NotFound
from argosy_protocol.json_limits import decode_body

KIND: Final = "batches"
ID_PREFIX: Final = "batch_"
WINDOW_S: Final = 24 * 3600.0
MAX_METADATA: Final = 16
MAX_LISTED: Final = 100
"""Batches of a page."""
MAX_ERRORS: Final = 100
"""Faults of an input file that a batch lists."""

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: Final = frozenset(("failed", "completed", "expired", "cancelled"))
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]

_Seconds = Annotated[int, Meta(ge=0)] | None
_Id = Annotated[str, Meta(max_length=128)]


class OutputExpiry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the files of results live."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=30 * 86400)]


class CreateBatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: _Id
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None = None
    output_expires_after: OutputExpiry | None = None


class LineError(Struct, frozen=True, kw_only=True):
    """A fault of an input file."""

    code: Annotated[str, Meta(max_length=64)]
    message: Annotated[str, Meta(max_length=1024)]
    line: Annotated[int, Meta(ge=1)] | None = None
    param: Annotated[str, Meta(max_length=64)] | None = None


class LineErrors(Struct, frozen=True, kw_only=True):
    """Faults of an input file, as OpenAI's API shows them."""

    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(Struct, frozen=True, kw_only=True):
    """How far a batch has come."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class OutputDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True, kw_only=True):
    """Tokens of all requests of a batch."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class BatchObject(Struct, frozen=True, kw_only=True):
    """A batch, as OpenAI's API shows it, and as it is stored within a `StoredBatch`."""

    id: _Id
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str | None = None
    errors: LineErrors | None = None
    input_file_id: _Id
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: _Id | None = None
    error_file_id: _Id | None = None
    created_at: int
    in_progress_at: _Seconds = None
    expires_at: int
    finalizing_at: _Seconds = None
    completed_at: _Seconds = None
    failed_at: _Seconds = None
    expired_at: _Seconds = None
    cancelling_at: _Seconds = None
    cancelled_at: _Seconds = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class StoredBatch(Struct, frozen=True, kw_only=True):
    """A batch's document."""

    batch: BatchObject
    account: Annotated[str, Meta(max_length=64)]
    """The name of the account whose limits apply to the requests."""
    output_ttl_s: Annotated[float, Meta(ge=0)]
    output_id: _Id = ""
    """Id of the file of results, once it is known that there will be one or not: set before it is written, so that a
    router that takes over writes the same file."""
    error_id: _Id = ""
    ending: Literal["", "completed", "expired", "cancelled", "failed"] = ""
    """The status that follows once the results are written; empty until all requests have ended."""


_create_decoder: Final = msgspec.json.Decoder(CreateBatch)
_stored_decoder: Final = msgspec.json.Decoder(StoredBatch)


def decode_create(body: bytes) -> CreateBatch:
    """Decode a request that makes a batch.

    Raises:
        BadRequest: not JSON, unknown fields, wrong types or out of bounds; `param` names the field.
    """
    create = decode_body(_create_decoder, body)
    if create.metadata is not None and len(create.metadata) > MAX_METADATA:
        raise BadRequest(f"metadata may have {MAX_METADATA} pairs at most", param="metadata")
    return create


def decode_stored(document: bytes) -> StoredBatch:
    return _stored_decoder.decode(document)


def new_batch(batch_id: str, create: CreateBatch, account: str, output_ttl_s: float) -> StoredBatch:
    """Return the document of a new batch. Its id tells when it was made."""
    created = object_ids.created_at(batch_id)
    expiry = create.output_expires_after
    return StoredBatch(
        batch=BatchObject(
            id=batch_id,
            endpoint=create.endpoint,
            input_file_id=create.input_file_id,
            created_at=int(created),
            expires_at=int(created + WINDOW_S),
            metadata=create.metadata,
        ),
        account=account,
        output_ttl_s=output_ttl_s if expiry is None else float(expiry.seconds),
    )


def no_such_batch(batch_id: str) -> NotFound:
    return NotFound(f"no batch found with id {batch_id[:128]!r}", param="id")
