"""The way to `argosy batch`, which keeps files, batches and stored responses: the connection, and /v1/files and
/v1/batches, forwarded on behalf of the account.

Owns: the connection's key, deadlines, and breaker; what is forwarded of a request and of its answer, and how much of it
is held. Must not know: what it means, what is kept there, and where.
Invariants: a storage that hangs holds up no stream, and takes no more than a bounded memory: after some failures in a
row nothing is asked for a moment, and then one request tries, so that requests that need the program fail at once
instead of gathering. A request that fails while others are answered is none of these failures: accounts take turns at
the program, and one with very many requests waits too long for its own. Each request is answered once, unless its
client has disconnected; a file goes to the client at its pace, and at most one piece waits for it.
"""

# Not compiled: waits for the storage.

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from argosy_protocol import batch_program
from argosy_protocol.batch_program import ACCOUNT, PIECE_BYTES, RESPONSES_PATH, account_value, joined, pieces
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
    ErrorReason,
    ErrorResponse,
    Forbidden,
    InternalError,
    NotFound,
    PayloadTooLarge,
    ResponseNotFound,
    StorageFull,
    StorageUnavailable,
    TooManyRequests,
    Unavailable,
)
from argosy_protocol.program.process import OwnerSlots
from argosy_protocol.responses import ID_PREFIX
from argosy_router.auth.accounts import ANONYMOUS, Account
from argosy_router.http.messages import Client, Request
from argosy_router.http.sse import Pieces
from argosy_router.proxy.answer import error_body, error_headers, id_headers
from argosy_router.proxy.call import account_of, require_json

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

CONNECT_S: Final = 5.0
CALL_S: Final = 40.0
"""Deadline of one call: a little more than the program gives its storage."""
FORWARD_S: Final = 120.0
"""How long the program may take for the next step of a forwarded request: to take a piece of a body, to begin its
answer, to send the next piece of that. The pace of a client does not count. A listing is many calls of the storage."""
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
MAX_REFUSAL_BYTES: Final = 64 * 1024
MAX_FAILURES: Final = 3
"""In a row; then nothing is asked for `OPEN_S`."""
OPEN_S: Final = 2.0
_ERRORS: Final[Mapping[int, type[ApiError]]] = {
    400: BadRequest,
    403: Forbidden,
    404: NotFound,
    413: PayloadTooLarge,
    429: TooManyRequests,
}
_decode_error: Final = msgspec.json.Decoder(ErrorResponse).decode


