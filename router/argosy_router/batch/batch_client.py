"""The connection to `argosy batch`.

Owns: its key, deadlines, and the breaker. Must not know: what is asked.
Invariant: after some failures in a row nothing is asked for a moment, and then one request tries: while the program
hangs, requests that need it fail at once instead of gathering. A request that fails while others are answered is none
of these failures: accounts take turns at the program, and one with very many requests waits too long for its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from argosy_protocol import object_ids
from argosy_protocol.batch_program import (
    ACCOUNT,
    PIECE_BYTES,
    RESPONSES_PATH,
    account_value,
    joined,
    pieces,
)
from argosy_protocol.errors import (
    ApiError,
    BadRequest,
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
from argosy_protocol.response_object import ID_PREFIX

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
        nothing = object_ids.new_id(ID_PREFIX, time.time(), 3600.0)
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
