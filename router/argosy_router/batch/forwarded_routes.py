"""/v1/files and /v1/batches, forwarded to `argosy batch` on behalf of the account.

Owns: what is forwarded of a request and of its answer, and how much of it is held. Must not know: what it means.
Invariant: each request is answered once, unless its client has disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

from argosy_protocol.errors import ApiError, BadRequest, ErrorReason, Forbidden, InternalError
from argosy_protocol.owner_slots import OwnerSlots
from argosy_router.auth.accounts import ANONYMOUS, Account
from argosy_router.batch.batch_client import BatchClient, error_of, read_all
from argosy_router.batch.content_stream import PendingAnswer
from argosy_router.http.messages import Request
from argosy_router.http.server_interface import Client
from argosy_router.http.sse import Pieces
from argosy_router.proxy.downstream.api_shape import error_body, id_headers
from argosy_router.proxy.downstream.error_headers import error_headers
from argosy_router.proxy.request.call_decoding import require_json

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

MAX_PENDING: Final = 1024
"""Requests of these routes at a time. Accounts share them (`OwnerSlots`)."""
MAX_UPLOADS: Final = 64
"""Uploads of this router at a time, each of which holds a megabyte. Accounts share them."""
MAX_HELD_BYTES: Final = 1024 * 1024
"""Of an upload, with one piece of the connection more."""
MAX_UPLOAD_BYTES: Final = 1 << 41
"""The program has a limit of its own, below this one."""
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Of an answer that is no file."""
_FILES: Final = b"/v1/files"
_BATCHES: Final = b"/v1/batches"
_RETURNED: Final = (
    "allow",
    "content-disposition",
    "content-type",
    "retry-after",
    "retry-after-ms",
    "x-content-type-options",
    "x-should-retry",
)

CountRejection = Callable[[bytes, int, ErrorReason], None]