class ProgramAnswer(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes


def error_of(status: int, body: bytes) -> ApiError:
    """The error that an answer of the program stands for."""
    try:
        error = _decode_error(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return StorageUnavailable() if status >= 500 else InternalError("internal error")
    if status == 507:
        return StorageFull()
    if status == 503 and error.code == StorageUnavailable.default_code:
        unavailable = StorageUnavailable()
        unavailable.message = error.message
        return unavailable
    if status == 503:  # there is too much of something, perhaps of one account
        return Unavailable(error.message, param=error.param, code=error.code, retry_after_s=1.0)
    if error.param == "response_id" and status == 404:
        return ResponseNotFound(error.message, param=error.param)
    made = _ERRORS.get(status)
    if made is not None:
        return made(error.message, param=error.param, code=error.code)
    return InternalError("internal error") if status == 500 else StorageUnavailable()


class BatchClient:
    """`argosy batch`, as one router asks it."""

    def __init__(
        self,
        url: str,
        keys: Callable[[], Sequence[str]],
        *,
        call_s: float = CALL_S,
        forward_s: float = FORWARD_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys` are those that are valid now, newest first."""
        self._url = url.rstrip("/")
        self._keys = keys
        self._call_s = call_s
        self._forward_s = forward_s
        self._now = now
        self._accepted = ""
        """The key that it accepted last, which is tried first: it may not know the newest yet."""
        self._failures = 0
        self._num_answers = 0
        self._open_until = 0.0
        self._is_trying = False
        """Whether one request tries whether the program answers again."""
        self._session: aiohttp.ClientSession | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it has failed some times in a row, and not answered since."""
        return self._failures >= MAX_FAILURES

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: the program is not asked."""
        return self.has_failed and (self._is_trying or self._now() < self._open_until)

    async def call(
        self,
        method: str,
        path: str,
        account: str,
        body: bytes = b"",
        reserve: Callable[[int], None] | None = None,
    ) -> ProgramAnswer:
        """Ask, and read the whole answer.

        Args:
            reserve: called with the bytes of the answer before they are read; may raise ApiError.

        Raises:
            ApiError: the program refuses, or does not answer in time.
        """
        with self._watched() as succeed:
            async with asyncio.timeout(self._call_s):
                async with self._asked(method, path, account, {}, body) as response:
                    if reserve is not None and response.status < 400:
                        reserve(_length_of(response))
                    answer = ProgramAnswer(response.status, await read_all(response))
            if answer.status >= 400:
                raise error_of(*answer)
            succeed()
            return answer

    @contextlib.asynccontextmanager
    async def forward(
        self,
        method: str,
        target: str,
        account: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterator[bytes],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Forward a request; the answer is read inside the block, at any pace.

        Raises:
            StorageUnavailable: the program does not answer.
            Unavailable: it has no room for the request.
        """
        if not isinstance(body, bytes) and (self.has_failed or len(self._keys()) > 1):
            await self._ask_whether_ready(account)
        with self._watched() as succeed:
            async with asyncio.timeout(self._forward_s) as deadline:
                data = body if isinstance(body, bytes) else self._timed(body, deadline)
                async with self._asked(method, target, account, headers, data) as response:
                    if response.status == 503:
                        raise error_of(503, await read_all(response, MAX_REFUSAL_BYTES))
                    if not (response.status == 200 or 400 <= response.status < 600):
                        raise StorageUnavailable
                    deadline.reschedule(None)
                    succeed()
                    yield response

    async def _ask_whether_ready(self, account: str) -> None:
        """Ask for something small before a body that can be sent once only, and at the pace of its client: it finds the
        key that the program accepts, and is what tries after failures.

        Raises:
            StorageUnavailable: it is not ready.
        """
        nothing = batch_program.new_id(ID_PREFIX, time.time(), 3600.0)
        with contextlib.suppress(ResponseNotFound):
            await self.call("GET", f"{RESPONSES_PATH}/{nothing}", account)

    async def _timed(self, body: AsyncIterator[bytes], deadline: asyncio.Timeout) -> AsyncIterator[bytes]:
        """Yield a body's pieces; the deadline counts while the program has one, or has all of them."""
        now = asyncio.get_running_loop().time
        deadline.reschedule(None)
        async for piece in body:
            deadline.reschedule(now() + self._forward_s)
            yield piece
            deadline.reschedule(None)
        deadline.reschedule(now() + self._forward_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        method: str,
        target: str,
        account: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterator[bytes],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        from yarl import URL

        url = URL(self._url + target, encoded=True)
        given = {**headers, ACCOUNT: account_value(account)}
        keys = sorted(self._keys(), key=lambda key: key != self._accepted)
        for number, key in enumerate(keys):
            data: bytes | AsyncIterator[bytes] | None = body or None
            if isinstance(body, bytes) and len(body) > PIECE_BYTES:
                data, given["content-length"] = pieces(body), str(len(body))
            async with self._open_session().request(
                method,
                url,
                headers={**given, "authorization": f"Bearer {key}"},
                data=data,
                allow_redirects=False,
            ) as response:
                if response.status == 401:
                    if number + 1 < len(keys) and isinstance(body, bytes):
                        continue
                    self._accepted = ""
                    log.error("argosy batch does not accept this router's key: both need the same fleet key")
                    raise StorageUnavailable
                self._accepted = key
                yield response
                return
        raise StorageUnavailable

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._forward_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Callable[[], None]]:
        """Ask unless the breaker is open, and count failures. What is yielded is called once the program has answered:
        the rest may take as long as a client does."""
        import aiohttp

        if self.is_open:
            raise StorageUnavailable
        is_trial = self.has_failed
        num_before = self._num_answers
        self._is_trying = self._is_trying or is_trial

        def end_trial() -> None:
            nonlocal is_trial
            if is_trial:
                is_trial = self._is_trying = False

        def succeed() -> None:
            self._failures = 0
            self._num_answers += 1
            end_trial()

        try:
            yield succeed
        except StorageFull:  # it reads, and deletes
            succeed()
            raise
        except StorageUnavailable:
            self._failed(num_before)
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._failed(num_before)
            log.error("argosy batch: %s: %s", type(error).__name__, str(error)[:200])
            raise StorageUnavailable from error
        except ApiError:
            succeed()
            raise
        finally:
            end_trial()

    def _failed(self, num_before: int) -> None:
        """Count a failure, unless the program has given further answers since there were so many."""
        if self._num_answers != num_before:
            return
        self._failures += 1
        if self.has_failed:
            self._open_until = self._now() + OPEN_S


def _length_of(response: aiohttp.ClientResponse) -> int:
    """Return the length of an answer's body. The program tells it of all answers that are no files.

    Raises:
        StorageUnavailable: it does not.
    """
    if response.content_length is None:
        raise StorageUnavailable
    return response.content_length


async def read_all(response: aiohttp.ClientResponse, limit: int = MAX_ANSWER_BYTES) -> bytes:
    """Read an answer's body.

    Raises:
        StorageUnavailable: it is longer than `limit` bytes.
    """
    body = await joined(response.content.iter_any(), limit)
    if body is None:
        raise StorageUnavailable
    return body


class ClientGone(Exception):
    """The client has disconnected."""


class PendingAnswer:
    """The client of a request that is answered later. A `ClientListener`."""

    def __init__(self, client: Client) -> None:
        self._client: Client | None = client
        self.on_lost: Callable[[], object] = lambda: None
        """Called when the client has disconnected, also after the answer."""
        self._may_write = asyncio.Event()
        self._may_write.set()
        client.attach(self)

    def on_client_lost(self) -> None:
        self._client = None
        self._may_write.set()
        self.on_lost()

    def on_client_paused(self) -> None:
        self._may_write.clear()

    def on_client_resumed(self) -> None:
        self._may_write.set()

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """Answer, unless the client is gone."""
        client, self._client = self._client, None
        if client is not None:
            client.respond(status, headers, body)

    async def stream(self, headers: bytes, chunks: AsyncGenerator[bytes, None]) -> None:
        """Answer with status 200 and a body in pieces; cut the connection if `chunks` raises after the first one.

        Raises:
            Exception: of `chunks`, before the first piece; nothing was sent.
        """
        async with aclosing(chunks):
            first = await anext(chunks, b"")
            if not first:
                self.respond(200, headers, b"")
                return
            try:
                self._writable().start(200, headers, first)
                async for chunk in chunks:
                    await self._may_write.wait()
                    self._writable().send(chunk)
                self._writable().finish()
            except ClientGone:
                return
            except Exception:
                if self._client is not None:
                    self._client.abort()
                raise
            finally:
                self._client = None

    def _writable(self) -> Client:
        if self._client is None:
            raise ClientGone
        return self._client


MAX_PENDING: Final = 1024
"""Requests of these routes at a time. Accounts share them (`OwnerSlots`)."""
MAX_UPLOADS: Final = 64
"""Uploads of this router at a time, each of which holds a megabyte. Accounts share them."""
MAX_HELD_BYTES: Final = 1024 * 1024
"""Of an upload, with one piece of the connection more."""
MAX_UPLOAD_BYTES: Final = 1 << 41
"""The program has a limit of its own, below this one."""
MAX_FORWARDED_BYTES: Final = 16 * 1024 * 1024
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
Refuse = Callable[[Client, Request, ApiError], None]
"""`RouterApplication.refuse`"""


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
            return response.status, _lines(response), await read_all(response, MAX_FORWARDED_BYTES)

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

    def on_head(self, request: Request) -> bool:
        account = account_of(request)
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

    def on_request(self, client: Client, request: Request) -> None:
        account = account_of(request)
        if not self._pending.take(account.name):
            if request.sink is not None:
                request.sink.abort()
            raise self._pending.refusal(account.name, "has", "requests for files and batches")
        answer = PendingAnswer(client)
        work = self._forward(answer, request, account.name)
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

    async def _forward(self, answer: PendingAnswer, request: Request, account: str) -> None:
        ids = id_headers(request.id, request.path)
        try:
            if isinstance(request.sink, ForwardedUpload):
                status, lines, body = await request.sink.finish()
                self._respond(answer, status, lines + ids, body, request.id)
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
                body = await read_all(response, MAX_FORWARDED_BYTES)
                self._respond(answer, response.status, _lines(response) + ids, body, request.id)
        except ApiError as error:
            self._refuse(answer, error, request)
        except Exception:
            log.exception("request %s failed", request.id.decode())
            self._refuse(answer, InternalError("internal error"), request)

    def _respond(
        self, answer: PendingAnswer, status: int, lines: bytes, body: bytes, request_id: bytes
    ) -> None:
        if status >= 400:
            self._count_rejection(request_id, status, ErrorReason.read(body))
        answer.respond(status, lines, body)

    def _refuse(self, answer: PendingAnswer, error: ApiError, request: Request) -> None:
        headers = error_headers(error) + id_headers(request.id, request.path)
        self._respond(answer, error.http_status, headers, error_body(error, request.path), request.id)


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
