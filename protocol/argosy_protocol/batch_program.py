"""What routers and `argosy batch` say to each other, and the files and batches that it stores and clients are shown.

The program keeps files, batches and stored responses. Routers forward `/v1/files` and `/v1/batches` to it and keep
responses with it; it sends the requests of batches through a router, on behalf of the account that made the batch. Both
ways carry the installation's internal key, and name the account in a header.

The ids of objects cannot be guessed, and tell when an object was made and when it expires, so that a listing is in the
order of creation, and the sweep finds what has expired without reading it. The random part has 128 bits:

    file-019abf1c0de6929d7f0083c2b1d2...   prefix, created (11 hexadecimal digits, ms), expires (9, s), 32 random

A batch's status:

    validating -> failed
        |
    in_progress -> finalizing -> completed
        |                     -> expired
    cancelling -> cancelled            (from validating and in_progress)
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Annotated, Final, Generic, Literal, TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta, Struct

from argosy_protocol.errors import BadRequest, NotFound
from argosy_protocol.headers import INTERNAL_PREFIX, internal_key
from argosy_protocol.json_limits import MAX_MODEL_NAME, decode_body

BATCH_KEY_UID: Final = "argosy-batch"
"""The key of both ways is `internal_key(fleet key, BATCH_KEY_UID)`. No service has this UID."""
DEFAULT_PORT: Final = 8082
BACKGROUND_PRIORITY: Final = 1 << 30
"""Priority of work that nobody waits for, such as batches: behind all priorities that keys and people choose."""

ACCOUNT: Final = INTERNAL_PREFIX + "account"
"""Request: whose it is, by the name of the account as percent-encoded UTF-8. It counts beside the key only; empty for
everybody, in an installation without keys."""
ROOM_PATH: Final = "/internal/batch-room"
"""GET at a router, with `?model=`: a `RoomReport`."""
NO_ROOM: Final = "batch_no_room"
"""Code of a router's 429 to a request of a batch for whose service it has no room."""
ACCOUNT_GONE: Final = "account_gone"
"""Code of a router's 403 to a request of a batch: no key has the account, so far."""

RESPONSES_PATH: Final = "/internal/responses"
"""POST, GET, PUT and DELETE `/internal/responses/ID`: a `response_history.StoredResponse`. PUT stores the end of one
that has none, and answers with what is stored then."""
HEARTBEATS_PATH: Final = "/internal/heartbeats"
"""POST: a `Heartbeat` for a run that begins. PUT `Heartbeats`: they still beat."""

BEAT_S: Final = 5.0
"""Time between two beats."""
BEATS_FOR_S: Final = 86400.0
"""For so long a router uses a heartbeat for runs that begin; then it takes another one."""

PIECE_BYTES: Final = 256 * 1024
"""A body above it is sent in pieces of this size."""


class RoomReport(Struct, frozen=True):
    """How many more requests of batches for a model a router would take now."""

    room: int


class Heartbeat(Struct, frozen=True):
    """Of a router that generates responses in the background."""

    id: Annotated[str, Meta(max_length=128)]


class Heartbeats(Struct, frozen=True):
    ids: Annotated[list[Annotated[str, Meta(max_length=128)]], Meta(max_length=1024)]


def account_value(name: str) -> str:
    """The value of the header `ACCOUNT`."""
    return quote(name, safe="")


def account_name(value: str) -> str:
    """The name in a value of the header `ACCOUNT`."""
    return unquote(value)


def batch_keys(fleet_keys: Sequence[bytes]) -> list[str]:
    """The keys of both ways, for each of the fleet keys that are valid."""
    return [internal_key(key, BATCH_KEY_UID) for key in fleet_keys]


async def pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    """Yield a large body so that other work of the event loop has its turn between two pieces."""
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


async def joined(chunks: AsyncIterable[bytes], limit: int) -> bytes | None:
    """Return a body that arrives in pieces; None once it is longer than `limit` bytes."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


_ID: Final = re.compile(r"[a-z]{2,16}[-_]([0-9a-f]{11})([0-9a-f]{9})[0-9a-f]{32}")


def new_id(prefix: str, now: float, ttl_s: float) -> str:
    """Return a new id.

    Args:
        prefix: as OpenAI's ids have it, with its separator: `file-`, `batch_`, `resp_`.
        now: seconds since the epoch.
        ttl_s: how long the object lives.
    """
    return f"{prefix}{int(now * 1000):011x}{int(now + ttl_s):09x}{secrets.token_hex(16)}"


def is_id(text: str) -> bool:
    """Whether a text has the form of an id; only then it is safe in a key of the storage."""
    return _ID.fullmatch(text) is not None


def created_at(object_id: str) -> float:
    """When the object was made, in seconds since the epoch. The id must be valid (`is_id`)."""
    return int(_match(object_id)[1], 16) / 1000


def expires_at(object_id: str) -> int:
    """When the object expires, in seconds since the epoch. The id must be valid (`is_id`)."""
    return int(_match(object_id)[2], 16)


def place_of(object_id: str) -> tuple[float, str]:
    """Return what ids are ordered by: when the object was made, and among those of one moment the id itself."""
    return created_at(object_id), object_id


def _match(object_id: str) -> re.Match[str]:
    match = _ID.fullmatch(object_id)
    assert match is not None, "ids are checked where they come in"
    return match


FILES: Final = "files"
FILE_ID_PREFIX: Final = "file-"
MAX_NAME: Final = 255
MAX_LISTED_FILES: Final = 10_000
"""OpenAI's bound of `limit`. A page has fewer files all the same."""
MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 30 * 86400
T = TypeVar("T")

Purpose = Literal["batch", "batch_output"]


class Page(Struct, Generic[T], frozen=True, kw_only=True):
    """One page of a list, as OpenAI's."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredFile(Struct, frozen=True, kw_only=True):
    """A file's document. Its content is kept beside it."""

    id: Annotated[str, Meta(max_length=128)]
    filename: Annotated[str, Meta(max_length=MAX_NAME)]
    purpose: Purpose
    bytes: Annotated[int, Meta(ge=0)]


class FileObject(Struct, frozen=True, kw_only=True):
    """A file, as OpenAI's API shows it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class DeletedFile(Struct, frozen=True, kw_only=True):
    """The answer to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def shown_file(file: StoredFile) -> FileObject:
    """Return what clients see of a file."""
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=int(created_at(file.id)),
        expires_at=expires_at(file.id),
        filename=file.filename,
        purpose=file.purpose,
    )


def plain_name(sent: str) -> str:
    """Return a client's file name without folders and control characters; it is shown_file, and never names a path."""
    last = sent.replace("\\", "/").rpartition("/")[2]
    name = "".join(character for character in last if character.isprintable()).strip()
    return name[:MAX_NAME] if name.strip(".") else "upload.jsonl"


def no_such_file(file_id: str) -> NotFound:
    return NotFound(f"no such File object: {file_id[:128]!r}", param="id")


BATCHES: Final = "batches"
BATCH_ID_PREFIX: Final = "batch_"
WINDOW_S: Final = 24 * 3600.0
MAX_METADATA: Final = 16
MAX_LISTED_BATCHES: Final = 100
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
    model: Annotated[str, Meta(max_length=MAX_MODEL_NAME)] | None = None
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
    created = created_at(batch_id)
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