class ForwardedUpload:
    """The body of an upload on its way to the program. A `BodySink`."""

    max_bytes = MAX_UPLOAD_BYTES

    def __init__(
        self, program: BatchClient, account: str, headers: dict[str, str], on_end: Callable[[], None]
    ) -> None:
        self._on_end = on_end
        self._held = Pieces()
        self._has_changed = asyncio.Event()
        self._is_complete = self._is_aborted = False
        self._resume: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._send(program, account, headers), name="file upload")
        self._task.add_done_callback(self._on_sent)

    def write(self, data: bytes) -> None:
        if self._is_aborted:
            raise BadRequest("the upload has ended")
        if self._task.done():  # the program has refused the rest
            status, _, body = self._task.result()
            raise error_of(status, body)
        self._held.add(data)
        self._has_changed.set()

    def is_full(self, resume: Callable[[], None]) -> bool:
        if self._held.size <= MAX_HELD_BYTES or self._task.done():
            return False
        self._resume = resume
        return True

    def abort(self) -> None:
        if not self._is_complete and not self._is_aborted:
            self._is_aborted = True
            self._task.cancel()

    async def finish(self) -> tuple[int, bytes, bytes]:
        """Return status, header lines and body of the program's answer, once all has been sent."""
        self._is_complete = True
        self._has_changed.set()
        return await self._task

    async def _send(
        self, program: BatchClient, account: str, headers: dict[str, str]
    ) -> tuple[int, bytes, bytes]:
        async with program.forward("POST", _FILES.decode(), account, headers, self._pieces()) as response:
            return response.status, _lines(response), await read_all(response, MAX_ANSWER_BYTES)

    async def _pieces(self) -> AsyncIterator[bytes]:
        while True:
            while self._held.size:
                piece = self._held.joined()
                self._held.clear()
                self._resume_reading()
                yield piece
            if self._is_complete:
                return
            self._has_changed.clear()
            await self._has_changed.wait()

    def _on_sent(self, task: asyncio.Task[tuple[int, bytes, bytes]]) -> None:
        if not task.cancelled():
            task.exception()  # `write` and `finish` raise it, unless the client is gone
        self._held.clear()
        self._resume_reading()
        self._on_end()

    def _resume_reading(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()


class ForwardedRoutes:
    """Answers requests of the main port for files and batches."""

    def __init__(self, program: BatchClient, count_rejection: CountRejection) -> None:
        """`count_rejection` counts a refusal by its request's id, status and reason."""
        self._program = program
        self._count_rejection = count_rejection
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending = OwnerSlots(MAX_PENDING)
        self._uploads = OwnerSlots(MAX_UPLOADS)

    def on_head(self, request: Request, account: Account) -> bool:
        if (request.method, request.path) != (b"POST", _FILES):
            return request.method == b"POST" and request.path == _BATCHES
        # A browser asks nobody before it sends a form.
        if _is_of_another_site(request, account) and not request.is_from_allowed_page:
            raise Forbidden("files cannot be uploaded by a web page of another site")
        if not self._uploads.take(account.name):
            raise self._uploads.refusal(account.name, "receives", "files")
        name = account.name
        try:
            request.sink = ForwardedUpload(
                self._program, name, _described(request), lambda: self._uploads.release(name)
            )
        except BaseException:
            self._uploads.release(name)
            raise
        return True

    def on_request(self, client: Client, request: Request, account: Account, request_id: bytes) -> None:
        if not self._pending.take(account.name):
            if request.sink is not None:
                request.sink.abort()
            raise self._pending.refusal(account.name, "has", "requests for files and batches")
        answer = PendingAnswer(client)
        work = self._forward(answer, request, account.name, request_id)
        task = asyncio.create_task(work, name="files and batches")
        if request.method == b"GET":  # what changes something is asked to its end, whoever waits for it
            answer.on_lost = task.cancel
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_answered(task, account.name))

    def _on_answered(self, task: asyncio.Task[None], name: str) -> None:
        self._tasks.discard(task)
        self._pending.release(name)

    async def close(self) -> None:
        """Cancel what has not been answered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(
        self, answer: PendingAnswer, request: Request, account: str, request_id: bytes
    ) -> None:
        ids = id_headers(request_id, request.path)
        try:
            if isinstance(request.sink, ForwardedUpload):
                status, lines, body = await request.sink.finish()
                self._respond(answer, status, lines + ids, body, request_id)
                return
            if request.path == _BATCHES and request.method == b"POST":
                require_json(request)
            async with self._program.forward(
                request.method.decode("latin-1"),
                request.target.decode("latin-1"),
                account,
                _described(request),
                request.body,
            ) as response:
                if response.status == 200 and "content-disposition" in response.headers:
                    await answer.stream(_lines(response) + ids, _chunks(response))
                    return
                body = await read_all(response, MAX_ANSWER_BYTES)
                self._respond(answer, response.status, _lines(response) + ids, body, request_id)
        except ApiError as error:
            self._refuse(answer, error, request, request_id)
        except Exception:
            log.exception("request %s failed", request_id.decode())
            self._refuse(answer, InternalError("internal error"), request, request_id)

    def _respond(
        self, answer: PendingAnswer, status: int, lines: bytes, body: bytes, request_id: bytes
    ) -> None:
        if status >= 400:
            self._count_rejection(request_id, status, ErrorReason.read(body))
        answer.respond(status, lines, body)

    def _refuse(self, answer: PendingAnswer, error: ApiError, request: Request, request_id: bytes) -> None:
        headers = error_headers(error) + id_headers(request_id, request.path)
        self._respond(answer, error.http_status, headers, error_body(error, request.path), request_id)


def _described(request: Request) -> dict[str, str]:
    """The headers that describe a request's body. The length of one that is not there yet lets it be refused early."""
    names = (b"content-type",) if request.body else (b"content-type", b"content-length")
    values = ((name.decode(), request.header(name)) for name in names)
    return {name: value.decode("latin-1") for name, value in values if value is not None}


def _lines(response: aiohttp.ClientResponse) -> bytes:
    """The header lines of an answer that the client gets."""
    return b"".join(
        f"{name}: {response.headers[name]}\r\n".encode("latin-1", "replace")
        for name in _RETURNED
        if name in response.headers
    )


async def _chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    async for chunk in response.content.iter_any():
        yield chunk


def _is_of_another_site(request: Request, account: Account) -> bool:
    """Whether a web page of another site has made a browser send a request."""
    site = request.header(b"sec-fetch-site")
    if site is not None or account is not ANONYMOUS:  # a page that knows a key cannot send it unasked
        return site == b"cross-site"
    # Browsers send that header over TLS and to localhost only, and the origin with every form.
    origin = request.header(b"origin")
    return origin is not None and origin.partition(b"://")[2] != request.header(b"host")
