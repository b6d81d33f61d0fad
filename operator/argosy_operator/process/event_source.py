"""kopf as the event source: it lists and watches, and hands every event to the controller.

Owns which kinds are watched where, and kopf's settings. Must not know what an event leads to. kopf handlers only hand
events over; there are no diff handlers, no daemons and no finalizers, so removing the operator never blocks the
deletion of anything. Invariants: no answer of the API server ends the watches for good, because an operator that keeps
its lease and hears of nothing would be worse than none; each namespace has a kopf operator of its own, which rests
while the namespace is refused, so that no answer for one ends, repeats or delays the watches of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, Final

import kopf
from msgspec import Struct

from argosy_operator.cluster.kubernetes_api import LIST_PAGE
from argosy_operator.config import OperatorConfig
from argosy_operator.kinds import PODS, Kind
from argosy_operator.process.kopf_storage import NoDiffBase, NoProgress
from argosy_operator.reconcile.controller import WATCHED, Controller

logger = logging.getLogger(__name__)

RESTART_PAUSE: Final = 2.0
"""Seconds between an end of the watches and their next beginning."""
END_TIMEOUT: Final = 10.0
"""Seconds that kopf's tasks have to end."""
_BACKOFF_MAX: Final = 5.0
"""Seconds between two attempts of a watch while the API server is away: it resumes that long after its return."""


class Scope(Struct, frozen=True, kw_only=True):
    """The kinds that one kopf operator watches, and the namespace."""

    namespace: str | None
    """None for all of them."""
    watched: Mapping[Kind, str]


def scopes(config: OperatorConfig) -> tuple[Scope, ...]:
    """List the watches: every kind in each namespace that is served, and pods in the operator's own, where the routers
    run and the operator may list nothing else. kopf watches the same kinds in all namespaces of an operator, and ends
    with the first watch that fails, so each namespace takes one."""
    namespaces: tuple[str | None, ...] = tuple(dict.fromkeys(config.watch_namespaces)) or (None,)
    served = tuple(Scope(namespace=each, watched=WATCHED) for each in namespaces)
    if None in namespaces or config.namespace in namespaces:
        return served
    return *served, Scope(namespace=config.namespace, watched={PODS: WATCHED[PODS]})


async def watch(
    controller: Controller, scope: Scope, *, stop: asyncio.Event, claim_signals: Callable[[], None]
) -> None:
    """Run kopf until `stop` is set, and hand every event to the controller. kopf ends when a watch is refused for
    another reason than those that it asks again for; then it is started anew, and everything is listed again. While the
    controller's lists are refused kopf does not run: it would ask for ever, with an error in the log each time.

    kopf takes the process's signals at each of its starts; `claim_signals` is called afterwards to take them back.
    """
    lister = controller.lister
    while True:
        await _until(stop, lister.wait_watched(scope.namespace, is_watched=True))
        if stop.is_set():
            return
        tasks = await kopf.spawn_tasks(
            registry=handlers(controller, scope.watched),
            settings=kopf_settings(scope.watched, on_failure=partial(lister.suspect, scope.namespace)),
            identity=kopf_identity(),
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
            await _end((*tasks, refused, *_watchers(scope)))
        if stop.is_set():
            return
        if refused in done:
            continue
        errors = [task.exception() for task in done if not task.cancelled()]
        logger.warning("the watches ended and begin anew: %s", next(filter(None, errors), "no reason given"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESTART_PAUSE):
                await stop.wait()
        controller.list_again()


async def _until(stop: asyncio.Event, coroutine: Coroutine[Any, Any, None]) -> None:
    """Wait for a coroutine, or for `stop`."""
    tasks = asyncio.create_task(coroutine), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _watchers(scope: Scope) -> list[asyncio.Task[Any]]:
    """The watches of a scope that still run. When one of them fails, kopf ends and leaves the others behind; scopes
    have no namespace in common, and the names of these tasks end in theirs."""
    return [
        task
        for task in asyncio.all_tasks()
        if task.get_name().startswith("watcher for ") and task.get_name().endswith(f"@{scope.namespace}")
    ]


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel kopf's tasks and wait for their ends. kopf's own way to end would cancel the controller's as well."""
    for task in tasks:
        task.cancel()
    _, late = await asyncio.wait(tasks, timeout=END_TIMEOUT)
    if late:
        logger.warning("%d tasks of kopf did not end within %g s", len(late), END_TIMEOUT)


def kopf_identity() -> Any:
    """An identity that needs no user name, which the numeric user of a container does not have."""
    os.environ.setdefault("USER", "argosy")
    from kopf._core.engines.peering import Identity

    return Identity(os.environ.get("HOSTNAME", "argosy-operator"))


class EndlessBackoff:
    """Seconds to wait before each further attempt of a request: kopf gives up when they are used up."""

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """`on_failure` is called after the first, second, fourth and so on failure of a request."""
        self._on_failure = on_failure

    def __iter__(self) -> Iterator[float]:
        waits = itertools.chain((0.5, 1.0, 2.0), itertools.repeat(_BACKOFF_MAX))
        for failures, wait in enumerate(waits):  # the first one is taken before the first attempt
            if failures and not failures & (failures - 1):
                self._on_failure()
            yield wait


def kopf_settings(
    watched: Mapping[Kind, str], *, on_failure: Callable[[], None] = lambda: None
) -> kopf.OperatorSettings:
    """Settings with which kopf writes nothing and discovers nothing. `on_failure`: see `EndlessBackoff`."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    # By default kopf ends when the API server has been away for a minute, and has the process killed after ten more.
    settings.networking.error_backoffs = EndlessBackoff(on_failure)
    settings.process.ultimate_exiting_timeout = None
    # Whole lists of a large fleet take a gigabyte. When a token expires kopf ends, and is started anew.
    settings.watching.chunk_size = LIST_PAGE
    # The watched kinds are known, so no permission to list CRDs and namespaces is needed.
    settings.scanning.disabled = True
    for kind, labels in watched.items():
        if labels:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = labels
    return settings


def handlers(controller: Controller, watched: Mapping[Kind, str]) -> kopf.OperatorRegistry:
    """One event handler for each kind, and the login."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        if "KUBECONFIG" in os.environ:
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    for kind in watched:
        _listen(registry, controller, kind)
    return registry


def _listen(registry: kopf.OperatorRegistry, controller: Controller, kind: Kind) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)
    async def on_event(event: Any, **_: Any) -> None:
        controller.handle(kind, event["type"], dict(event["object"]))
