"""The fleet document: services, their model names, and where to find their replicas.

In a cluster the operator writes it to a ConfigMap in the router's namespace; on a laptop the local fleet writes it to a
file (`--fleet-file`). The router never reads custom resources: it knows them only through this document.
Invariant: names are resolved here, by one pure function, so that the operator, which reports conflicts, and the router,
which routes, cannot disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_protocol import json_limits

FLEET_VERSION = 1
"""Version of the document. Readers accept any version and ignore fields that they do not know; a writer bumps it only
if an old reader would route wrongly."""

RoutingPolicy = Literal[
    "cost", "least-load", "prefix-hash", "session", "round-robin", "random", "power-of-two"
]

REVISION_LABEL = "inference.argosy.dev/revision"
"""Label of every pod of an engine: hash of the pod template that it was created from."""

Name = Annotated[str, Meta(min_length=1, max_length=253)]
Revision = Annotated[str, Meta(max_length=63)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Rank = Literal["older", "name", "canary", "qualified"]
"""Why a service has a name that another one claims as well: it is older; of those created in the same second its
name comes first; it is the service of a canary that would have the name; the name is its `namespace/name`."""


class Endpoint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica at a fixed address (local fleet, static discovery)."""

    name: Name
    url: Annotated[str, Meta(max_length=2048)]  # scheme://host:port, no path
    draining: bool = False
    revision: Revision = ""


class ServiceLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits that the router enforces for one service. Zero stands for the router's own default."""

    max_inflight_per_replica: Annotated[int, Meta(ge=0, le=65536)] = 0
    request_timeout_s: Annotated[int, Meta(ge=0, le=86400)] = 0
    max_queued_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Requests that may wait for a saturated service."""
    queue_timeout_s: Annotated[int, Meta(ge=0, le=3600)] = 0
    """How long a request may wait in the queue."""
    hold_timeout_s: Annotated[int, Meta(ge=0, le=3600)] = 0
    """How long a request waits for the first replica of a service that has none."""


class Canary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another service in the same namespace that answers a share of a service's requests."""

    service: Name
    weight: Annotated[int, Meta(ge=0, le=100)] = 0
    """The share in per cent."""


class RevisionSplit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a service's requests are divided between replicas of two revisions while a change is tried on a canary."""

    canary: Annotated[str, Meta(min_length=1, max_length=63)]
    """Revision of the replicas that try the change, as REVISION_LABEL has it."""
    stable: Revision = ""
    """Revision of the replicas that serve the others' share; empty for every other one."""
    weight: Annotated[int, Meta(ge=0, le=100)] = 0
    """The canary's share in per cent, at most: below 100, its replicas get no more requests each than the stable ones,
    so that their figures can be compared."""
    window_s: Annotated[int, Meta(ge=10, le=3600)] = 300
    """Seconds of attempts that routers' reports count of each side."""


class ModelFetchState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the fetch of a service's model is, for people. It must change seldom: with it the document changes."""

    source: Annotated[str, Meta(max_length=256)] = ""
    """Where the model comes from, without what may be a signature."""
    state: Annotated[str, Meta(max_length=32)] = ""
    """`cached`, `failed`, `locked`, `waiting`, `unpacking`, or `fetching` with the share in steps of a tenth; empty
    before the first replica has begun."""


