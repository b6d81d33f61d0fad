"""Watches what the event source does not: Namespaces, if the operator serves all of them, and autoscalers.

Owns one list and watch of Namespaces, one of HorizontalPodAutoscalers for each namespace that is served, and which
service each autoscaler scales. Must not know what follows from that. Invariants: memory holds one page of a list, and
of each object what is told here; a cluster that refuses a list costs nothing else.

    NamespaceWatch  with a list of served namespaces nothing is asked, as no other one can have services; a refusal
                    leaves what was known, which is then told once
    ScalerWatch     while there is no service nothing is asked; a refusal leaves the autoscalers of that namespace
                    unknown; one that passes, as of an API server that starts, and an answer that is missing for another
                    reason leave what was known; before a change counts its service is read, since the watch of services
                    may lag behind the autoscaler's, and with it the number that the autoscaler has written; an event
                    costs no more for the autoscalers of other services
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import msgspec

from argosy_operator.cluster.api import REFUSALS, REFUSED_RETRY, RETRY, Api, ApiError
from argosy_operator.names import AUTOSCALERS, NAMESPACES, Kind, Name, Object, deployment_name, object_name
from argosy_operator.observation import (
    Scaler,
    Scalers,
    deployment_target,
    read_scaler,
    summarize,
    target_deployment,
)
from argosy_protocol.program.list_watch import EXPIRED, ListAndWatch

logger = logging.getLogger(__name__)

PATIENCE: Final = 3
"""Refusals in a row after which that is so, and failures after which nobody waits for the first list any more: an API
server that starts may refuse what it allows later, and names decided without it would be given to others for a moment.
"""
NAMESPACE_PAGE: Final = 100
"""Namespaces of one answer: each may have 1.5 MiB in etcd, nearly all of it annotations."""
SCALER_PAGE: Final = 25
"""Autoscalers of one answer: each may have 1.5 MiB in etcd, nearly all of it annotations."""


class _ApiWatch(ListAndWatch):
    """Follows a kind by `Api`. Each watch, which the API server ends after some minutes, is followed by a list."""

    unwatched = ""
    """What the log says of a failure, which goes in place of `%s`."""

    def __init__(self, api: Api, kind: Kind, namespace: str | None, page: int) -> None:
        super().__init__()
        self._api = api
        self._kind = kind
        self.namespace = namespace
        self._page = page
        self._failures = 0
        """Failures since the last list."""
        self._refusals = 0
        """Refusals in a row since the last event of a watch."""
        self._is_told = False

    async def _list(self) -> str:
        found: list[Any] = []
        version = ""
        pages = self._api.list_pages(self._kind, namespace=self.namespace, limit=self._page)
        async with aclosing(pages):
            async for page in pages:
                found += map(self._read, page.items)
                version = page.version
                del page  # what is kept of it is small
        await self._adopt(found)
        self._failures = 0
        return version

    async def _watch(self, version: str) -> None:
        events = self._api.watch(self._kind, namespace=self.namespace, version=version)
        async with aclosing(events):
            async for event, obj in events:
                self._refusals, self._is_told = 0, False
                await self._handle(event, obj)

    def _after(self, error: Exception | None, watched_s: float) -> float:
        if error is None:
            self._refusals, self._is_told = 0, False
            return RETRY if watched_s < RETRY else 0.0  # a proxy may end every watch at once
        self._failures += 1
        status = error.status if isinstance(error, ApiError) else 0
        self._refusals = self._refusals + 1 if status in REFUSALS else 0
        if not self._is_told and status != EXPIRED:
            self._is_told = True
            is_known = isinstance(error, ApiError)
            logger.warning(self.unwatched, error, exc_info=None if is_known else error)
        return REFUSED_RETRY if self._note_failure(status) or self._refusals >= PATIENCE else RETRY

    @abstractmethod
    def _read(self, obj: Object) -> Any:
        """What is kept of an object that was listed."""

    @abstractmethod
    async def _adopt(self, found: list[Any]) -> None:
        """Let these be all objects that there are."""

    @abstractmethod
    async def _handle(self, event: str, obj: Object) -> None:
        """Apply a change."""

    @abstractmethod
    def _note_failure(self, status: int) -> bool:
        """Note that it was not listed, or not watched. Returns whether that is a refusal that counts."""


class NamespaceWatch(_ApiWatch):
    """Knows the names of all namespaces."""

    unwatched = (
        "namespaces cannot be watched: %s; model names that begin with the name of a namespace are refused to others "
        "only while that has an InferenceService"
    )

    def __init__(self, api: Api, served: Collection[str], *, on_change: Callable[[], None]) -> None:
        """Args:
        served: the namespaces that are served; all if empty.
        on_change: called when a namespace has come or gone.
        """
        super().__init__(api, NAMESPACES, None, NAMESPACE_PAGE)
        self._is_needed = not served
        self._on_change = on_change
        self.names: frozenset[str] = frozenset(served)
        """The namespaces that exist, or that are served, as far as that is known."""
        self._was_answered = asyncio.Event()
        if served:
            self._was_answered.set()

    async def wait_answered(self) -> None:
        """Return once the API server has answered, or has failed PATIENCE times."""
        await self._was_answered.wait()

    async def run(self) -> None:
        """Follow the namespaces until cancelled, if that is needed."""
        if self._is_needed:
            await super().run()

    def _read(self, obj: Object) -> str:
        name: str = obj["metadata"]["name"]
        return name

    async def _adopt(self, found: list[str]) -> None:
        self._was_answered.set()
        self._know(frozenset(found))

    async def _handle(self, event: str, obj: Object) -> None:
        name = self._read(obj)
        self._know(self.names - {name} if event == "DELETED" else self.names | {name})

    def _note_failure(self, status: int) -> bool:
        if self._failures >= PATIENCE:
            self._was_answered.set()
        return False

    def _know(self, names: frozenset[str]) -> None:
        if names != self.names:
            self.names = names
            self._on_change()


class _Scope(_ApiWatch):
    """The autoscalers of one namespace, or of all."""

    unwatched = "HorizontalPodAutoscalers are not watched: %s"

    def __init__(
        self,
        api: Api,
        namespace: str | None,
        *,
        read_service: Callable[[Name], Awaitable[None]],
        announce: Callable[[Name], None],
    ) -> None:
        """`announce` is called with a target whose autoscalers have changed."""
        super().__init__(api, AUTOSCALERS, namespace, SCALER_PAGE)
        self._read_service = read_service
        self._announce = announce
        self.groups: dict[Name, dict[Name, Scaler]] = {}
        """The autoscalers of each service that has any, by their own names."""
        self.targets: dict[Name, Name] = {}
        """The service of each autoscaler."""
        self.is_known = False
        self.was_asked = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def of(self, service: Name) -> Scalers:
        known = summarize(self.groups.get(service, {}).values(), is_known=self.is_known)
        target = deployment_target(service[0], deployment_name(service[1]))
        if misled := self.groups.get(target):
            names = tuple(sorted(each.name for each in misled.values()))
            known = msgspec.structs.replace(known, of_deployment=names)
        return known if self.was_asked.is_set() else msgspec.structs.replace(known, was_asked=False)

    def _note_failure(self, status: int) -> bool:
        is_patient = self._failures < PATIENCE
        is_refused = status in REFUSALS and (not is_patient or not self.is_known)
        if is_refused:
            targets = list(self.groups)
            self.groups, self.targets, self.is_known = {}, {}, False
            for target in targets:
                self._announce(target)
        if is_refused or not is_patient:
            self.was_asked.set()
        return is_refused

    def _read(self, obj: Object) -> Scaler | None:
        return read_scaler(obj)

    async def _adopt(self, found: list[Scaler | None]) -> None:
        groups: dict[Name, dict[Name, Scaler]] = {service: {} for service in self.groups}
        for scaler in filter(None, found):
            groups.setdefault(scaler.service, {})[scaler.key] = scaler
        await self._record(groups)

    async def _handle(self, event: str, obj: Object) -> None:
        name = object_name(obj)
        target = self.targets.get(name)
        before = None if target is None else self.groups[target][name]
        after = None if event == "DELETED" else read_scaler(obj)
        if before == after:
            return  # its status has new figures
        groups = {
            each.service: dict(self.groups.get(each.service, {}))
            for each in (before, after)
            if each is not None
        }
        if before is not None:
            del groups[before.service][name]
        if after is not None:
            groups[after.service][name] = after
        await self._record(groups)

    async def _record(self, groups: Mapping[Name, dict[Name, Scaler]]) -> None:
        """Let these be the autoscalers of the services that are named, and of no other."""
        changed = sorted(service for service, group in groups.items() if self._differs(service, group))
        for service in changed:
            if target_deployment(service) is None:
                await self._read_service(service)
        self.is_known = True
        self.was_asked.set()
        for service in groups:
            for name in self.groups.pop(service, {}):
                del self.targets[name]
        for service, group in groups.items():
            if group:
                self.groups[service] = group
                self.targets.update(dict.fromkeys(group, service))
        for service in changed:
            self._announce(service)

    def _differs(self, target: Name, group: Mapping[Name, Scaler]) -> bool:
        """Whether these autoscalers of a target mean something else than those that were known."""
        if target_deployment(target) is not None:
            return self.groups.get(target, {}) != group
        known = msgspec.structs.replace(self.of(target), of_deployment=())
        return known != summarize(group.values(), is_known=True)


class ScalerWatch:
    """Knows the HorizontalPodAutoscalers of services."""

    def __init__(
        self,
        api: Api,
        namespaces: Iterable[str],
        *,
        read_service: Callable[[Name], Awaitable[None]],
        find_service: Callable[[Name], Name | None],
        on_change: Callable[[Name], None],
    ) -> None:
        """Args:
        namespaces: those that are served; all if empty.
        read_service: reads a service from the API server before a change of its autoscalers counts.
        find_service: the service of a Deployment; None if it is nobody's.
        on_change: called when it counts.
        """
        self._find_service = find_service
        self._on_change = on_change
        self._scope = partial(_Scope, api, read_service=read_service, announce=self._announce)
        self._scopes: dict[str | None, _Scope] = {
            each: self._scope(each) for each in tuple[str | None, ...](namespaces) or (None,)
        }

    def set_needed(self, is_needed: bool) -> None:
        """Set whether there is some service."""
        for namespace, scope in self._scopes.items():
            if is_needed and scope.task is None:
                scope.task = asyncio.create_task(scope.run(), name=f"autoscalers of {namespace}")
            elif not is_needed and scope.task is not None:
                scope.task.cancel()
                scope.was_asked.set()  # whoever waits need not wait any more
                self._scopes[namespace] = self._scope(namespace)

    def close(self) -> None:
        self.set_needed(False)

    @property
    def was_asked(self) -> bool:
        """Whether the API server was asked for all that is needed, whatever it answered."""
        return all(scope.task is None or scope.was_asked.is_set() for scope in self._scopes.values())

    async def wait_asked(self) -> None:
        """Return once `was_asked` is true."""
        for scope in list(self._scopes.values()):
            if scope.task is not None:
                await scope.was_asked.wait()

    def of(self, service: Name) -> Scalers:
        """The autoscalers of a service."""
        scope = self._scopes.get(service[0]) or self._scopes.get(None)
        return Scalers(was_asked=False) if scope is None else scope.of(service)

    def _announce(self, target: Name) -> None:
        deployment = target_deployment(target)
        service = target if deployment is None else self._find_service(deployment)
        if service is not None:
            self._on_change(service)
