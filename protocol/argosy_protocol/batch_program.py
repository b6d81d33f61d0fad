"""What routers and `argosy batch` say to each other.

The program keeps files, batches and stored responses. Routers forward `/v1/files` and `/v1/batches` to it and keep
responses with it; it sends the requests of batches through a router, on behalf of the account that made the batch. Both
ways carry the installation's internal key, and name the account in a header.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Annotated, Final
from urllib.parse import quote, unquote

from msgspec import Meta, Struct

from argosy_protocol.bearer_keys import internal_key
from argosy_protocol.headers import INTERNAL_PREFIX

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


async def pieces(body: bytes) -> AsyncIterator[bytes]:
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
