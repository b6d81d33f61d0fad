"""The HTTP application: `/v1/files` and `/v1/batches` as routers forward them, responses as routers keep them, probes.

Owns: paths and methods, who may ask, the memory of bodies. Must not know: what is stored.
Invariant: everything but `/health`, `/ready` and `/metrics` needs the key that this program and the routers share; what
a request is about belongs to the account that its router names.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from argosy_batch.batches import BatchesApi
from argosy_batch.files_api import FileContent, FilesApi, boundary_of
from argosy_batch.object_store import owner_of
from argosy_batch.stored_responses import StoredResponses, owner_of_responses
from argosy_protocol.batch_program import (
    ACCOUNT,
    HEARTBEATS_PATH,
    RESPONSES_PATH,
    Heartbeat,
    Heartbeats,
    account_name,
    joined,
    pieces,
)
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    InternalError,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
    Unauthorized,
    Unavailable,
)
from argosy_protocol.headers import KeyRing
from argosy_protocol.program.process import OwnerSlots, OwnerTurns
from argosy_protocol.response_history import StoredResponse, response_not_found

log = logging.getLogger(__name__)

MAX_DOWNLOADS: Final = 128
"""Contents of files on their way to clients, each of which holds a megabyte while its client does not read."""
MAX_BODY_BYTES: Final = 1024 * 1024
"""Of a request that makes a batch, or is about heartbeats."""
MAX_RECORD_BYTES: Final = 256 * 1024 * 1024
"""Of a response and its conversation, and of all of them that are being received."""
SHARE_OF_FREE: Final = 3
"""An account's records that are being received may take so many times as much as is free of it; one may in any case."""
MAX_RECORDS_READ: Final = 4
"""Responses that are read of the storage and sent to routers at a time. Accounts take turns."""
MAX_RECORDS_ASKED: Final = 1024
"""Requests for responses that wait for that, or are answered. Accounts share them: one alone has half of them, and
leaves connections of this program and time of its routers to others."""
MAX_LISTINGS: Final = 256
"""Lists of files and batches that are made or wait for it. Accounts share them likewise."""
MAX_LISTED_AT_ONCE: Final = 4
"""Lists that are made at a time, one for an account: a list may read thousands of objects of the storage."""
RECORD_S: Final = 40.0
"""Time in which a response must arrive, or be taken: a router waits no longer. One that is gone holds its memory no
longer."""
_JSON: Final = "application/json"
Handler = Callable[[Request, str], Awaitable[Response]]
T = TypeVar("T")

STATUSES: Final = ("validating", "in_progress", "finalizing", "cancelling", "elsewhere")


