"""Reflector: a local copy of one Kubernetes collection, maintained by list and watch.

Owns: one list-then-watch loop. Must not know: what the objects mean.
Invariants: a watch goes on from the version that the last one has reached (events and bookmarks tell it), and the
collection is listed again only where that cannot be: the version has expired, or something could not be read; while the
API server is unavailable the copy keeps its last state; after a watch that failed or ended early, a pause precedes the
next request, so that an API server in trouble is not asked in a loop; what goes on failing is logged once. A list after
`RELIST_S` bounds for how long an event that the API server has lost has an effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Generic, TypeVar

import aiohttp
import msgspec
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio.client.exceptions import ApiException

from argosy_protocol import json_limits
from argosy_router.http.deadlines import backoff_s, in_turns

log = logging.getLogger(__name__)

RELIST_S = 1800.0
"""The longest that a replica stays whose deletion the API server never told. A list of 20,000 pods is 200 MB."""
WATCH_S = 30.0
"""Period of a watch: the longest that a connection which has died unnoticed hides changes."""
LIST_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
BACKOFF_BASE_S = 0.2
BACKOFF_CAP_S = 5.0
REFUSED_CAP_S = 30.0
"""Longest pause after a refusal, which may last for as long as a namespace lacks its RoleBinding."""
REFUSALS = frozenset((400, 401, 403, 404, 405))
"""Answers that do not change unless somebody changes rights or configuration; 429 of a busy API server is none."""
EXPECTED = (ApiException, aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError)
"""How the API server, and the way to it, fail. Anything else is logged with its traceback."""
FIRST_PAGE = 50
MAX_PAGE = 500
"""Objects of one page of a list."""
SMALL_PAGE = 10
"""Objects of a page that is read however large it is: the API server takes 1.5 MB of each."""
PAGE_BYTES = 2 * 1024 * 1024
"""Size that pages should have, by the weight of the last one."""
MAX_PAGE_BYTES = 4 * PAGE_BYTES
"""A larger page is not read on, and a small one is asked for in its place: whoever may create pods chooses their
size, and all of a page is in memory."""
TURN_BYTES = 256 * 1024
"""Of objects that are read between two turns of the event loop, in some milliseconds."""
MAX_LABELS = 256
MAX_OWNERS = 16
"""An object with more is kept without them, and so is nobody's replica. Their number is not bounded but by its size."""
MAX_EVENT_BYTES = 4 * 1024 * 1024
"""A ConfigMap holds 1 MiB; escaped in JSON it may take more."""


