"""Watches HorizontalPodAutoscalers while some service has spec.scaling.

Owns one list and watch for each namespace that is served, and which service each autoscaler scales. Must not know what
follows from that. Invariants: while no service has spec.scaling nothing is asked; a cluster that refuses the list
leaves the autoscalers of that namespace unknown, and nothing else fails; an answer that is missing for another reason
leaves what was known; before a change counts its service is read, since the watch of services may lag behind the
autoscaler's, and with it the number that the autoscaler has written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Final

from argosy_operator.cluster.api_server import Api
from argosy_operator.errors import ApiError
from argosy_operator.kinds import AUTOSCALERS, Name, Object, object_name
from argosy_operator.observed.scaler import Scaler, Scalers, read_scaler

logger = logging.getLogger(__name__)

RETRY: Final = 5.0
"""Seconds until the next attempt after a failure."""
REFUSED_RETRY: Final = 300.0
"""Seconds until the next attempt where there is no permission, or no such kind."""
PATIENCE: Final = 3
"""Failures in a row for which decisions wait for the first list."""
_REFUSALS: Final = (401, 403, 404)
_EXPIRED: Final = 410


class _Scope:
    """One namespace, or all."""

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace
        self.scalers: Mapping[Name, Scaler] = {}
        """By the autoscaler's own name."""
        self.is_known = False
        self.was_asked = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def of(self, service: Name) -> Scalers:
        found = [each for each in self.scalers.values() if each.service == service]
        return Scalers(
            is_known=self.is_known,
            names=tuple(sorted(each.name for each in found)),
            has_synced=any(each.has_synced for each in found),
        )


class ScalerWatch:
    """Knows the HorizontalPodAutoscalers of services."""

    def __init__(
        self,
        api: Api,
        namespaces: Iterable[str],
        *,
        read_service: Callable[[Name], Awaitable[None]],
        on_change: Callable[[Name], None],
    ) -> None:
        """Args:
        namespaces: those that are served; all if empty.
        read_service: reads a service from the API server before a change of its autoscalers counts.
        on_change: called when it counts.
        """
        self._api = api
        self._read_service = read_service
        self._on_change = on_change
        self._scopes: dict[str | None, _Scope] = {
            each: _Scope(each) for each in tuple[str | None, ...](namespaces) or (None,)
        }

    def set_needed(self, is_needed: bool) -> None:
        """Set whether some service has spec.scaling."""
        for namespace, scope in self._scopes.items():
            if is_needed and scope.task is None:
                scope.task = asyncio.create_task(self._follow(scope), name=f"autoscalers of {namespace}")
            elif not is_needed and scope.task is not None:
                scope.task.cancel()
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
        return Scalers() if scope is None else scope.of(service)

    async def _follow(self, scope: _Scope) -> None:
        failures = 0
        while True:
            try:
                listed = await self._api.list(AUTOSCALERS, namespace=scope.namespace)
                read = {object_name(obj): read_scaler(obj) for obj in listed.items}
                await self._record(scope, {name: each for name, each in read.items() if each is not None})
                scope.was_asked.set()
                failures = 0
                events = self._api.watch(AUTOSCALERS, namespace=scope.namespace, version=listed.version)
                async with aclosing(events):
                    async for event, obj in events:
                        await self._handle(scope, event, obj)
            except ApiError as error:
                if not failures and error.status != _EXPIRED:
                    logger.warning("HorizontalPodAutoscalers are not watched: %s", error)
                failures += 1
                is_refused = error.status in _REFUSALS
                if is_refused:
                    self._forget(scope)
                if is_refused or failures >= PATIENCE:
                    scope.was_asked.set()
                await asyncio.sleep(REFUSED_RETRY if is_refused else RETRY)

    async def _handle(self, scope: _Scope, event: str, obj: Object) -> None:
        name = object_name(obj)
        scaler = None if event == "DELETED" else read_scaler(obj)
        if scaler == scope.scalers.get(name):
            return  # its status has new figures
        others = {each: held for each, held in scope.scalers.items() if each != name}
        await self._record(scope, others if scaler is None else {**others, name: scaler})

    async def _record(self, scope: _Scope, scalers: Mapping[Name, Scaler]) -> None:
        """Let these autoscalers count."""
        after = _Scope(scope.namespace)
        after.scalers, after.is_known = scalers, True
        services = {each.service for each in (*scope.scalers.values(), *scalers.values())}
        changed = sorted(each for each in services if scope.of(each) != after.of(each))
        for service in changed:
            await self._read_service(service)
        scope.scalers, scope.is_known = scalers, True
        for service in changed:
            self._on_change(service)

    def _forget(self, scope: _Scope) -> None:
        services = {each.service for each in scope.scalers.values()}
        scope.scalers, scope.is_known = {}, False
        for service in services:
            self._on_change(service)
