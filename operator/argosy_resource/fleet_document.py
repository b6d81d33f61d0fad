"""The fleet document: how InferenceServices appear to routers, and which model names those of each namespace may have.

Owns the entry of a service, the document's size, and the rules between namespaces: names of another namespace, an
administrator's patterns, who has a name that several claim, and the hour for which it stays reserved after its owner
(`argosy_protocol.fleet.resolve_names` decides between services of one namespace). Must not know how the document is
published (a ConfigMap in a cluster, a file on a laptop), nor a clock. Invariants: equal resources give an equal
document, byte for byte, in whatever order they are given; one that would be too large lacks services of the namespaces
that take most of it, so that no tenant can keep another one's services, or their changes, out of it; a service appears
without the names that it must not have, so that routers of any version agree, and no two namespaces claim one; all that
is remembered is in the document; reservations are bounded, and no namespace can push out those of another one; a
decision about all names takes a time that is linear in their number.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Final, Literal

import msgspec
from msgspec import Struct

from argosy_protocol.fleet import (
    Canary,
    Endpoint,
    FleetDocument,
    FleetService,
    ModelFetchState,
    NameConflict,
    NameReservation,
    RevisionSplit,
    ServiceLimits,
    encode_fleet,
    rank_of,
    resolve_names,
)
from argosy_protocol.reports import stage
from argosy_resource.engine_command import ENGINE_PORT, engine_model, selector
from argosy_resource.model import is_remote
from argosy_resource.scaling import DEFAULT_HOLD_SECONDS
from argosy_resource.types import InferenceService

_MAX_SOURCE: Final = 256
"""Characters of a source that are shown; the router refuses more."""
RESERVED: Final = datetime.timedelta(hours=1)
"""Time for which a name stays reserved: its users learn that it is gone, and change what they ask for."""
MAX_RESERVED_OF_NAMESPACE: Final = 128
MAX_RESERVED: Final = 512
"""Names that are reserved at once. At most some 200 KiB of the fleet document."""
OTHERS: Final = "*"
"""In `NamePolicy.allowed`: the namespaces that it does not list."""


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
        fetch=None if endpoints else _fetch_state(service),
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


def _fetch_state(service: InferenceService) -> ModelFetchState | None:
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


def with_entries(document: FleetDocument, kept: Iterable[FleetService]) -> FleetDocument:
    """The document with entries of an earlier one."""
    if not (entries := tuple(kept)):
        return document
    services = sorted((*document.services, *entries), key=lambda each: each.qualified_name)
    return msgspec.structs.replace(document, services=tuple(services))


def within(document: FleetDocument, limit: int) -> FleetDocument:
    """The document without the services and reservations for which there is no room in `limit` bytes. Namespaces get
    equal shares, and what others do not need (max-min fairness); within a namespace the newest services are left out,
    and reservations have the room that services leave (`_by_worth`)."""
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
    for reservation in _by_worth(document.reservations):
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


LossReason = Literal["NameConflict", "NameRefused", "NameReserved"]


class LostName(Struct, frozen=True, kw_only=True):
    """A name that a service claims and does not have."""

    name: str
    reason: LossReason
    """Reason of the condition: another service has it, this namespace must not have it, or it is reserved."""
    why: str
    """Predicate of a sentence about the name."""


class NamePolicy(Struct, frozen=True, kw_only=True):
    """What namespaces may claim."""

    namespaces: Set[str]
    """Those that exist, as far as that is known."""
    allowed: Mapping[str, tuple[str, ...]] = {}
    """Patterns of the names that a namespace may claim, where an administrator bounds them; `*` and `?` stand for any
    characters and for one. `namespace/NAME` with its own name is always allowed."""

    def refusal(self, namespace: str, name: str) -> str:
        """Why a namespace must not have a name; empty if it may."""
        if "/" not in name and not self.allowed:
            return ""
        first, slash, _ = name.partition("/")
        if slash and first == namespace:
            return ""
        patterns = self.allowed.get(namespace, self.allowed.get(OTHERS))
        matching = [pattern for pattern in patterns or () if fnmatchcase(name, pattern)]
        if patterns is not None and not matching:
            return f"is not among the names that the administrator allows namespace {namespace} (modelNames)"
        if slash and first in self.namespaces and not any(each.startswith(f"{first}/") for each in matching):
            return f"is a name of namespace {first}, and this service is in another one"
        return ""


class SettledNames(Struct, frozen=True, kw_only=True):
    """Result of `settle_names`."""

    document: FleetDocument
    """Without the names that services must not have, and with the reservations."""
    lost: dict[str, tuple[LostName, ...]]
    """What each service lost, by its key."""


def settle_names(
    claimed: FleetDocument, last: FleetDocument, policy: NamePolicy, now: datetime.datetime
) -> SettledNames:
    """Decide which services have the names that they claim.

    A namespace that has a name in the `last` document, or for which it is reserved there, keeps it as long as a service
    of it claims it, and for RESERVED after that. Of namespaces that begin to claim a name in the same document the one
    with the older service gets it.
    """
    ordered = sorted(claimed.services, key=lambda each: (each.created, each.qualified_name))
    qualified = {service.qualified_name: service.namespace for service in ordered}
    claimants: dict[str, dict[str, None]] = {name: {owner: None} for name, owner in qualified.items()}
    refusals: dict[tuple[str, str], LostName] = {}
    for service in ordered:
        for name in _claims(service):
            if why := policy.refusal(service.namespace, name):
                refusals[service.qualified_name, name] = LostName(name=name, reason="NameRefused", why=why)
            else:
                claimants.setdefault(name, {})[service.namespace] = None
    had = _owners(last)
    reserved = _reservations(last, had, claimants, policy, now)
    holders = {**{each.name: each.namespace for each in last.reservations}, **had}
    owners: dict[str, str] = {}
    for name, namespaces in claimants.items():
        holder = holders.get(name, "")
        if name in qualified:
            owners[name] = qualified[name]
        elif holder in namespaces:
            owners[name] = holder
        elif name not in reserved:
            owners[name] = next(iter(namespaces))
    document = FleetDocument(
        version=claimed.version,
        services=tuple(_without_lost(service, refusals, owners) for service in claimed.services),
        reservations=tuple(sorted(reserved.values(), key=lambda each: (each.namespace, each.name))),
    )
    table = resolve_names(document)
    lost: dict[str, tuple[LostName, ...]] = {}
    for service in ordered:
        key, found = service.qualified_name, []
        for name in _claims(service):
            if (refusal := refusals.get((key, name))) is not None:
                found.append(refusal)
            elif owners.get(name) == service.namespace:
                continue
            elif (owner := table.names.get(name)) is not None:
                found.append(_conflict(name, owner, service, had_it=holders.get(name) == owner.namespace))
            else:
                found.append(_reserved(reserved[name]))
        if found:
            lost[key] = tuple(found)
    for conflict in table.conflicts:
        lost[conflict.loser] = (*lost.get(conflict.loser, ()), _lost_to(conflict))
    return SettledNames(document=document, lost=lost)


def _lost_to(conflict: NameConflict) -> LostName:
    """What the loser of a conflict between services of one namespace is told."""
    whys = {
        "older": f"belongs to {conflict.winner}, which is older",
        "name": f"belongs to {conflict.winner}, which is as old and comes first by name",
        "canary": f"belongs to {conflict.winner}, whose canary is older",
        "qualified": f"always names {conflict.winner}",
    }
    return LostName(name=conflict.name, reason="NameConflict", why=whys[conflict.rank])


def _conflict(name: str, owner: FleetService, loser: FleetService, *, had_it: bool) -> LostName:
    rank = rank_of(name, owner, loser)
    if had_it and rank == "canary":  # by age the loser would have it
        why = f"belongs to {owner.qualified_name}, which had it first"
        return LostName(name=name, reason="NameConflict", why=why)
    return _lost_to(
        NameConflict(name=name, winner=owner.qualified_name, loser=loser.qualified_name, rank=rank)
    )


def _reserved(reservation: NameReservation) -> LostName:
    why = f"is reserved until {reservation.until} for namespace {reservation.namespace}, which had it"
    return LostName(name=reservation.name, reason="NameReserved", why=why)


def _claims(service: FleetService) -> dict[str, None]:
    return dict.fromkeys((service.model, *service.aliases))


def _owners(document: FleetDocument) -> dict[str, str]:
    """The namespace that has each name, adapters' names aside: they go with their model's."""
    table = resolve_names(document)
    return {name: owner.namespace for name, owner in table.names.items() if name not in table.adapters}


def _without_lost(
    service: FleetService, refusals: Mapping[tuple[str, str], LostName], owners: Mapping[str, str]
) -> FleetService:
    """The service without the names that it must not have; its main one is then `namespace/name`."""
    key = service.qualified_name
    kept = {
        name
        for name in _claims(service)
        if (key, name) not in refusals and owners.get(name) == service.namespace
    }
    aliases = tuple(name for name in service.aliases if name in kept)
    if service.model in kept:
        return service if aliases == service.aliases else msgspec.structs.replace(service, aliases=aliases)
    return msgspec.structs.replace(
        service,
        model=key,
        aliases=tuple(name for name in aliases if name != key),
        withheld_model="" if service.engine_model else service.started_name,
    )


def _reservations(
    last: FleetDocument,
    had: Mapping[str, str],
    claimants: Mapping[str, Mapping[str, None]],
    policy: NamePolicy,
    now: datetime.datetime,
) -> dict[str, NameReservation]:
    """The names that are reserved from now on: those that ended with the last document, and those of it whose hour is
    not over. None that a service of its namespace has again, and none that this must not have any more."""
    latest = now + RESERVED
    ends = {name: (namespace, latest) for name, namespace in had.items()}
    for each in last.reservations:
        # Another operator's clock, or this one's before it was set, may have been ahead.
        ends.setdefault(each.name, (each.namespace, min(_time(each.until, latest), latest)))
    found: dict[str, list[NameReservation]] = {}
    for name, (namespace, until) in ends.items():
        if until > now and namespace not in claimants.get(name, ()) and not policy.refusal(namespace, name):
            found.setdefault(namespace, []).append(
                NameReservation(name=name, namespace=namespace, until=_text(until))
            )
    return {each.name: each for each in _bounded(found.values())}


def _bounded(groups: Iterable[Sequence[NameReservation]]) -> list[NameReservation]:
    """Those of each namespace that are worth most; namespaces get equal shares of MAX_RESERVED, and what others do not
    need."""
    newest = [_by_worth(group)[:MAX_RESERVED_OF_NAMESPACE] for group in groups]
    kept: list[NameReservation] = []
    by_size = sorted(newest, key=lambda group: (len(group), group[0].until, group[0].namespace))
    for position, group in enumerate(by_size):
        kept += group[: (MAX_RESERVED - len(kept)) // (len(by_size) - position)]
    return kept


def _by_worth(reservations: Iterable[NameReservation]) -> list[NameReservation]:
    """Reservations in the order in which they are kept where there is no room for all of a namespace: names that begin
    with the namespace's own come last, as they are refused to others without one while it exists; then the newest."""
    newest = sorted(reservations, key=lambda each: each.until, reverse=True)
    return sorted(newest, key=lambda each: each.name.startswith(f"{each.namespace}/"))


def _time(text: str, default: datetime.datetime) -> datetime.datetime:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return default
    return found if found.tzinfo is not None else default


def _text(time: datetime.datetime) -> str:
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_until_next_end(document: FleetDocument, now: datetime.datetime) -> float | None:
    """Seconds until a reservation of the document ends; None without any."""
    ends = [_time(each.until, now) for each in document.reservations]
    return max(0.0, (min(ends) - now).total_seconds()) if ends else None


def without_canary(document: FleetDocument) -> frozenset[str]:
    """Return the names of the services whose canary the document does not have."""
    names = {service.qualified_name for service in document.services}
    return frozenset(
        service.qualified_name
        for service in document.services
        if service.canary is not None and f"{service.namespace}/{service.canary.service}" not in names
    )
