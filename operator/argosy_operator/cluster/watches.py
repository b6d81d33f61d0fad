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
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec

from argosy_operator.cluster.api import EXPIRED, REFUSALS, REFUSED_RETRY, RETRY, Api, ApiError, changes_since
from argosy_operator.names import AUTOSCALERS, NAMESPACES, Name, Object, deployment_name, object_name
from argosy_operator.observation import (
    Scaler,
    Scalers,
    deployment_target,
    read_scaler,
    summarize,
    target_deployment,
)

logger = logging.getLogger(__name__)

NAMESPACE_PATIENCE: Final = 3
"""Refusals in a row after which that is so, and failures after which nobody waits for an answer any more: an API server
that starts may refuse what it allows later, and names decided without it would be given to others for a moment."""
NAMESPACE_PAGE: Final = 100
"""Namespaces of one answer: each may have 1.5 MiB in etcd, nearly all of it annotations."""
SCALER_PATIENCE: Final = 3
"""Failures in a row for which decisions wait for the first list, and after which a refusal counts."""
SCALER_PAGE: Final = 25
"""Autoscalers of one answer: each may have 1.5 MiB in etcd, nearly all of it annotations."""


class NamespaceWatch:
    """Knows the names of all namespaces."""

    def __init__(self, api: Api, served: Collection[str], *, on_change: Callable[[], None]) -> None:
        """Args:
        served: the namespaces that are served; all if empty.
        on_change: called when a namespace has come or gone.
        """
        self._api = api
        self._is_needed = not served
        self._on_change = on_change
        self.names: frozenset[str] = frozenset(served)
        """The namespaces that exist, or that are served, as far as that is known."""
        self._was_answered = asyncio.Event()
        if served:
            self._was_answered.set()

    async def wait_answered(self) -> None:
        """Return once the API server has answered, or has failed NAMESPACE_PATIENCE times."""
        await self._was_answered.wait()

    async def run(self) -> None:
        """Follow the namespaces until cancelled."""
        failures, refusals = 0, 0
        is_told = False
        while self._is_needed:
            try:
                version = await self._list()
                events = changes_since(self._api, NAMESPACES, namespace=None, version=version)
                async with aclosing(events):
                    async for event, obj in events:
                        failures, refusals, is_told = 0, 0, False
                        name = obj["metadata"]["name"]
                        self._know(self.names - {name} if event == "DELETED" else self.names | {name})
                failures, refusals, is_told = 0, 0, False
            except ApiError as error:
                failures += 1
                if failures >= NAMESPACE_PATIENCE:
                    self._was_answered.set()
                if not is_told and error.status != EXPIRED:
                    is_told = True
                    logger.warning(
                        "namespaces cannot be watched: %s; model names that begin with the name of a namespace are "
                        "refused to others only while that has an InferenceService",
                        error,
                    )
                refusals = refusals + 1 if error.status in REFUSALS else 0
                await asyncio.sleep(REFUSED_RETRY if refusals >= NAMESPACE_PATIENCE else RETRY)

    async def _list(self) -> str:
        """Know the namespaces that there are. Returns the version of the list."""
        names: set[str] = set()
        version = ""
        pages = self._api.list_pages(NAMESPACES, namespace=None, limit=NAMESPACE_PAGE)
        async with aclosing(pages):
            async for page in pages:
                names.update(obj["metadata"]["name"] for obj in page.items)
                version = page.version
        self._was_answered.set()
        self._know(frozenset(names))
        return version

    def _know(self, names: frozenset[str]) -> None:
        if names != self.names:
            self.names = names
            self._on_change()


