"""The way to a router: requests of batches, on behalf of the accounts that made them, and a bound on the memory of
their answers, over all batches.

Owns: the connections and the key; how many bytes each answer holds, and which answers are read. Must not know: which
answers are final.
Invariant: a request that is given up (its task cancelled) has its connection closed, so that the router aborts it at
its replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from argosy_protocol.batch_program import (
    ACCOUNT,
    ACCOUNT_GONE,
    NO_ROOM,
    PIECE_BYTES,
    ROOM_PATH,
    RoomReport,
    account_value,
    joined,
    pieces,
)
from argosy_protocol.errors import ErrorResponse

MAX_HELD_BYTES: Final = 128 * 1024 * 1024
"""Twice the largest answer."""


SHARE_OF_FREE: Final = 3


class AnswerMemory:
    """Counts the bytes of answers that are held, and pauses those that would exceed the limit or their share.

    Invariants: the answer that has begun first is always read on, so that one is always completed. Half of the memory
    is kept for it, and the others share the other half: an account's answers may take three times as much as is free of
    it (Choudhury and Hahne, "Dynamic queue length thresholds"), and the first of them as much as is free. So answers
    that do not end, because their replica sends little by little, leave memory to those of other accounts. The limit is
    exceeded by no more than what of each answer comes at once: up to a megabyte, which the router withholds so that it
    can try another replica.
    """

    def __init__(self) -> None:
        self.held = 0
        """Bytes of all answers."""
        self._answers: dict[HeldAnswer, None] = {}
        """Answers with bytes, in the order in which they began."""
        self._of_account: dict[str, dict[HeldAnswer, None]] = {}
        """Those of each account."""
        self._bytes_of: Counter[str] = Counter()

    @contextlib.contextmanager
    def answer(self, account: str = "") -> Iterator[HeldAnswer]:
        """Hold one answer to a request of `account` inside the block."""
        answer = HeldAnswer(self, account)
        try:
            yield answer
        finally:
            answer.clear()

    def add(self, answer: HeldAnswer, size: int) -> None:
        """Count further bytes of an answer."""
        self._answers.setdefault(answer)
        self._of_account.setdefault(answer.account, {}).setdefault(answer)
        self._bytes_of[answer.account] += size
        self.held += size
        if not self._may_be_read(answer):
            answer.pause()

    def remove(self, answer: HeldAnswer, size: int) -> None:
        """Count an answer's bytes no more."""
        if answer not in self._answers:
            return
        self.held -= size
        del self._answers[answer]
        account = answer.account
        self._bytes_of[account] -= size
        del self._of_account[account][answer]
        if not self._of_account[account]:
            del self._of_account[account], self._bytes_of[account]
        for other in self._answers:
            if self._may_be_read(other):
                other.resume()

    def _may_be_read(self, answer: HeldAnswer) -> bool:
        first = next(iter(self._answers))
        if answer is first:
            return True
        free = MAX_HELD_BYTES // 2 - (self.held - first.size)
        if free < 0:
            return False
        if self._bytes_of[answer.account] <= SHARE_OF_FREE * free:
            return True
        return answer is next(iter(self._of_account[answer.account])) and answer.size <= free


