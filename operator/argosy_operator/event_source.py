"""kopf as the event source: it lists and watches, and hands every event to the controller.

Owns which kinds are watched where, and kopf's settings, sessions and answers. Must not know what an event leads to.
kopf handlers only hand events over; there are no diff handlers, no daemons and no finalizers, so removing the operator
never blocks the deletion of anything. kopf writes nothing: its storages keep nothing, and its sessions refuse what is
no GET. Invariants: no answer of the API server ends the watches for good, because an operator that keeps its lease and
hears of nothing would be worse than none; each namespace has a kopf operator of its own, which rests while the
namespace is refused, so that no answer for one ends, repeats or delays the watches of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any, Final

import aiohttp
import kopf
import msgspec
from yarl import URL

from argosy_operator.cluster.kubernetes_api import LIST_PAGE, LIST_PAGE_MAX
from argosy_operator.cluster.store import kept_fields
from argosy_operator.names import KINDS, Kind, Object
from argosy_operator.reconcile.controller import Controller
from argosy_operator.reconcile.lister import Lister, Scope
from argosy_protocol import json_limits
from argosy_protocol.program.list_watch import PageSize

logger = logging.getLogger(__name__)

RESTART_PAUSE: Final = 2.0
"""Seconds between an end of the watches and their next beginning."""
END_TIMEOUT: Final = 10.0
"""Seconds that kopf's tasks have to end."""
WATCH_PAUSE: Final = 1.0
"""Seconds from the beginning of a watch to that of the next one of its kind, at least: kopf begins it without a pause,
and a proxy may end every watch at once."""
LIST_PAUSE: Final = 1.0
"""The same for lists, of which kopf makes one whenever a watch is answered that its version has expired (410). Doubled
with each that follows within LIST_CALM, as client-go does: a list of a large fleet takes seconds of a core, and an API
server may answer each watch so."""
LIST_PAUSE_MAX: Final = 30.0
LIST_CALM: Final = 120.0
RETRY_AFTER_MAX: Final = 30
"""Seconds for which a watch waits at most since the API server is busy (429): kopf takes any number that it is told."""
_CHANGES: Final = ("ADDED", "MODIFIED", "DELETED")
_BACKOFF_MAX: Final = 5.0
"""Seconds between two attempts of a watch while the API server is away: it resumes that long after its return."""
_PARTS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw] | None)
_NONE: Final = msgspec.Raw(b"null")