class _Scope:
    """One namespace, or all."""

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
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

    def held(self, name: Name) -> Scaler | None:
        """The autoscaler of this name."""
        target = self.targets.get(name)
        return None if target is None else self.groups[target][name]


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
        self._api = api
        self._find_service = find_service
        self._read_service = read_service
        self._on_change = on_change
        self._scopes: dict[str | None, _Scope] = {
            each: _Scope(each) for each in tuple[str | None, ...](namespaces) or (None,)
        }

    def set_needed(self, is_needed: bool) -> None:
        """Set whether there is some service."""
        for namespace, scope in self._scopes.items():
            if is_needed and scope.task is None:
                scope.task = asyncio.create_task(self._follow(scope), name=f"autoscalers of {namespace}")
            elif not is_needed and scope.task is not None:
                scope.task.cancel()
                scope.was_asked.set()  # whoever waits need not wait any more
                self._scopes[namespace] = _Scope(namespace)

    def close(self) -> None:
        """Stop watching."""
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

    async def _follow(self, scope: _Scope) -> None:
        failures = 0
        while True:
            try:
                version = await self._list(scope)
                failures = 0
                events = changes_since(self._api, AUTOSCALERS, namespace=scope.namespace, version=version)
                async with aclosing(events):
                    async for event, obj in events:
                        await self._handle(scope, event, obj)
            except ApiError as error:
                if not failures and error.status != EXPIRED:
                    logger.warning("HorizontalPodAutoscalers are not watched: %s", error)
                failures += 1
                is_patient = failures < SCALER_PATIENCE
                is_refused = error.status in REFUSALS and (not is_patient or not scope.is_known)
                if is_refused:
                    self._forget(scope)
                if is_refused or not is_patient:
                    scope.was_asked.set()
                await asyncio.sleep(REFUSED_RETRY if is_refused else RETRY)
            except Exception:  # whoever waits for the first list would wait for ever
                logger.exception("HorizontalPodAutoscalers are not watched")
                failures += 1
                if failures >= SCALER_PATIENCE:
                    scope.was_asked.set()
                await asyncio.sleep(RETRY)

    async def _list(self, scope: _Scope) -> str:
        """Let the autoscalers that there are count. Returns the version of the list."""
        groups: dict[Name, dict[Name, Scaler]] = {}
        version = ""
        pages = self._api.list_pages(AUTOSCALERS, namespace=scope.namespace, limit=SCALER_PAGE)
        async with aclosing(pages):
            async for page in pages:
                for scaler in filter(None, map(read_scaler, page.items)):
                    groups.setdefault(scaler.service, {})[scaler.key] = scaler
                version = page.version
                del page  # what is kept of it is small
        await self._record(
            scope, {service: groups.get(service, {}) for service in {**scope.groups, **groups}}
        )
        return version

    async def _handle(self, scope: _Scope, event: str, obj: Object) -> None:
        name = object_name(obj)
        before, after = scope.held(name), None if event == "DELETED" else read_scaler(obj)
        if before == after:
            return  # its status has new figures
        groups = {
            each.service: dict(scope.groups.get(each.service, {}))
            for each in (before, after)
            if each is not None
        }
        if before is not None:
            del groups[before.service][name]
        if after is not None:
            groups[after.service][name] = after
        await self._record(scope, groups)

    async def _record(self, scope: _Scope, groups: Mapping[Name, dict[Name, Scaler]]) -> None:
        """Let these be the autoscalers of the services that are named, and of no other."""
        changed = sorted(service for service, group in groups.items() if _differs(scope, service, group))
        for service in changed:
            if target_deployment(service) is None:
                await self._read_service(service)
        scope.is_known = True
        scope.was_asked.set()
        for service in groups:
            for name in scope.groups.pop(service, {}):
                del scope.targets[name]
        for service, group in groups.items():
            if group:
                scope.groups[service] = group
                scope.targets.update(dict.fromkeys(group, service))
        for service in changed:
            self._announce(service)

    def _forget(self, scope: _Scope) -> None:
        services = list(scope.groups)
        scope.groups, scope.targets, scope.is_known = {}, {}, False
        for service in services:
            self._announce(service)

    def _announce(self, target: Name) -> None:
        deployment = target_deployment(target)
        service = target if deployment is None else self._find_service(deployment)
        if service is not None:
            self._on_change(service)


def _differs(scope: _Scope, target: Name, group: Mapping[Name, Scaler]) -> bool:
    """Whether these autoscalers of a target mean something else than those that were known."""
    if target_deployment(target) is not None:
        return scope.groups.get(target, {}) != group
    known = msgspec.structs.replace(scope.of(target), of_deployment=())
    return known != summarize(group.values(), is_known=True)
