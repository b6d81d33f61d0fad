"""The routes of files and batches, from a request's head to its answer.

Owns: paths and methods, the tasks that answer. Must not know: what is stored.
Invariant: each request is answered once, unless its client has disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable
from typing import Any, Final
from urllib.parse import parse_qsl, quote

import msgspec

from argosy_protocol.errors import ApiError, Forbidden, InternalError
from argosy_router.auth.accounts import ANONYMOUS, Account
from argosy_router.batch.batches_api import BatchesApi
from argosy_router.batch.content_stream import PendingAnswer
from argosy_router.batch.file_upload import FileUpload
from argosy_router.batch.files_api import FileContent, FilesApi
from argosy_router.batch.multipart import boundary_of
from argosy_router.http.messages import Request
from argosy_router.http.server_interface import Client
from argosy_router.proxy.accounting.request_accounting import RequestAccounting
from argosy_router.proxy.downstream.api_shape import error_body, id_headers
from argosy_router.proxy.downstream.error_headers import error_headers
from argosy_router.proxy.request.call_decoding import no_route, require_json, require_method
from argosy_router.storage.object_store import owner_of
from argosy_router.storage.owner_slots import OwnerSlots

log = logging.getLogger(__name__)

MAX_PENDING: Final = 1024
"""Requests of these routes at a time. Owners share them, and the downloads among them (`OwnerSlots`)."""
MAX_DOWNLOADS: Final = 128
"""Contents of files on their way to clients, each of which holds a megabyte while its client does not read."""
_JSON: Final = b"content-type: application/json\r\n"
_PATH: Final = re.compile(rb"/v1/(files|batches)(?:/([^/]{1,128})(?:/(content|cancel))?)?")


class BatchRoutes:
    """Answers requests of the main port for files and batches."""

    def __init__(self, files: FilesApi, batches: BatchesApi, accounting: RequestAccounting) -> None:
        self._files = files
        self._batches = batches
        self._accounting = accounting
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending = OwnerSlots(MAX_PENDING)
        self._downloads = OwnerSlots(MAX_DOWNLOADS)

    def on_head(self, request: Request, account: Account) -> bool:
        if (request.method, request.path) != (b"POST", b"/v1/files"):
            return request.method == b"POST" and request.path == b"/v1/batches"
        # A browser asks nobody before it sends a form.
        if _is_of_another_site(request, account) and not request.is_from_allowed_page:
            raise Forbidden("files cannot be uploaded by a web page of another site")
        boundary = boundary_of(request.header(b"content-type") or b"")
        length = request.header(b"content-length") or b"0"  # digits: the reader has checked it
        request.sink = self._files.begin(owner_of(account.name), boundary, int(length[:19]))
        return True

    def on_request(self, client: Client, request: Request, account: Account, request_id: bytes) -> None:
        owner = owner_of(account.name)
        if not self._pending.take(owner):
            if request.sink is not None:
                request.sink.abort()
            raise self._pending.refusal(owner, "has", "requests for files and batches")
        answer = PendingAnswer(client)
        task = asyncio.create_task(
            self._answer(answer, request, account, request_id), name="files and batches"
        )
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_answered(task, owner))

    def _on_answered(self, task: asyncio.Task[None], owner: str) -> None:
        self._tasks.discard(task)
        self._pending.release(owner)

    async def close(self) -> None:
        """Cancel what has not been answered, and end uploads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._files.close()

    async def _answer(
        self, answer: PendingAnswer, request: Request, account: Account, request_id: bytes
    ) -> None:
        ids = id_headers(request_id, request.path)
        try:
            result = await self._result(request, account)
            if isinstance(result, FileContent):
                await self._download(answer, result, owner_of(account.name), ids)
            else:
                answer.respond(200, _JSON + ids, msgspec.json.encode(result))
        except ApiError as error:
            self._refuse(answer, error, request, request_id)
        except Exception:
            log.exception("request %s failed", request_id.decode())
            self._refuse(answer, InternalError("internal error"), request, request_id)

    async def _download(self, answer: PendingAnswer, content: FileContent, owner: str, ids: bytes) -> None:
        downloads = self._downloads
        if not downloads.take(owner):
            raise downloads.refusal(owner, "sends", "files")
        name = quote(content.file.filename, safe="")
        headers = b"content-type: application/octet-stream\r\nx-content-type-options: nosniff\r\n"
        headers += b"content-disposition: attachment; filename*=UTF-8''%b\r\n" % name.encode()
        try:
            await answer.stream(headers + ids, content.chunks)
        finally:
            downloads.release(owner)

    def _refuse(self, answer: PendingAnswer, error: ApiError, request: Request, request_id: bytes) -> None:
        self._accounting.count_rejection(request_id, error.http_status)
        headers = error_headers(error) + id_headers(request_id, request.path)
        answer.respond(error.http_status, headers, error_body(error, request.path))

    def _result(self, request: Request, account: Account) -> Awaitable[Any]:
        """Return what answers a request."""
        path = _PATH.fullmatch(request.path)
        if path is None:
            raise no_route(request)
        kind, object_id, action = path[1], (path[2] or b"").decode("latin-1"), path[3]
        owner = owner_of(account.name)
        if kind == b"files":
            return self._of_files(request, owner, object_id, action)
        return self._of_batches(request, owner, account, object_id, action)

    def _of_files(self, request: Request, owner: str, file_id: str, action: bytes | None) -> Awaitable[Any]:
        if action == b"cancel":
            raise no_route(request)
        if not file_id:
            if require_method(request, b"GET", b"POST") == b"GET":
                return self._files.list(owner, _query(request))
            assert isinstance(request.sink, FileUpload), "`on_head` has made it"
            return self._files.create(owner, request.sink)
        if action == b"content":
            require_method(request, b"GET")
            return self._files.content(owner, file_id)
        if require_method(request, b"GET", b"DELETE") == b"GET":
            return self._files.get(owner, file_id)
        return self._files.delete(owner, file_id)

    def _of_batches(
        self, request: Request, owner: str, account: Account, batch_id: str, action: bytes | None
    ) -> Awaitable[Any]:
        if action == b"content":
            raise no_route(request)
        if not batch_id:
            if require_method(request, b"GET", b"POST") == b"GET":
                return self._batches.list(owner, _query(request))
            require_json(request)
            return self._batches.create(owner, account.name, request.body)
        if action == b"cancel":
            require_method(request, b"POST")
            return self._batches.cancel(owner, batch_id)
        require_method(request, b"GET")
        return self._batches.get(owner, batch_id)


def _is_of_another_site(request: Request, account: Account) -> bool:
    """Whether a web page of another site has made a browser send a request."""
    site = request.header(b"sec-fetch-site")
    if site is not None or account is not ANONYMOUS:  # a page that knows a key cannot send it unasked
        return site == b"cross-site"
    # Browsers send that header over TLS and to localhost only, and the origin with every form.
    origin = request.header(b"origin")
    return origin is not None and origin.partition(b"://")[2] != request.header(b"host")


def _query(request: Request) -> dict[str, str]:
    text = request.target.partition(b"?")[2].decode("latin-1")
    return dict(parse_qsl(text, max_num_fields=32)) if text.count("&") < 32 else {}