class HeldAnswer:
    """The bytes of one answer, also if it is read again from another attempt."""

    def __init__(self, memory: AnswerMemory, account: str = "") -> None:
        self._memory = memory
        self.account = account
        self.size = 0
        """Bytes that are counted."""
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None
        self._is_paused = False
        self.was_paused = False
        """Whether the attempt that is read, or was read last, has been paused."""

    def reads(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Take what pauses and resumes the reading, until `stops_reading`."""
        self._pause, self._resume = pause, resume
        self.was_paused = False

    def stops_reading(self) -> None:
        """Note that the answer is complete, or its attempt over."""
        self._pause = self._resume = None
        self._is_paused = False

    def add(self, size: int) -> None:
        """Count further bytes."""
        self.size += size
        self._memory.add(self, size)

    def clear(self) -> None:
        """Count none, because they are written or dropped."""
        self.stops_reading()
        size, self.size = self.size, 0
        self._memory.remove(self, size)

    def pause(self) -> None:
        if self._pause is not None and not self._is_paused:
            self._is_paused = self.was_paused = True
            self._pause()

    def resume(self) -> None:
        if self._resume is not None and self._is_paused:
            self._is_paused = False
            self._resume()


log = logging.getLogger(__name__)

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
CONNECT_S: Final = 10.0
ROOM_S: Final = 5.0
MAX_ROOM_BYTES: Final = 4096
NOT_SENT: Final = -1
"""Status of a request that reached no router."""
CUT: Final = 0
"""Status of a request whose answer was cut, or too long."""
CUT_UNREAD: Final = -2
"""Status of a request whose answer was cut after it was not read on for a while, for want of memory here."""
_decode_error: Final = msgspec.json.Decoder(ErrorResponse).decode
_decode_room: Final = msgspec.json.Decoder(RoomReport).decode


class AccountGone(Exception):
    """No key has the account now; the key file may be read again."""


class NoRoom(Exception):
    """The router has no room for requests of batches of this model now."""


class Attempt(NamedTuple):
    """One answer."""

    status: int
    retry_after_s: float
    request_id: str
    body: bytes


class RouterClient:
    """Asks one router, or what stands before several. Use it as a context manager."""

    def __init__(self, url: str, keys: Callable[[], Sequence[str]]) -> None:
        """`keys` are those that are valid now, newest first; a router may not know the newest yet."""
        self.url = url
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None
        self._told = ""
        """Why no router could be reached, as last logged; empty since one was."""

    async def __aenter__(self) -> RouterClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket),
            # an answer comes when it is complete, which may be after hours in a queue
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),  # one account's would go with the requests of others
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: bytes, account: str, held: HeldAnswer) -> Attempt:
        """Send a request, and read its answer.

        Args:
            held: counts the answer's bytes, and pauses the reading.

        Raises:
            AccountGone: the router knows no such account.
            NoRoom: it has no room for further requests of batches.
        """
        answer = Attempt(NOT_SENT, 0.0, "", b"")
        for key in self._keys():
            answer = await self._post(path, body, account, key, held)
            if answer.status != 401:
                break
            held.clear()
        if answer.status == 401:
            log.error("the router does not accept this program's key: both need the same fleet key")
            return answer._replace(status=NOT_SENT, body=b"")
        code = _code_of(answer) if answer.status in (403, 429) else ""
        if code == ACCOUNT_GONE:
            raise AccountGone
        if code == NO_ROOM:
            held.clear()
            raise NoRoom
        return answer

    def _tell(self, problem: str) -> None:
        """Log once why no router can be reached."""
        if problem and problem != self._told:
            log.warning("no router is reached, and requests of batches wait: %s", problem[:300])
        self._told = problem

    async def room(self, model: str) -> int:
        """Ask how many more requests of batches for a model the router would take now; none if it does not answer."""
        return await self._room(model) or 0

    async def is_reached(self) -> bool:
        """Whether a router answers, not only what stands before it."""
        return await self._room("") is not None

    async def _room(self, model: str) -> int | None:
        assert self._session is not None
        url = URL(self.url).joinpath(ROOM_PATH[1:]).with_query({"model": model})
        try:
            async with asyncio.timeout(ROOM_S):
                for key in self._keys():
                    async with self._session.get(
                        url, headers=_headers(key, ""), allow_redirects=False
                    ) as response:
                        if response.status == 200:
                            answer = await joined(response.content.iter_any(), MAX_ROOM_BYTES)
                            return _decode_room(answer or b"").room
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return None
        return None

    async def _post(self, path: str, body: bytes, account: str, key: str, held: HeldAnswer) -> Attempt:
        assert self._session is not None
        headers = {**_headers(key, account), "content-type": "application/json"}
        data: bytes | AsyncIterator[bytes] = body
        if len(body) > PIECE_BYTES:
            data, headers["content-length"] = pieces(body), str(len(body))
        url = URL(self.url).joinpath(path[1:])
        request = self._session.post(url, data=data, headers=headers, allow_redirects=False)
        try:
            response = await request
        except aiohttp.ClientConnectorError as error:  # also of a certificate that is not trusted
            self._tell(str(error))
            return Attempt(NOT_SENT, 0.0, "", b"")
        except (aiohttp.ClientError, OSError, TimeoutError):
            return Attempt(CUT, 0.0, "", b"")
        self._tell("")
        try:
            async with response:
                answer = await _read(response, held)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return Attempt(CUT_UNREAD if held.was_paused else CUT, 0.0, "", b"")
        if answer is None:
            return Attempt(CUT, 0.0, "", b"")
        hint, request_id = response.headers.get("retry-after", ""), response.headers.get("x-request-id", "")
        retry_after_s = float(hint) if hint.isascii() and hint.isdigit() and len(hint) < 6 else 0.0
        return Attempt(response.status, retry_after_s, request_id, answer)


async def _read(response: aiohttp.ClientResponse, held: HeldAnswer) -> bytes | None:
    """Read an answer; None if it is too long."""
    may_read = asyncio.Event()
    may_read.set()
    held.reads(may_read.clear, may_read.set)
    body = bytearray()
    try:
        async for piece in response.content.iter_any():
            body += piece
            held.add(len(piece))
            if len(body) > MAX_ANSWER_BYTES:
                return None
            await may_read.wait()
    finally:
        held.stops_reading()
    return bytes(body)


def _headers(key: str, account: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", ACCOUNT: account_value(account)}


def _code_of(answer: Attempt) -> str:
    try:
        return _decode_error(answer.body).error.code or ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that notices within some minutes that the other machine is gone."""
    made = socket.socket(address[0], address[1], address[2])
    notice_lost_peers(made)
    return made


def notice_lost_peers(made: socket.socket) -> None:
    """Have a socket, or those that a listening one accepts, end within some minutes if the other machine is gone."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