class FleetService(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One InferenceService as the router sees it."""

    namespace: Name
    name: Name
    uid: Name
    created: str = ""
    """RFC 3339 creation time of the resource; the older service wins a contested name."""
    model: ModelName
    """Canonical name for clients, which a router's `/v1/models` lists first."""
    aliases: tuple[ModelName, ...] = ()
    engine_model: Annotated[str, Meta(max_length=256)] = ""
    """The engines' own name for the model, with which chunk hashes are seeded. It stays the same when the names for
    clients change. Empty stands for `model`."""
    withheld_model: Annotated[str, Meta(max_length=256)] = ""
    """Name that the service claims and must not have, if engines of other makes were started with it: they know no
    other one. Clients cannot use it. Empty stands for `model`."""
    adapters: tuple[ModelName, ...] = ()
    """LoRA adapters of the model, by the names that its engines use; clients request `MODEL:ADAPTER`."""
    selector: dict[str, str] = {}
    """Labels of the service's pods (Kubernetes discovery); empty if `endpoints` lists the replicas."""
    owners: tuple[str, ...] = ()
    """Beginnings of the names of the ReplicaSets that control the service's pods. Others with its labels are no
    replicas; empty if any are."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    endpoints: tuple[Endpoint, ...] = ()
    policy: RoutingPolicy = "cost"
    limits: ServiceLimits = ServiceLimits()
    hedge_after: Annotated[float, Meta(ge=0, le=100)] | None = None
    """Multiple of the predicted time to first token after which a stream is hedged at a second replica. Zero means
    never, None the router's own default."""
    canary: Canary | None = None
    split: RevisionSplit | None = None
    """None unless a change is tried on a canary of this service's own."""
    fetch: ModelFetchState | None = None
    """None if replicas fetch nothing."""
    cold_start_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """How long a first replica takes from its creation until routers use it, as last measured; 0 if that is unknown.
    Clients whose request was held for too long are told when to come back."""
    internal_key: str = ""
    """Bearer key of the engines if the document itself is private (local fleet). In a cluster it is empty, and the
    router derives the key from the fleet key and `uid`."""

    @property
    def engine_name(self) -> str:
        """The engines' name for the model."""
        return self.engine_model or self.started_name

    @property
    def started_name(self) -> str:
        """The name for clients with which engines that cannot be told another one were started."""
        return self.withheld_model or self.model

    @property
    def qualified_name(self) -> str:
        """`namespace/name`, which is always a valid model name for this service."""
        return f"{self.namespace}/{self.name}"


class NameReservation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name that no service of another namespace gets for some time, since its last owner has ended. The operator
    keeps to it and routers need not know it: services that must not have a name do not have it in the document."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    namespace: Name
    until: Annotated[str, Meta(max_length=64)] = ""
    """RFC 3339 time, by the operator's clock."""


class FleetDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that a router knows about the fleet from its configuration source."""

    version: int = FLEET_VERSION
    services: tuple[FleetService, ...] = ()
    reservations: tuple[NameReservation, ...] = ()


_DOCUMENTS = msgspec.json.Decoder(FleetDocument)


class NameConflict(Struct, frozen=True, kw_only=True):
    """`loser` claims `name`, which `winner` owns. Both are service keys."""

    name: str
    winner: str
    loser: str
    rank: Rank = "older"


class NameTable(Struct, frozen=True):
    """Result of `resolve_names`."""

    names: dict[str, FleetService]
    """Every value that clients may use for `model`: canonical names, aliases, `namespace/name`, and adapters' names."""
    conflicts: tuple[NameConflict, ...]
    adapters: dict[str, str] = {}
    """Name that stands for an adapter of its service -> the adapter."""


def resolve_names(document: FleetDocument) -> NameTable:
    """Decide which service owns each model name.

    The older service (by creation time, then key) wins a contested name; a canonical name does not win over an older
    alias. A service and its canary do not conflict: names that both claim belong to the service, whichever is older.
    `namespace/name` always names its own service. An adapter is named `NAME:ADAPTER` with any name of its service, and
    also by its own name if no other service has an adapter of that name; a service's name wins over an adapter's.
    """
    ordered = sorted(document.services, key=lambda service: (service.created, service.qualified_name))
    names: dict[str, FleetService] = {service.qualified_name: service for service in ordered}
    claims: dict[str, list[FleetService]] = {}
    for service in ordered:
        for name in dict.fromkeys((service.model, *service.aliases)):
            claims.setdefault(name, []).append(service)
    conflicts = []
    for name, claimants in claims.items():
        if (owner := names.get(name)) is None:
            owner = names[name] = _owner(claimants)
        if len(claimants) == 1 and claimants[0] is owner:
            continue  # as nearly all names, of which a fleet may have tens of thousands
        conflicts += [
            NameConflict(
                name=name,
                winner=owner.qualified_name,
                loser=service.qualified_name,
                rank=rank_of(name, owner, service),
            )
            for service in claimants
            if service.qualified_name != owner.qualified_name and not _is_canary(service, owner)
        ]
    return NameTable(names, tuple(conflicts), _add_adapters(names, ordered))


def rank_of(name: str, owner: FleetService, other: FleetService) -> Rank:
    """Why `owner` has a name rather than `other`."""
    if name == owner.qualified_name:
        return "qualified"
    if owner.created < other.created:
        return "older"
    if owner.created == other.created and owner.qualified_name < other.qualified_name:
        return "name"
    return "canary"


def _owner(claimants: Sequence[FleetService]) -> FleetService:
    """The first claimant, unless it is the canary of another one: then that one, and so on. Of claimants that are each
    other's canaries, the first. Takes a time that is linear in their number, which is a tenant's to choose."""
    if len(claimants) == 1:
        return claimants[0]
    of_canary: dict[str, FleetService] = {}
    for service in claimants:
        if service.canary is not None:
            of_canary.setdefault(f"{service.namespace}/{service.canary.service}", service)
    owner = claimants[0]
    seen: set[str] = set()
    while owner.qualified_name not in seen:
        seen.add(owner.qualified_name)
        owner = of_canary.get(owner.qualified_name, owner)
    return owner


def _is_canary(service: FleetService, of: FleetService) -> bool:
    canary = of.canary
    return canary is not None and (service.namespace, service.name) == (of.namespace, canary.service)


def _add_adapters(names: dict[str, FleetService], services: Sequence[FleetService]) -> dict[str, str]:
    """Add the adapters' names to `names`; return the adapter that each of them stands for."""
    adapters: dict[str, str] = {}
    owners = Counter(adapter for service in services for adapter in set(service.adapters))
    if not owners:
        return adapters
    own_names: dict[str, list[str]] = {}
    for name, owner in names.items():
        own_names.setdefault(owner.qualified_name, []).append(name)
    for service in services:
        for adapter in service.adapters:
            spellings = [f"{name}:{adapter}" for name in own_names[service.qualified_name]]
            if owners[adapter] == 1:
                spellings.append(adapter)
            for name in spellings:
                if name not in names:
                    names[name] = service
                    adapters[name] = adapter
    return adapters


def encode_fleet(document: FleetDocument) -> bytes:
    """Encode as canonical JSON: equal documents give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1)


def decode_fleet(data: bytes | str) -> FleetDocument:
    """Decode a document of any version; unknown fields are ignored, however deep.

    Raises:
        msgspec.ValidationError: a field has the wrong type or is out of bounds.
        msgspec.DecodeError: not JSON.
    """
    return json_limits.decode(_DOCUMENTS, data if isinstance(data, bytes) else data.encode())