class BatchMetrics:
    """Metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self.ended = counter(
            "argosy_batch_batches_ended",
            "Batches that this process ran to their end, by their last status.",
            ["status"],
        )
        self.requests = counter(
            "argosy_batch_requests",
            "Requests of batches by outcome: completed, failed, or retried after 429, 503 or a failure.",
            ["outcome"],
        )
        self.batches = gauge(
            "argosy_batch_batches",
            "Batches that have not ended: by status those that this process runs; elsewhere: those that other "
            "processes run, or none yet.",
            ["status"],
        )
        self.inflight = gauge(
            "argosy_batch_requests_inflight", "Requests of batches that this process has in flight."
        )
        self.stored_bytes = gauge(
            "argosy_batch_stored_bytes",
            "Bytes of all keys' files, batches and responses in the storage, at the last sweep.",
        )
        self.stored_objects = gauge(
            "argosy_batch_stored_objects",
            "Number of files, batches and responses in the storage, at the last sweep.",
        )
        self.quarantined = gauge(
            "argosy_batch_quarantined_objects",
            "Objects that could not be read, and were put aside, since the process started.",
        )
        self.restarts = counter(
            "argosy_batch_task_restarts", "Parts of the program that failed, and were begun anew.", ["task"]
        )

    def follow(
        self,
        *,
        statuses: Callable[[], Iterable[tuple[str, float]]],
        inflight: Callable[[], float],
        stored: Callable[[], tuple[float, float]],
        quarantined: Callable[[], float],
    ) -> None:
        """Read values from now on whenever they are asked for."""
        for status in STATUSES:
            self.batches.labels(status).set_function(lambda status=status: dict(statuses()).get(status, 0.0))
        self.inflight.set_function(inflight)
        self.stored_bytes.set_function(lambda: stored()[0])
        self.stored_objects.set_function(lambda: stored()[1])
        self.quarantined.set_function(quarantined)


class BatchApp:
    """Answers routers."""

    def __init__(
        self,
        files: FilesApi,
        batches: BatchesApi,
        responses: StoredResponses,
        keys: KeyRing,
        metrics: BatchMetrics,
        is_ready: Callable[[], bool],
    ) -> None:
        self._files = files
        self._batches = batches
        self._responses = responses
        self._keys = keys
        self._metrics = metrics
        self._is_ready = is_ready
        self._downloads = OwnerSlots(MAX_DOWNLOADS)
        self._asked = OwnerSlots(MAX_RECORDS_ASKED)
        self._reading = OwnerTurns(MAX_RECORDS_READ)
        self._listings = OwnerSlots(MAX_LISTINGS)
        self._listing = OwnerTurns(MAX_LISTED_AT_ONCE)
        self._record_bytes: collections.Counter[str] = collections.Counter()
        """Of records that are being received or written, by account."""

    def asgi(self) -> Starlette:
        """Return the application."""
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._exposition),
                self._route("/v1/files", GET=self._list_files, POST=self._upload),
                self._route("/v1/files/{id}", GET=self._file, DELETE=self._delete_file),
                self._route("/v1/files/{id}/content", GET=self._content),
                self._route("/v1/batches", GET=self._list_batches, POST=self._create_batch),
                self._route("/v1/batches/{id}", GET=self._batch),
                self._route("/v1/batches/{id}/cancel", POST=self._cancel),
                self._route(
                    f"{RESPONSES_PATH}/{{id}}",
                    GET=self._response,
                    POST=self._add_response,
                    PUT=self._finish_response,
                    DELETE=self._delete_response,
                ),
                self._route(HEARTBEATS_PATH, POST=self._begin_heartbeat, PUT=self._beat),
            ],
            exception_handlers={ApiError: _refuse, HTTPException: _refuse_route, Exception: _fail},
        )
        app.router.redirect_slashes = False
        return app

    def _route(self, path: str, **handlers: Handler) -> Route:
        async def answer(request: Request) -> Response:
            if not self._keys.accepts(request.headers.get("authorization")):
                raise Unauthorized("missing or wrong key: only routers of this installation may ask")
            name = request.headers.get(ACCOUNT)
            if name is None:
                raise BadRequest(f"the header {ACCOUNT} is missing")
            return await handlers[request.method](request, account_name(name))

        route = Route(path, answer, methods=list(handlers), include_in_schema=False)
        assert route.methods is not None
        route.methods.discard("HEAD")  # comes with GET
        return route

    # probes

    async def _health(self, _: Request) -> Response:
        return _json(b"{}")

    async def _ready(self, _: Request) -> Response:
        return _json(b"{}", 200 if self._is_ready() else 503)

    async def _exposition(self, _: Request) -> Response:
        return Response(
            generate_latest(self._metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    # files

    async def _list_files(self, request: Request, account: str) -> Response:
        async with self._list(owner := owner_of(account)):
            return _encoded(await self._files.list(owner, _query(request)))

    async def _file(self, request: Request, account: str) -> Response:
        return _encoded(await self._files.get(owner_of(account), request.path_params["id"]))

    async def _delete_file(self, request: Request, account: str) -> Response:
        return _encoded(await self._files.delete(owner_of(account), request.path_params["id"]))

    async def _upload(self, request: Request, account: str) -> Response:
        length = request.headers.get("content-length", "0")
        boundary = boundary_of(request.headers.get("content-type", "").encode("latin-1"))
        declared = int(length[:19]) if length.isascii() and length.isdigit() else 0
        owner = owner_of(account)
        upload = self._files.begin(owner, boundary, declared)
        has_room = asyncio.Event()
        try:
            received = 0
            async for piece in request.stream():
                received += len(piece)
                if received > upload.max_bytes:
                    raise upload.too_large()
                upload.write(piece)
                has_room.clear()
                if upload.is_full(has_room.set):
                    await has_room.wait()
            return _encoded(await self._files.create(owner, upload))
        except ClientDisconnect:
            raise BadRequest("the upload was cut") from None
        finally:
            upload.abort()

    async def _content(self, request: Request, account: str) -> Response:
        owner = owner_of(account)
        if not self._downloads.take(owner):
            raise self._downloads.refusal(owner, "sends", "files")
        try:
            content = await self._files.content(owner, request.path_params["id"])
            first = await anext(content.chunks, b"")  # a storage that fails is refused with a status
        except BaseException:
            self._downloads.release(owner)
            raise
        return _Download(content, first, lambda: self._downloads.release(owner))

    @contextlib.asynccontextmanager
    async def _list(self, owner: str) -> AsyncIterator[None]:
        """Make a list inside the block, when it is its owner's turn."""
        if not self._listings.take(owner):
            raise self._listings.refusal(owner, "makes", "lists")
        try:
            async with self._listing.turn(owner):
                yield
        finally:
            self._listings.release(owner)

    # batches

    async def _list_batches(self, request: Request, account: str) -> Response:
        async with self._list(owner := owner_of(account)):
            return _encoded(await self._batches.list(owner, _query(request)))

    async def _create_batch(self, request: Request, account: str) -> Response:
        body = await _body(request, MAX_BODY_BYTES)
        return _encoded(await self._batches.create(owner_of(account), account, body))

    async def _batch(self, request: Request, account: str) -> Response:
        return _encoded(await self._batches.get(owner_of(account), request.path_params["id"]))

    async def _cancel(self, request: Request, account: str) -> Response:
        return _encoded(await self._batches.cancel(owner_of(account), request.path_params["id"]))

    # responses

    async def _response(self, request: Request, account: str) -> Response:
        response_id, owner = request.path_params["id"], owner_of_responses(account)
        if not self._asked.take(owner):
            raise self._asked.refusal(owner, "asks for", "responses")
        async with contextlib.AsyncExitStack() as turn:
            turn.callback(self._asked.release, owner)
            await turn.enter_async_context(self._reading.turn(owner))
            if await request.is_disconnected():  # its router has given up while it waited
                raise Unavailable("the request has ended", retry_after_s=1.0)
            found = await self._responses.find(owner, response_id)
            if found is None:
                raise response_not_found(response_id)
            return _Record(msgspec.json.encode(found), turn.pop_all().aclose)

    async def _add_response(self, request: Request, account: str) -> Response:
        async def add(record: StoredResponse) -> Response:
            await self._responses.add(owner_of_responses(account), request.path_params["id"], record)
            return _json(b"{}")

        return await self._with_record(request, account, add)

    async def _finish_response(self, request: Request, account: str) -> Response:
        async def finish(record: StoredResponse) -> Response:
            response_id = request.path_params["id"]
            now = await self._responses.finish(owner_of_responses(account), response_id, record)
            if now is None:
                raise response_not_found(response_id)
            return _encoded(now)

        return await self._with_record(request, account, finish)

    async def _delete_response(self, request: Request, account: str) -> Response:
        response_id = request.path_params["id"]
        if not await self._responses.remove(owner_of_responses(account), response_id):
            raise response_not_found(response_id)
        return _json(b"{}")

    async def _with_record(
        self, request: Request, account: str, use: Callable[[StoredResponse], Awaitable[Response]]
    ) -> Response:
        """Receive a record, and use it, within the memory of all records, and the account's share of it."""
        length = request.headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 12 else -1
        if size < 0:
            raise BadRequest("content-length is required")
        if size > MAX_RECORD_BYTES:
            raise PayloadTooLarge(f"a response and its conversation exceed {MAX_RECORD_BYTES} bytes")
        held, own = self._record_bytes.total(), self._record_bytes[account]
        free = MAX_RECORD_BYTES - held - size
        if (held and free < 0) or (own and own + size > SHARE_OF_FREE * free):
            raise Unavailable("too many responses are being stored; retry later", retry_after_s=1.0)
        self._record_bytes[account] += size
        try:
            return await use(_decoded(await _body_in_time(request, size), StoredResponse))
        finally:
            self._record_bytes[account] -= size
            if not self._record_bytes[account]:
                del self._record_bytes[account]

    # heartbeats

    async def _begin_heartbeat(self, _: Request, _account: str) -> Response:
        return _encoded(Heartbeat(await self._responses.heartbeats.begin()))

    async def _beat(self, request: Request, _account: str) -> Response:
        beats = _decoded(await _body(request, MAX_BODY_BYTES), Heartbeats)
        await self._responses.heartbeats.beat(beats.ids)
        return _json(b"{}")


