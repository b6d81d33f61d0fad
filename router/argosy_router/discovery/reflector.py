"""Reflector: a local copy of one Kubernetes collection, maintained by list and watch (`program.list_watch`).

Owns: the copy, and what follows from a failure. Must not know: what the objects mean.
Invariants: the collection is listed again only where the version has expired, or something could not be read, and after
`RELIST_S`; while the API server is unavailable the copy keeps its last state; after a watch that failed or ended early,
a pause precedes the next request, so that an API server in trouble is not asked in a loop; what goes on failing is
logged once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Generic, TypeVar

import aiohttp
import msgspec
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio.client.exceptions import ApiException

from argosy_protocol.program.list_watch import (
    EXPIRED,
    ListAndWatch,
    PageSize,
    WatchError,
    WatchEvent,
    decoded_in_turns,
    list_pages,
    watch_events,
)
from argosy_router.http.deadlines import backoff_s

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
EXPECTED = (ApiException, aiohttp.ClientError, TimeoutError, OSError, ValueError)
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


T = TypeVar("T", bound=KubernetesObject)


class Reflector(ListAndWatch, Generic[T]):
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
        super().__init__(relist_s=relist_s, rng=rng)
        self._client = client
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._on_change = on_change
        self._on_object = on_object
        self._selectors = [
            pair for pair in (("labelSelector", label_selector), ("fieldSelector", field_selector)) if pair[1]
        ]
        self._watch_s = min(WATCH_S, relist_s)
        self.objects: dict[str, T] = dict(known or {})
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
        self._failures = 0
        """Attempts in a row that failed or ended early."""

    def _after(self, error: Exception | None, watched_s: float) -> float:
        cap_s = BACKOFF_CAP_S
        if error is None:
            if self._told:
                self._told = ""
                log.info("kubernetes %s: it is listed and watched again", self._path)
        elif watched_s >= 0.0 and (isinstance(error, WatchError) or _status(error) == EXPIRED):
            self._version = ""
            log.debug("kubernetes %s: the watch has expired", self._path)
        else:
            if _status(error) in REFUSALS:
                cap_s = REFUSED_CAP_S
            self._note_failure(error)
        is_brief = watched_s < min(BACKOFF_CAP_S, self._watch_s / 2)
        self._failures = self._failures + 1 if is_brief else int(error is not None)
        return backoff_s(self._failures, BACKOFF_BASE_S, cap_s, self._rng) if self._failures else 0.0

    def _note_failure(self, error: Exception) -> None:
        status, is_known = _status(error), isinstance(error, EXPECTED)
        if status in REFUSALS or isinstance(error, ValueError) or not is_known:
            self._version = ""
        if not self.is_settled:
            # A forbidden namespace must not keep the others from being published.
            self.is_settled = status in REFUSALS
            self.failing_since = min(self.failing_since, asyncio.get_running_loop().time())
            self._on_change()
        failure = f"{type(error).__name__} {status or str(error)[:256]}"
        log.log(
            logging.DEBUG if failure == self._told else logging.WARNING,
            "kubernetes %s: %s",
            self._path,
            failure,
            exc_info=None if is_known or failure == self._told else error,
        )
        self._told = failure

    async def _list(self) -> str:
        objects: dict[str, T] = {}
        version = ""
        size = PageSize(
            SMALL_PAGE, MAX_PAGE, first=FIRST_PAGE, page_bytes=PAGE_BYTES, max_bytes=MAX_PAGE_BYTES
        )
        async with aclosing(list_pages(partial(self._get, timeout_s=LIST_TIMEOUT_S), size)) as pages:
            async for page in pages:
                turn = 0
                for raw in page.items or ():
                    item = await self._decoded(raw)
                    objects[item.metadata.uid or item.metadata.name] = item
                    turn += memoryview(raw).nbytes
                    if turn >= TURN_BYTES:
                        turn = 0
                        await asyncio.sleep(0)
                version = page.version
        known, self.objects = self.objects, objects
        for key in known.keys() | objects.keys():
            before, after = known.get(key), objects.get(key)
            if before != after:
                self._on_object(key, before, after)
        self.is_settled = self.has_listed = True
        self.succeeded_at = asyncio.get_running_loop().time()
        self._on_change()
        return version

    async def _watch(self, version: str) -> None:
        """Apply events until the period is over."""
        period = self._watch_s * self._rng.uniform(0.8, 1.0)
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, int(period))),
        }
        response = await self._get(query, timeout_s=period + LIST_TIMEOUT_S)
        self.succeeded_at = asyncio.get_running_loop().time()
        try:
            async with response, aclosing(watch_events(response, MAX_EVENT_BYTES)) as events:
                async for event in events:
                    await self._apply(event)
        except TimeoutError:
            return  # a silent connection; the next watch brings what it missed

    async def _apply(self, event: WatchEvent) -> None:
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

    async def _get(self, query: dict[str, str], *, timeout_s: float) -> aiohttp.ClientResponse:
        """GET the collection.

        Raises:
            ApiException: any status but 200.
        """
        method, url, headers, body, form = await self._client.param_serialize(
            "GET",
            self._path,
            query_params=[*self._selectors, *query.items()],
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
            raise ApiException(status=response.status, reason=text.decode("utf-8", "replace"))
        return response


def _status(error: Exception) -> int:
    """The HTTP status of an error; zero if it has none."""
    return getattr(error, "status", 0) or 0
