"""List and watch of a Kubernetes collection, for the router's discovery and the operator.

Owns the order of lists and watches, from which version a watch goes on, and how pages and events are read. Must not
know the client that asks, nor what objects mean or what follows from a failure: subclasses of `ListAndWatch` do.
Invariants: a watch goes on from the version that the last one has reached (events and bookmarks tell it), and the
collection is listed again only where that cannot be, or when a list is due; what is no list, such as the answer of a
gateway, is an error and not a collection without objects; of a list one page is in memory, of a watch one event, both
of bounded size as far as the server lets one choose.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from argosy_protocol import json_limits
from argosy_protocol.program.process import in_turns

if TYPE_CHECKING:
    from aiohttp import ClientResponse

PAGE_GROWTH: Final = 4
"""How many times as many objects as before are asked for at most, as the next ones may be larger."""
EXPIRED: Final = 410
"""Status of a list or watch from a version that the API server has forgotten."""

T = TypeVar("T")


class WatchError(Exception):
    """A watch cannot go on from where it is. `code` is the status that the server gave in an event, or zero."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class PageSize:
    """How many objects of a list to ask for next, by what the last answer weighed: the API server counts objects only,
    each page is a request, and whoever creates an object chooses how large it is, up to 1.5 MB in etcd."""

    def __init__(
        self, least: int, most: int, *, first: int = 0, page_bytes: int = 1 << 20, max_bytes: int = 2 << 20
    ) -> None:
        """
        Args:
            least: objects of a page that is read however large it is.
            first: objects of the first page; `least` if zero.
            page_bytes: size that pages should have.
            max_bytes: a larger page is not read on, and one of `least` objects is asked for in its place.
        """
        self._least = least
        self._most = most
        self._page_bytes = page_bytes
        self._max_bytes = max_bytes
        self.limit = first or least

    async def read(self, answer: ClientResponse) -> bytes | None:
        """The body of an answer with `limit` objects; None if it is too large, and fewer are to be asked for."""
        parts: list[bytes] = []
        size = 0
        async for part in answer.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > self._max_bytes and self.limit > self._least:
                answer.close()
                self.limit = self._least
                return None
        fitting = self.limit * self._page_bytes // max(1, size)
        self.limit = max(self._least, min(self._most, self.limit * PAGE_GROWTH, fitting))
        return b"".join(parts)


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class ListPage(msgspec.Struct):
    metadata: _ListMetadata = msgspec.field(default_factory=_ListMetadata)
    items: list[msgspec.Raw] | None = None

    @property
    def version(self) -> str:
        """The version of the list, which all of its pages have."""
        return self.metadata.resource_version


class WatchEvent(msgspec.Struct):
    type: str
    """`ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`."""
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_PAGES: Final = msgspec.json.Decoder(ListPage)
_EVENTS: Final = msgspec.json.Decoder(WatchEvent)
_STATUSES: Final = msgspec.json.Decoder(_Status)


async def list_pages(
    ask: Callable[[dict[str, str]], Awaitable[ClientResponse]], size: PageSize
) -> AsyncGenerator[ListPage, None]:
    """List a collection in pages. Each is asked for when the one before was consumed, and none is kept.

    Args:
        ask: sends the request with some more parameters; returns an answer of status 200, or raises.

    Raises:
        ValueError: it is no list.
    """
    token = ""
    while True:
        query = {"limit": str(size.limit), **({"continue": token} if token else {})}
        async with await ask(query) as answer:
            text = await size.read(answer)
        if text is None:
            continue
        page = await decoded_in_turns(_PAGES, text)
        if not page.version:
            raise ValueError("a list without a version, so something else has answered")
        token = page.metadata.continue_
        del text
        yield page
        del page
        if not token:
            return


async def watch_events(answer: ClientResponse, max_bytes: int) -> AsyncGenerator[WatchEvent, None]:
    """Read the events of a watch until the server ends it.

    Args:
        answer: of status 200, to a request with `watch=true`.
        max_bytes: of one event.

    Raises:
        WatchError: the server sent an error, or an event that is too large.
        ValueError: it is no event.
    """
    async for line in _lines(answer, max_bytes):
        event = await decoded_in_turns(_EVENTS, line)
        if event.type == "ERROR":
            status = json_limits.decode(_STATUSES, event.object)
            raise WatchError(status.code, status.message)
        yield event


async def _lines(answer: ClientResponse, max_bytes: int) -> AsyncIterator[bytes]:
    """The lines of a body. aiohttp's own are too short for large objects."""
    rest = b""
    async for piece in answer.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > max_bytes:
            raise WatchError(0, f"an event is larger than {max_bytes} bytes")


async def decoded_in_turns(decoder: msgspec.json.Decoder[T], text: bytes | msgspec.Raw) -> T:
    """Decode a text. If it is too deep for the decoder it is cut first, in turns of the event loop.

    Raises:
        msgspec.MsgspecError: a ValueError; it is no JSON, or not of this type.
    """
    with contextlib.suppress(RecursionError):
        return decoder.decode(text)
    return decoder.decode(await in_turns(json_limits.cutting(bytes(text).decode())))


class ListAndWatch(ABC):
    """Follows one collection."""

    def __init__(self, *, relist_s: float = 0.0, rng: random.Random | None = None) -> None:
        """
        Args:
            relist_s: after so long, or a little less, the next watch that ends is followed by a list: the longest that
                an event which the server has lost stays without effect. Zero: each one is.
        """
        self._relist_s = relist_s
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._version = ""
        """Up to which the objects are known; empty if they must be listed. `_watch` moves it, `_after` may empty it."""

    async def run(self) -> None:
        """List and watch until cancelled."""
        now = asyncio.get_running_loop().time
        list_by = -math.inf
        while True:
            error: Exception | None = None
            watched_at = math.inf
            try:
                if not self._version or now() >= list_by:
                    self._version = await self._list()
                    list_by = now() + self._relist_s * self._rng.uniform(0.8, 1.0)
                watched_at = now()
                await self._watch(self._version)
            except Exception as failure:  # whatever it is, nobody else would list and watch again
                error = failure
            if pause_s := self._after(error, now() - watched_at):
                await asyncio.sleep(pause_s)

    @abstractmethod
    async def _list(self) -> str:
        """List everything, and return the version."""

    @abstractmethod
    async def _watch(self, version: str) -> None:
        """Apply what changes after a version, until the server ends the watch."""

    @abstractmethod
    def _after(self, error: Exception | None, watched_s: float) -> float:
        """Note how a list and watch ended, and return the pause in seconds before the next.

        Args:
            error: None if the server ended the watch.
            watched_s: for how long it was watched; negative if the list failed.
        """