class _Record(StreamingResponse):
    """A response on its way to a router, as that reads it; `on_end` is called once."""

    def __init__(self, record: bytes, on_end: Callable[[], Awaitable[None]]) -> None:
        self._on_end = on_end
        super().__init__(pieces(record), headers={"content-length": str(len(record))}, media_type=_JSON)

    async def __call__(self, *args: Any) -> None:
        try:
            async with asyncio.timeout(RECORD_S):
                await super().__call__(*args)
        except TimeoutError:
            log.warning("a router has not taken a response in time")
        finally:
            await self._on_end()


class _Download(StreamingResponse):
    """A file on its way to a router. It ends once, also if the client has left before the first piece."""

    def __init__(self, content: FileContent, first: bytes, on_end: Callable[[], None]) -> None:
        """`first` is what was read of the file already."""
        self._chunks = content.chunks
        self._first = first
        self._on_end = on_end
        name = quote(content.file.filename, safe="")
        headers = {
            "x-content-type-options": "nosniff",
            "content-disposition": f"attachment; filename*=UTF-8''{name}",
        }
        super().__init__(self._pieces(), headers=headers, media_type="application/octet-stream")

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield self._first
        async for chunk in self._chunks:
            yield chunk

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._on_end()
            await self._chunks.aclose()


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.http_status, error.headers() | error.retry_advice(), _JSON)


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Refuse a path or a method that there is none of."""
    assert isinstance(error, HTTPException)
    refusal: ApiError = NotFound(f"no route for {request.method[:16]} {request.url.path[:256]}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "").split(", ")
        refusal = MethodNotAllowed(f"{request.method[:16]} is not allowed for this path", allowed)
    return await _refuse(request, refusal)


async def _fail(request: Request, error: Exception) -> Response:
    log.error("%s %r failed", request.method, request.url.path[:256], exc_info=error)
    return await _refuse(request, InternalError("internal error"))


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type=_JSON)


def _encoded(value: Any) -> Response:
    return _json(msgspec.json.encode(value))


def _query(request: Request) -> dict[str, str]:
    return dict(request.query_params)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not as documented: {str(error)[:200]}") from None


async def _body_in_time(request: Request, limit: int) -> bytes:
    """Read a request's body.

    Raises:
        RequestTimeout: it has not arrived within `RECORD_S`; and what `_body` raises.
    """
    try:
        async with asyncio.timeout(RECORD_S):
            return await _body(request, limit)
    except TimeoutError:
        raise RequestTimeout("the request body did not arrive in time") from None


async def _body(request: Request, limit: int) -> bytes:
    """Read a request's body.

    Raises:
        PayloadTooLarge: it is longer than `limit` bytes.
        BadRequest: it was cut.
    """
    try:
        body = await joined(request.stream(), limit)
    except ClientDisconnect:
        raise BadRequest("the request was cut") from None
    if body is None:
        raise PayloadTooLarge(f"the request body exceeds the limit of {limit} bytes")
    return body