async def watch(
    controller: Controller, scope: Scope, *, stop: asyncio.Event, claim_signals: Callable[[], None]
) -> None:
    """Run kopf until `stop` is set, and hand every event to the controller. kopf ends when a watch is refused for
    another reason than those that it asks again for; then it is started anew, and everything is listed again. While the
    controller's lists are refused kopf does not run: it would ask for ever, with an error in the log each time.

    kopf takes the process's signals at each of its starts; `claim_signals` is called afterwards to take them back.
    """
    # kopf's name for itself, which it would make of a user name otherwise: a container's numeric user has none.
    os.environ.setdefault("POD_ID", os.environ.get("HOSTNAME", "argosy-operator"))
    lister, pauses = controller.lister, Pauses()
    while True:
        await _until(stop, lister.wait_watched(scope.namespace, is_watched=True))
        if stop.is_set():
            return
        lister.begin_watches(scope.namespace)
        sessions = Sessions(lister, scope, pauses)
        tasks = await kopf.spawn_tasks(
            registry=handlers(controller, scope.watched, sessions),
            settings=kopf_settings(scope.watched),
            standalone=True,
            clusterwide=scope.namespace is None,
            namespaces=() if scope.namespace is None else (scope.namespace,),
            stop_flag=stop,
        )
        claim_signals()
        refused = asyncio.create_task(
            lister.wait_watched(scope.namespace, is_watched=False), name=f"refusal of {scope.namespace}"
        )
        try:
            done, _ = await asyncio.wait((*tasks, refused), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end((*tasks, refused, *sessions.watchers))
            await sessions.close()
        if stop.is_set():
            return
        if refused in done:
            continue
        errors = [task.exception() for task in done if not task.cancelled()]
        logger.warning("the watches ended and begin anew: %s", next(filter(None, errors), "no reason given"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESTART_PAUSE):
                await stop.wait()
        controller.list_again(scope.namespace)


async def _until(stop: asyncio.Event, coroutine: Coroutine[Any, Any, None]) -> None:
    """Wait for a coroutine, or for `stop`."""
    tasks = asyncio.create_task(coroutine), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel kopf's tasks and wait for their ends. kopf's own way to end would cancel the controller's as well."""
    for task in tasks:
        task.cancel()
    _, late = await asyncio.wait(tasks, timeout=END_TIMEOUT)
    if late:
        logger.warning("%d tasks of kopf did not end within %g s", len(late), END_TIMEOUT)


class EndlessBackoff:
    """Seconds to wait before each further attempt of a request: kopf gives up when they are used up."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1.0, 2.0), itertools.repeat(_BACKOFF_MAX))


def read_list(text: bytes) -> Object:
    """An answer to a list, whose items are read one by one while somebody takes them: values that are small take
    fifteen times as much memory as their JSON.

    Raises:
        ValueError: it is no JSON object, or its items are no list.
    """
    try:
        parts = json_limits.decode(_PARTS, text)
        items = json_limits.decode(_ITEMS, parts.pop("items", _NONE))
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    found: Object = {name: json_limits.loads(bytes(part)) for name, part in parts.items()}
    return found | {"items": (json_limits.loads(bytes(item)) for item in items or ())}


def read_event(line: str | bytes) -> Any:
    """An event of a watch, with what is kept of its object: kopf holds the last one of each for some seconds."""
    event = json_limits.loads(line)
    if not isinstance(event, dict) or event.get("type") not in _CHANGES:
        return event
    obj = event["object"]
    kind = KINDS.get((obj.get("apiVersion", ""), obj.get("kind", "")))
    return event if kind is None else {**event, "object": kept_fields(kind, obj)}


class WatchBody:
    """The body of a watch, whose lines have what is kept of their objects (`read_event`)."""

    def __init__(self, body: aiohttp.StreamReader) -> None:
        self._body = body

    def exception(self) -> BaseException | None:
        return self._body.exception()

    def set_exception(self, *error: Any) -> None:
        """By aiohttp, when the response is closed."""
        self._body.set_exception(*error)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """The lines, however long; this is how kopf reads."""
        rest = b""
        async for chunk in self._body.iter_chunked(size):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in filter(None, lines):
                yield json.dumps(read_event(line)).encode() + b"\n"
        if rest:
            yield json.dumps(read_event(rest)).encode()


async def keep_little(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Give kopf of each event what is kept of its object. A middleware of aiohttp."""
    answer = await handler(request)
    if "watch" in request.url.query and answer.status == 200:
        answer.content = WatchBody(answer.content)  # type: ignore[assignment]  # of which kopf calls iter_chunked
    return answer


def response_class(kinds: Mapping[str, Kind]) -> type[aiohttp.ClientResponse]:
    """The class of kopf's answers, for lists of these kinds by their plurals: kopf takes all objects of one, and it
    would list again for ever what is too deep for Python's decoder."""

    class Response(aiohttp.ClientResponse, PageResponse):
        @property
        def headers(self) -> Any:
            given = super().headers
            if self.status != 429:
                return given
            text, found = given.get("Retry-After", "1"), given.copy()
            is_near = text.isascii() and text.isdigit() and len(text) < 9 and int(text) <= RETRY_AFTER_MAX
            found["Retry-After"] = text if is_near else str(RETRY_AFTER_MAX)
            return found

        async def json(self, **given: Any) -> Any:
            kind = kinds.get(self.url.name)
            if kind is None or self.status != 200:
                return await super().json(**{"loads": json_limits.loads, **given})
            found = read_list(await self.read() if self.page is None else self.page)
            return found | {"items": [kept_fields(kind, item) for item in found["items"]]}

    return Response


async def reads_only(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Refuse what would be a write. kopf knows no lease, and an object's content is a tenant's to choose."""
    if request.method != "GET":
        raise RuntimeError(f"kopf would write: {request.method} {request.url.path}")
    return await handler(request)


class PageResponse:
    """An answer that may have been read already."""

    page: bytes | None = None


class Pages:
    """Sets how many objects kopf asks for, as it has one number for all lists (`PageSize`). A middleware of aiohttp."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._sizes: dict[str, PageSize] = {}
        self._kinds = kinds

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        name, query = request.url.name, request.url.query
        if name not in self._kinds or "limit" not in query:
            return await handler(request)
        if "continue" not in query or name not in self._sizes:
            self._sizes[name] = PageSize(LIST_PAGE, LIST_PAGE_MAX)
        size = self._sizes[name]
        while True:
            request.url = request.url.update_query(limit=size.limit)
            answer = await handler(request)
            if answer.status != 200 or not isinstance(answer, PageResponse):
                return answer
            answer.page = await size.read(answer)
            if answer.page is not None:
                return answer


class Pauses:
    """Delays a list or watch whose predecessor has just begun. A middleware of aiohttp, of all sessions of a scope."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, bool], tuple[float, float]] = {}
        """When the last one began, and the pause before it, by path and whether it was a watch."""

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        query, now = request.url.query, asyncio.get_running_loop().time
        is_watch = "watch" in query
        if not is_watch and ("limit" not in query or "continue" in query):
            return await handler(request)
        began, pause = self._begun.get((request.url.path, is_watch), (-math.inf, 0.0))
        if is_watch:
            pause = WATCH_PAUSE
        else:
            is_calm = now() >= began + LIST_CALM
            pause = 0.0 if is_calm else min(LIST_PAUSE_MAX, max(LIST_PAUSE, 2 * pause))
        if (left := began + pause - now()) > 0:
            await asyncio.sleep(left)
        answer = await handler(request)
        if answer.status == 200:  # what fails is repeated by kopf's own rules
            self._begun[request.url.path, is_watch] = now(), pause
        return answer


class Sessions:
    """HTTP sessions of one kopf operator, which tell the lister what becomes of its requests: kopf itself repeats a
    request for as long as it fails, and tells nobody."""

    def __init__(self, lister: Lister, scope: Scope, pauses: Pauses) -> None:
        self._lister = lister
        self._scope = scope
        self._pauses = pauses
        self._kinds = {kind.plural: kind for kind in scope.watched}
        self._open: list[tuple[kopf.ConnectionInfo, kopf.AiohttpSession]] = []
        self._watchers: set[asyncio.Task[Any]] = set()

    @property
    def watchers(self) -> list[asyncio.Task[Any]]:
        """The tasks that list and watch, and still run. When one of them fails, kopf leaves the others behind."""
        return [task for task in self._watchers if not task.done()]

    def session(self, info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
        """The session for a login; the same one for the same login, by which kopf knows one that was refused."""
        for known, session in self._open:
            if known == info:
                return session
        http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            trace_configs=[self._trace()],
            response_class=response_class(self._kinds),
            middlewares=(reads_only, keep_little, self._pauses, Pages(self._kinds)),
        )
        session = kopf.AiohttpSession(
            server=info.server,
            default_namespace=info.default_namespace,
            priority=info.priority,
            expiration=info.expiration,
            aiohttp_session=http,
        )
        self._open.append((info, session))
        return session

    async def close(self) -> None:
        """Close the sessions that kopf has not closed."""
        for _, session in self._open:
            await session.aiohttp_session.close()

    def _trace(self) -> aiohttp.TraceConfig:
        trace = aiohttp.TraceConfig()
        trace.on_request_start.append(self._on_start)
        trace.on_request_end.append(self._on_end)
        trace.on_request_exception.append(self._on_exception)
        return trace

    async def _on_start(self, _session: Any, _context: Any, params: aiohttp.TraceRequestStartParams) -> None:
        if (kind := self._kinds.get(params.url.name)) is not None:
            self._lister.note_unwatched(self._scope.namespace, kind)
            if (task := asyncio.current_task()) is not None:
                self._watchers.add(task)

    async def _on_end(self, _session: Any, _context: Any, params: aiohttp.TraceRequestEndParams) -> None:
        status = params.response.status
        if status >= 400:
            self._fail(params.url, f"{status} {params.response.reason}")
        elif (kind := self._kinds.get(params.url.name)) is not None and "watch" in params.url.query:
            self._lister.note_watched(self._scope.namespace, kind)

    async def _on_exception(
        self, _session: Any, _context: Any, params: aiohttp.TraceRequestExceptionParams
    ) -> None:
        if not isinstance(params.exception, asyncio.CancelledError):
            self._fail(params.url, f"{type(params.exception).__name__}: {params.exception}")

    def _fail(self, url: URL, error: str) -> None:
        self._lister.note_failed_watch(
            self._scope.namespace, self._kinds.get(url.name), f"GET {url.origin()}{url.path}: {error}"
        )


class NoDiffBase(kopf.DiffBaseStorage):
    """Keep no last-seen state: every object looks the same to kopf, so it never has a difference to handle."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return {}

    def store(self, **_: Any) -> None:
        pass


class NoProgress(kopf.ProgressStorage):
    """Keep no progress of handlers: event handlers run once and do not fail."""

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        pass

    def purge(self, **_: Any) -> None:
        pass

    def touch(self, **_: Any) -> None:
        pass

    def clear(self, *, essence: Any) -> Any:
        return essence


def kopf_settings(watched: Mapping[Kind, str]) -> kopf.OperatorSettings:
    """Settings with which kopf writes nothing and discovers nothing."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    # By default kopf ends when the API server has been away for a minute, and has the process killed after ten more.
    settings.networking.error_backoffs = EndlessBackoff()
    settings.process.ultimate_exiting_timeout = None
    # Whole lists of a large fleet take a gigabyte (`Pages`). When a token expires kopf ends, and is started anew.
    settings.watching.chunk_size = LIST_PAGE
    # The watched kinds are known, so no permission to list CRDs and namespaces is needed.
    settings.scanning.disabled = True
    for kind, labels in watched.items():
        if labels:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = labels
    return settings


def api_server_url(env: Mapping[str, str]) -> str:
    """URL of the API server by the variables that a kubelet sets, which need no DNS; empty if they are missing."""
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def handlers(
    controller: Controller, watched: Mapping[Kind, str], sessions: Sessions
) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> Any:
        info = None
        if "KUBECONFIG" not in os.environ and (info := kopf.login_with_service_account(**kwargs)) is not None:
            info = dataclasses.replace(info, server=api_server_url(os.environ) or info.server)
        info = info or kopf.login_with_kubeconfig(**kwargs)
        return None if info is None else sessions.session(info)

    for kind in watched:
        _listen(registry, controller, kind)
    return registry


def _listen(registry: kopf.OperatorRegistry, controller: Controller, kind: Kind) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)
    async def on_event(event: Any, **_: Any) -> None:
        controller.handle(kind, event["type"], dict(event["object"]))
