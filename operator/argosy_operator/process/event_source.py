"""kopf as the event source: it lists and watches, and hands every event to the controller.

Owns which kinds are watched where, and kopf's settings. Must not know what an event leads to. kopf handlers only hand
events over; there are no diff handlers, no daemons and no finalizers, so removing the operator never blocks the
deletion of anything.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import kopf
from msgspec import Struct

from argosy_operator.config import OperatorConfig
from argosy_operator.kinds import PODS, Kind
from argosy_operator.process.kopf_storage import NoDiffBase, NoProgress
from argosy_operator.reconcile.controller import WATCHED, Controller


class Scope(Struct, frozen=True, kw_only=True):
    """The kinds that one kopf operator watches, and the namespaces."""

    namespaces: tuple[str, ...]
    """All if empty."""
    watched: Mapping[Kind, str]


def scopes(config: OperatorConfig) -> tuple[Scope, ...]:
    """List the watches: every kind in the namespaces that are served, and pods in the operator's own, where the routers
    run and the operator may list nothing else. kopf watches the same kinds in all of its namespaces, so the latter
    takes a second kopf operator, unless the operator's namespace is served anyway."""
    served = Scope(namespaces=tuple(sorted({*config.watch_namespaces})), watched=WATCHED)
    if not config.watch_namespaces or config.namespace in config.watch_namespaces:
        return (served,)
    return served, Scope(namespaces=(config.namespace,), watched={PODS: WATCHED[PODS]})


async def watch(controller: Controller, scope: Scope, *, stop: asyncio.Event, ready: asyncio.Event) -> None:
    """Run kopf until `stop` is set, and hand every event to the controller. Sets `ready` once kopf runs."""
    await kopf.operator(
        registry=handlers(controller, scope.watched),
        settings=kopf_settings(scope.watched),
        identity=kopf_identity(),
        standalone=True,
        clusterwide=not scope.namespaces,
        namespaces=scope.namespaces,
        stop_flag=stop,
        ready_flag=ready,
    )


def kopf_identity() -> Any:
    """An identity that needs no user name, which the numeric user of a container does not have."""
    os.environ.setdefault("USER", "argosy")
    from kopf._core.engines.peering import Identity

    return Identity(os.environ.get("HOSTNAME", "argosy-operator"))


def kopf_settings(watched: Mapping[Kind, str]) -> kopf.OperatorSettings:
    """Settings with which kopf writes nothing and discovers nothing."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
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