class OwnerReference(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    controller: bool = False


class Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    owner_references: list[OwnerReference] = msgspec.field(default_factory=list)
    resource_version: str = ""
    deletion_timestamp: str | None = None


class KubernetesObject(msgspec.Struct):
    """Fields of every Kubernetes object; subclasses add the fields that are used of a kind."""

    metadata: Metadata


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_PAGES = msgspec.json.Decoder(_Page)
_EVENTS = msgspec.json.Decoder(_Event)


class WatchExpired(Exception):
    """The watch cannot continue from this resource version; the collection must be listed again."""


S = TypeVar("S")
T = TypeVar("T", bound=KubernetesObject)


class Reflector(Generic[T]):
    """Maintains the objects of one collection that match a selector."""

    def __init__(
        self,
        client: kubernetes_client.ApiClient,
        path: str,
        kind: type[T],
        on_change: Callable[[], None],
        *,
        label_selector: str = "",
        field_selector: str = "",
        relist_s: float = RELIST_S,
        rng: random.Random | None = None,
        on_object: Callable[[str, T | None, T | None], None] = lambda *_: None,
        known: Mapping[str, T] | None = None,
        is_settled: bool = False,
    ) -> None:
        """
        Args:
            on_change: called after each list and each event.
            on_object: called before that with the key in `objects` of each object that differs, as it was and as it is;
                None: it was not there, or is gone.
            known: what one before it had of the collection, perhaps by another selector; it stays until a list.
            is_settled: whether that one was: what it knew goes on to be the best that is known.
        """
        self._client = client
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._on_change = on_change
        self._on_object = on_object
        self._selectors = [
            pair for pair in (("labelSelector", label_selector), ("fieldSelector", field_selector)) if pair[1]
        ]
        self._relist_s = relist_s
        self._watch_s = min(WATCH_S, relist_s)
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self.objects: dict[str, T] = dict(known or {})
        self._version = ""
        """Up to which `objects` are known; empty if they must be listed."""
        self._list_by = 0.0
        self.is_settled = is_settled
        """Whether a list has succeeded or was refused for good; before that, an empty copy means nothing."""
        self.has_listed = False
        """Whether a list has succeeded."""
        self.failing_since = math.inf
        """When the first list failed, if none has succeeded yet (the loop's clock)."""
        self.succeeded_at = -math.inf
        """When the API server last answered as asked."""
        self._told = ""
        """The failure that was logged last, if nothing has succeeded since."""

    async def run(self) -> None:
        """List and watch until cancelled."""
        now = asyncio.get_running_loop().time
        failures = 0
        while True:
            watched_at = math.inf
            is_broken, cap_s = True, BACKOFF_CAP_S
            try:
                if not self._version or now() >= self._list_by:
                    self._version = await self._list()
                    self._list_by = now() + self._relist_s * self._rng.uniform(0.8, 1.0)
                watched_at = now()
                await self._watch()
                is_broken = False
                if self._told:
                    self._told = ""
                    log.info("kubernetes %s: it is listed and watched again", self._path)
            except WatchExpired:
                self._version = ""
                log.debug("kubernetes %s: the watch has expired", self._path)
            except Exception as error:  # whatever it is, nobody else would list and watch again
                status = getattr(error, "status", 0) or 0
                is_known = isinstance(error, EXPECTED)
                if status in REFUSALS:
                    cap_s = REFUSED_CAP_S
                if status in REFUSALS or isinstance(error, msgspec.MsgspecError) or not is_known:
                    self._version = ""
                if not self.is_settled:
                    # A forbidden namespace must not keep the others from being published.
                    self.is_settled = status in REFUSALS
                    self.failing_since = min(self.failing_since, now())
                    self._on_change()
                failure = f"{type(error).__name__} {status or str(error)[:256]}"
                log.log(
                    logging.DEBUG if failure == self._told else logging.WARNING,
                    "kubernetes %s: %s",
                    self._path,
                    failure,
                    exc_info=not is_known and failure != self._told,
                )
                self._told = failure
            is_brief = now() - watched_at < min(BACKOFF_CAP_S, self._watch_s / 2)
            failures = failures + 1 if is_brief else int(is_broken)
            if failures:
                await asyncio.sleep(backoff_s(failures, BACKOFF_BASE_S, cap_s, self._rng))

    async def _list(self) -> str:
        """List everything, and return the version.

        Raises:
            ApiException: any status but 200.
        """
        objects: dict[str, T] = {}
        token = version = ""
        limit = FIRST_PAGE
        while True:
            query = [("limit", str(limit)), *([("continue", token)] if token else [])]
            async with asyncio.timeout(LIST_TIMEOUT_S):
                try:
                    response = await self._get(query, LIST_TIMEOUT_S)
                except WatchExpired:  # between two pages
                    raise ApiException(status=410, reason="the list has expired") from None
                async with response:
                    data = await _page(response, limit)
            if data is None:
                limit = SMALL_PAGE
                continue
            page = await decoded_in_turns(_PAGES, data)
            turn = 0
            for raw in page.items or ():
                item = await self._decoded(raw)
                objects[item.metadata.uid or item.metadata.name] = item
                turn += memoryview(raw).nbytes
                if turn >= TURN_BYTES:
                    turn = 0
                    await asyncio.sleep(0)
            version, token = page.metadata.resource_version, page.metadata.continue_
            if not token:
                break
            fitting = PAGE_BYTES * len(page.items or ()) // len(data)
            limit = max(SMALL_PAGE, min(MAX_PAGE, 4 * limit, fitting))
        known, self.objects = self.objects, objects
        for key in known.keys() | objects.keys():
            before, after = known.get(key), objects.get(key)
            if before != after:
                self._on_object(key, before, after)
        self.is_settled = self.has_listed = True
        self.succeeded_at = asyncio.get_running_loop().time()
        self._on_change()
        return version

    async def _watch(self) -> None:
        """Apply events until the period is over."""
        period = self._watch_s * self._rng.uniform(0.8, 1.0)
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", self._version),
            ("timeoutSeconds", str(max(1, int(period)))),
        ]
        response = await self._get(query, period + LIST_TIMEOUT_S)
        self.succeeded_at = asyncio.get_running_loop().time()
        try:
            async with response:
                async for line in _lines(response):
                    await self._apply(await decoded_in_turns(_EVENTS, line))
        except TimeoutError:
            return  # a silent connection; the next watch brings what it missed

    async def _apply(self, event: _Event) -> None:
        if event.type == "ERROR":
            raise WatchExpired
        item = await self._decoded(event.object)
        self.succeeded_at = asyncio.get_running_loop().time()
        self._version = item.metadata.resource_version or self._version
        if event.type == "BOOKMARK":
            return
        key = item.metadata.uid or item.metadata.name
        before = self.objects.pop(key, None)
        if event.type == "DELETED":
            self._on_object(key, before, None)
        else:
            self.objects[key] = item
            self._on_object(key, before, item)
        self._on_change()

    async def _decoded(self, raw: msgspec.Raw) -> T:
        """Return what is kept of an object."""
        item = await decoded_in_turns(self._decoder, raw)
        metadata = item.metadata
        if len(metadata.labels) > MAX_LABELS or len(metadata.owner_references) > MAX_OWNERS:
            metadata.labels, metadata.owner_references = {}, []
        return item

    async def _get(self, query: list[tuple[str, str]], timeout_s: float) -> aiohttp.ClientResponse:
        """GET the collection.

        Raises:
            ApiException: any status but 200 and 410.
            WatchExpired: status 410.
        """
        method, url, headers, body, form = await self._client.param_serialize(
            "GET",
            self._path,
            query_params=[*self._selectors, *query],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(
            method,
            url,
            headers,
            body,
            form,
            _request_timeout=aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_TIMEOUT_S),
        )
        response: aiohttp.ClientResponse = answer.response
        if response.status != 200:
            text = (await response.read())[:256]
            response.release()
            if response.status == 410:
                raise WatchExpired
            raise ApiException(status=response.status, reason=text.decode("utf-8", "replace"))
        return response


async def decoded_in_turns(decoder: msgspec.json.Decoder[S], text: bytes | msgspec.Raw) -> S:
    """Decode a text. If it is too deep for the decoder it is cut first, in turns of the event loop."""
    with contextlib.suppress(RecursionError):
        return decoder.decode(text)
    return decoder.decode(await in_turns(json_limits.cutting(bytes(text).decode())))


async def _page(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """Read a page; None if it is too large for one of so many objects."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > MAX_PAGE_BYTES and limit > SMALL_PAGE:
            response.close()
            return None
    return bytes(data)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Iterate over the lines of a watch, without aiohttp's own bound on the length of a line."""
    buffer = bytearray()
    async for piece in response.content.iter_any():
        buffer += piece
        if len(buffer) > MAX_EVENT_BYTES and b"\n" not in buffer:
            raise WatchExpired
        *lines, rest = bytes(buffer).split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            if line.strip():
                yield line
