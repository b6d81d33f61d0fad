"""The chain of a service of the local fleet, from what its supervisor says.

Owns which part of the status decides which link. Must not know the control socket. Invariant: a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from argosy.diagnosis.chain import (
    MAX_LINES,
    Diagnosis,
    Link,
    State,
    loading,
    served_meanwhile,
    until_first_problem,
)
from argosy.local.control_messages import FleetStatus, ReplicaStatus, ServiceStatus

_ORDER: Final = ("BackOff", "Stopping", "Draining", "Starting", "Ready", "Routable")
"""Phases from the worst to the best."""


def local_diagnosis(
    status: FleetStatus, service: ServiceStatus, log: Callable[[str], Sequence[str]]
) -> Diagnosis:
    """The chain of a service. `log(NAME)` gives the last lines of a replica's log, or the router's."""
    links = [
        Link(name="manifest", state="done", detail=f"{service.model}, {service.desired} replicas wanted"),
        _process(service, log),
    ]
    replica = _suspect(service)
    if replica is not None:
        links += [_loaded(replica, log), _routable(replica, status, log)]
    links.append(Link(name="ready", state="done", detail=f"{status.router.url} as {service.model!r}"))
    found = until_first_problem(links)
    if found[-1].state == "done" or not status.router.is_ready:
        return Diagnosis(service=service.key, links=found)
    routable = [replica for replica in service.replicas if replica.phase == "Routable"]
    newest = sum(replica.is_current for replica in routable)
    notes = (served_meanwhile(len(routable), newest),) if routable else ()
    return Diagnosis(service=service.key, links=found, notes=notes, serving=len(routable))


def _suspect(service: ServiceStatus) -> ReplicaStatus | None:
    current = [replica for replica in service.replicas if replica.is_current]
    return min(current, key=lambda each: (_ORDER.index(each.phase), each.name), default=None)


def _process(service: ServiceStatus, log: Callable[[str], Sequence[str]]) -> Link:
    replica = _suspect(service)
    if replica is None:
        if service.desired == 0:
            return Link(
                name="process",
                state="stopped",
                detail="spec.replicas is 0",
                remedy="raise spec.replicas, and `argosy up -f FILE`",
            )
        state: State = "failed" if service.reason else "waiting"
        return Link(name="process", state=state, detail=service.reason or "none has started yet")
    if replica.phase == "BackOff":
        return Link(
            name="process",
            state="failed",
            detail=f"{replica.name}: {replica.reason or 'it ended'}, {replica.restarts} restarts",
            lines=tuple(log(replica.name))[-MAX_LINES:],
            remedy=f"{_remedy(service, replica)}. `argosy logs {replica.name}` shows more",
        )
    return Link(name="process", state="done", detail=f"{replica.name} runs, process {replica.pid or '?'}")


def _remedy(service: ServiceStatus, replica: ReplicaStatus) -> str:
    """What to do about an engine that has ended."""
    if service.reason.startswith("RolloutHalted"):
        return (
            "correct what its last lines name, or go back by `argosy up -f FILE` with the previous manifest: the "
            "rollout is halted, and no further replica is replaced"
        )
    if "argosy up" in replica.reason:
        return "correct what its last lines name, and `argosy up -f FILE`"
    return "correct what its last lines name; it is started again by itself"


def _loaded(replica: ReplicaStatus, log: Callable[[str], Sequence[str]]) -> Link:
    if replica.phase in ("Ready", "Routable"):
        return Link(name="loaded", state="done", detail="the engine is ready")
    lines = tuple(log(replica.name))
    detail = f"{replica.name}: {replica.reason or loading(lines)}"
    return Link(name="loaded", state="waiting", detail=detail, lines=lines[-MAX_LINES:])


def _routable(replica: ReplicaStatus, status: FleetStatus, log: Callable[[str], Sequence[str]]) -> Link:
    if not status.router.is_ready:
        return Link(
            name="routable",
            state="failed" if status.router.reason else "waiting",
            detail=f"the router is not ready{': ' * bool(status.router.reason)}{status.router.reason}",
            lines=tuple(log("router"))[-MAX_LINES:],
            remedy="`argosy logs router` shows more",
        )
    if replica.phase != "Routable":
        detail = f"{replica.name}: {replica.reason or 'the router is not synced with it yet'}"
        return Link(name="routable", state="waiting", detail=detail)
    return Link(name="routable", state="done", detail="the router is synced with it")
