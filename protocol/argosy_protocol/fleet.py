"""The fleet document: which services exist, how they are called, and where their replicas are found.

In a cluster the operator writes it into a ConfigMap beside the router; on a laptop the local fleet writes it to a
file (`--fleet-file`). The router never reads custom resources: this document is all it knows of them.
Invariant: names are resolved here, by one pure function, so that operator (which reports conflicts) and router
(which routes) cannot disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

FLEET_VERSION = 1
"""Version of the document. Readers accept any version and ignore fields they do not know; a writer bumps it only
when an old reader would route wrongly."""

RoutingPolicy = Literal[
    "cost", "least-load", "prefix-hash", "session", "round-robin", "random", "power-of-two"
]

Name = Annotated[str, Meta(min_length=1, max_length=253)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


class Endpoint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica at a fixed address (local fleet, static discovery)."""

    name: Name
    url: Annotated[str, Meta(max_length=2048)]  # scheme://host:port, no path
    draining: bool = False


class ServiceLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds the router keeps for one service. Zero means: the router's own default."""

    max_inflight_per_replica: Annotated[int, Meta(ge=0, le=65536)] = 0
    request_timeout_s: Annotated[int, Meta(ge=0, le=86400)] = 0
    max_queued_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Requests that may wait for a saturated service."""
    queue_timeout_s: Annotated[int, Meta(ge=0, le=3600)] = 0
    """How long one may wait."""
    hold_timeout_s: Annotated[int, Meta(ge=0, le=3600)] = 0
    """How long a request waits for the first replica of a service that has none."""


class Canary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another service of the same namespace that answers a share of a service's requests."""

    service: Name
    weight: Annotated[int, Meta(ge=0, le=100)] = 0
    """In per cent."""


class FleetService(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One InferenceService as the router sees it."""

    namespace: Name
    name: Name
    uid: Name
    created: str = ""
    """RFC 3339 creation time of the resource: the older service wins a contested name."""
    model: ModelName
    """Canonical name of clients: what `/v1/models` of a router lists first."""
    aliases: tuple[ModelName, ...] = ()
    engine_model: Annotated[str, Meta(max_length=256)] = ""
    """What the engines call the model, whatever clients do, and what the chunk hashes are seeded with. It stays when
    names change. Empty: `model`."""
    adapters: tuple[ModelName, ...] = ()
    """LoRA adapters of the model, by the names its engines know: clients ask for `MODEL:ADAPTER`."""
    selector: dict[str, str] = {}
    """Labels of the service's pods (Kubernetes discovery); empty when `endpoints` lists the replicas."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    endpoints: tuple[Endpoint, ...] = ()
    policy: RoutingPolicy = "cost"
    limits: ServiceLimits = ServiceLimits()
    hedge_after: Annotated[float, Meta(ge=0, le=100)] | None = None
    """Times the predicted time to first token, after which a stream is asked for at a second replica. Zero means never,
    None the router's own default."""
    canary: Canary | None = None
    internal_key: str = ""
    """Bearer key of the engines where the document itself is private (local fleet). In a cluster it is empty and
    the router derives it from the fleet key and `uid`."""

    @property
    def engine_name(self) -> str:
        """The engines' name for the model."""
        return self.engine_model or self.model

    @property
    def key(self) -> str:
        """`namespace/name`: always a valid model name for this service."""
        return f"{self.namespace}/{self.name}"


class FleetDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything a router must know about the fleet."""

    version: int = FLEET_VERSION
    services: tuple[FleetService, ...] = ()


class NameConflict(Struct, frozen=True, kw_only=True):
    """`loser` claims `name`, which `winner` (older) owns. Both are service keys."""

    name: str
    winner: str
    loser: str


class NameTable(Struct, frozen=True):
    """Result of `resolve_names`."""

    names: dict[str, FleetService]
    """Every name a client may put into `model`: canonical names, aliases, `namespace/name`, and adapters' names."""
    conflicts: tuple[NameConflict, ...]
    adapters: dict[str, str] = {}
    """Of the names, those that mean an adapter of their service -> the adapter."""


def resolve_names(document: FleetDocument) -> NameTable:
    """Decides which service owns each model name.

    The older service (creation time, then key) wins a contested name; a canonical name does not beat an older
    alias. A service and its canary do not contend: names that both claim are the service's, whichever is older.
    `namespace/name` always reaches its own service. An adapter is called `NAME:ADAPTER`, by any name of its service,
    and by its own name if no other service lists one of that name; a service's name beats an adapter's.
    """
    ordered = sorted(document.services, key=lambda service: (service.created, service.key))
    names: dict[str, FleetService] = {service.key: service for service in ordered}
    claims: dict[str, list[FleetService]] = {}
    for service in ordered:
        for name in dict.fromkeys((service.model, *service.aliases)):
            claims.setdefault(name, []).append(service)
    conflicts = []
    for name, claimants in claims.items():
        owner = names.setdefault(name, _owner(claimants))
        conflicts += [
            NameConflict(name=name, winner=owner.key, loser=service.key)
            for service in claimants
            if service.key != owner.key and not _is_canary(service, owner)
        ]
    return NameTable(names, tuple(conflicts), _add_adapters(names, ordered))


def _owner(claimants: Sequence[FleetService]) -> FleetService:
    """The first one, unless it is the canary of another, and so on; of services that are each other's the first."""
    owner = claimants[0]
    seen: list[str] = []
    while owner.key not in seen:
        seen.append(owner.key)
        owner = next((service for service in claimants if _is_canary(owner, service)), owner)
    return owner


def _is_canary(service: FleetService, of: FleetService) -> bool:
    canary = of.canary
    return canary is not None and (service.namespace, service.name) == (of.namespace, canary.service)


def _add_adapters(names: dict[str, FleetService], services: Sequence[FleetService]) -> dict[str, str]:
    """Adds the adapters' names to `names`. Returns what adapter each of them means."""
    own_names: dict[str, list[str]] = {}
    for name, owner in names.items():
        own_names.setdefault(owner.key, []).append(name)
    owners = Counter(adapter for service in services for adapter in set(service.adapters))
    adapters: dict[str, str] = {}
    for service in services:
        for adapter in service.adapters:
            spellings = [f"{name}:{adapter}" for name in own_names[service.key]]
            if owners[adapter] == 1:
                spellings.append(adapter)
            for name in spellings:
                if name not in names:
                    names[name] = service
                    adapters[name] = adapter
    return adapters


def encode_fleet(document: FleetDocument) -> bytes:
    """The document as canonical JSON: equal documents give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1)


def decode_fleet(data: bytes | str) -> FleetDocument:
    """Reads a document of this or a neighbouring version (unknown fields are ignored).

    Raises:
        msgspec.ValidationError: a field has the wrong type or is out of bounds.
        msgspec.DecodeError: not JSON.
    """
    return msgspec.json.decode(data, type=FleetDocument)
