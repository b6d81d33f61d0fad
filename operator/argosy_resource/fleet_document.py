"""The fleet document: how InferenceServices appear to routers.

Must not know how the document is published (a ConfigMap in a cluster, a file on a laptop), nor which names services may
have (`name_claims`). Invariants: equal resources give an equal document, byte
for byte, in whatever order they are given; a document that would be too large lacks services of the namespaces that
take most of it, so that no tenant can keep another one's services, or their changes, out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from argosy_protocol.fleet import (
    Canary,
    Endpoint,
    FleetDocument,
    FleetService,
    ModelFetchState,
    NameReservation,
    RevisionSplit,
    ServiceLimits,
    encode_fleet,
)
from argosy_protocol.model_progress import stage
from argosy_resource.engine_address import ENGINE_PORT, selector
from argosy_resource.engine_command import engine_model
from argosy_resource.model_source import is_remote
from argosy_resource.name_claims import by_worth
from argosy_resource.scaling_spec import DEFAULT_HOLD_SECONDS
from argosy_resource.types import InferenceService

_MAX_SOURCE: Final = 256
"""Characters of a source that are shown; the router refuses more."""


def fleet_service(
    service: InferenceService,
    *,
    endpoints: tuple[Endpoint, ...] = (),
    internal_key: str = "",
    owners: tuple[str, ...] = (),
) -> FleetService:
    """A service's entry in the document. `endpoints` and `internal_key` are for the local fleet, which has no pods,
    `owners` for a cluster."""
    canary = service.spec.router.canary
    return FleetService(
        namespace=service.metadata.namespace,
        name=service.metadata.name,
        uid=service.metadata.uid or service.key,
        created=service.metadata.creation_timestamp,
        model=service.served_name,
        aliases=service.spec.model.aliases,
        engine_model="" if service.spec.engine.foreign else engine_model(service),
        selector={} if endpoints else selector(service),
        owners=owners,
        port=ENGINE_PORT,
        endpoints=endpoints,
        policy=service.spec.router.policy,
        limits=_limits(service),
        hedge_after=service.spec.router.hedge_after,
        canary=None if canary is None else Canary(service=canary.service, weight=canary.weight),
        split=None if endpoints else _split(service),
        fetch=None if endpoints else fetch_state(service),
        internal_key=internal_key,
        cold_start_s=0 if service.status.scaling is None else service.status.scaling.cold_start_seconds,
    )


def _split(service: InferenceService) -> RevisionSplit | None:
    """How requests are divided, as the status says; None while every replica may answer any request. A canary that
    every replica is about to follow shares with them, unless the old ones get no requests any more."""
    rollout = service.status.rollout
    if rollout is None or (rollout.phase == "Promoting" and rollout.weight < 100):
        return None
    return RevisionSplit(
        canary=rollout.revision,
        stable=rollout.stable_revision,
        weight=rollout.weight,
        window_s=rollout.window_seconds,
    )


def fetch_state(service: InferenceService) -> ModelFetchState | None:
    """How far the fetch of the service's model is, as its status says; None if nothing is fetched."""
    source = service.spec.model.source
    if not is_remote(source):
        return None
    shown = source.partition("?")[0].partition("#")[0]
    return ModelFetchState(source=shown[:_MAX_SOURCE], state=stage(service.status.model_cache))


def _limits(service: InferenceService) -> ServiceLimits:
    limits, scaling = service.spec.router.limits, service.spec.scaling
    scales_to_zero = scaling is not None and scaling.min_replicas == 0
    return ServiceLimits(
        max_inflight_per_replica=limits.max_inflight_per_replica,
        max_queued_requests=limits.max_queued_requests,
        queue_timeout_s=limits.queue_timeout_seconds,
        hold_timeout_s=limits.hold_timeout_seconds or (DEFAULT_HOLD_SECONDS if scales_to_zero else 0),
        request_timeout_s=limits.request_timeout_seconds,
    )


def fleet_document(
    services: Iterable[InferenceService],
    owners: Callable[[InferenceService], tuple[str, ...]] = lambda service: (),
) -> FleetDocument:
    """The document of a cluster, without the resources that are being deleted. `owners` says whose pods are replicas of
    a service (`FleetService.owners`)."""
    living = [service for service in services if not service.metadata.deletion_timestamp]
    return FleetDocument(
        services=tuple(
            fleet_service(service, owners=owners(service))
            for service in sorted(living, key=lambda service: service.key)
        )
    )


def with_entries(document: FleetDocument, kept: Iterable[FleetService]) -> FleetDocument:
    """The document with entries of an earlier one."""
    if not (entries := tuple(kept)):
        return document
    services = sorted((*document.services, *entries), key=lambda each: each.qualified_name)
    return msgspec.structs.replace(document, services=tuple(services))


def within(document: FleetDocument, limit: int) -> FleetDocument:
    """The document without the services and reservations for which there is no room in `limit` bytes. Namespaces get
    equal shares, and what others do not need (max-min fairness); within a namespace the newest services are left out,
    and reservations have the room that services leave (`name_claims.by_worth`)."""
    if len(encode_fleet(document)) <= limit:
        return document
    first = msgspec.structs.replace(
        document, services=document.services[:1], reservations=document.reservations[:1]
    )
    rest = limit - len(encode_fleet(first))
    by_namespace: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    for service in sorted(document.services, key=lambda each: (each.created, each.qualified_name)):
        sizes, _ = by_namespace.setdefault(service.namespace, ({}, {}))
        sizes[service.qualified_name] = _size(services=(service,))
    for reservation in by_worth(document.reservations):
        _, sizes = by_namespace.setdefault(reservation.namespace, ({}, {}))
        sizes[reservation.name] = _size(reservations=(reservation,))
    services: set[str] = set()
    reserved: set[str] = set()
    by_size = sorted(by_namespace.values(), key=lambda sizes: sum(sum(each.values()) for each in sizes))
    for position, (of_services, of_reservations) in enumerate(by_size):
        share = rest // (len(by_size) - position)
        services |= (fitting := _fitting(of_services, share)).keys()
        used = sum(fitting.values())
        reserved |= (fitting := _fitting(of_reservations, share - used)).keys()
        rest -= used + sum(fitting.values())
    return msgspec.structs.replace(
        document,
        services=tuple(each for each in document.services if each.qualified_name in services),
        reservations=tuple(each for each in document.reservations if each.name in reserved),
    )


def _fitting(sizes: Mapping[str, int], share: int) -> dict[str, int]:
    """The first of what has these sizes that fit into a share."""
    found = {}
    for name, size in sizes.items():
        if size > share:
            break
        share -= size
        found[name] = size
    return found


def _size(*, services: tuple[FleetService, ...] = (), reservations: tuple[NameReservation, ...] = ()) -> int:
    """Bytes by which these make a document longer that has others."""
    alone = FleetDocument(services=services, reservations=reservations)
    twice = FleetDocument(services=services * 2, reservations=reservations * 2)
    return len(encode_fleet(twice)) - len(encode_fleet(alone))


def without_canary(document: FleetDocument) -> frozenset[str]:
    """Return the names of the services whose canary the document does not have."""
    names = {service.qualified_name for service in document.services}
    return frozenset(
        service.qualified_name
        for service in document.services
        if service.canary is not None and f"{service.namespace}/{service.canary.service}" not in names
    )
