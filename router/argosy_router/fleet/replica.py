"""One replica as the router sees it.

Owns: identity, connection pool, key, load, health, cached prefixes, and the state shown to operators.
Must not know: what updates any of them.
Invariant: `is_routable` is the one place that decides whether a replica may get requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from argosy_protocol.routable_report import ReplicaReport, ReplicaState
from argosy_protocol.telemetry import Hello
from argosy_router.fleet.cache_value import CacheValue
from argosy_router.fleet.health.replica_health import ReplicaHealth
from argosy_router.fleet.replica_key import ReplicaKey, ServiceKeys
from argosy_router.fleet.replica_load import ReplicaLoad
from argosy_router.http.pool import ConnectionPool
from argosy_router.prefixes.replica_prefixes import ReplicaPrefixes


class Member(NamedTuple):
    """A replica as discovery reports it."""

    name: str
    uid: str
    url: str
    is_draining: bool = False
    hostname: str = ""
    """The replica's name, as on its certificate, if `url` has only its address."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it serves besides its model."""
    aliases: tuple[str, ...] = ()
    """Further names of its model that it accepts."""
    revision: str = ""
    """Hash of the pod template that it was created from; empty if that is not known."""


class InflightAttempt(Protocol):
    """An attempt in flight, which can be moved to another replica."""

    def core_stalled(self, age_s: float, bound_s: float) -> None:
        """Called when the replica's core has run no step for `age_s`, which is more than `bound_s`."""
        ...


class Replica:
    """One member of a service."""

    def __init__(
        self,
        service: str,
        member: Member,
        pool: ConnectionPool,
        prefixes: ReplicaPrefixes,
        on_measured: Callable[[], None] | None = None,
        key: ReplicaKey | None = None,
    ) -> None:
        """`on_measured` is passed to `ReplicaLoad`; without a `key` none is sent."""
        self.service = service
        self.name = member.name
        self.uid = member.uid
        self.url = member.url
        self.endpoint = endpoint_of(member.url)
        """HOST:PORT, as gateways name endpoints."""
        self.name_header = b"x-argosy-replica: %b\r\nx-argosy-service: %b\r\n" % (
            member.name.encode("latin-1", "replace"),
            service.encode("latin-1", "replace"),
        )
        self.pool = pool
        self.key = key or ReplicaKey(ServiceKeys())
        self.load = ReplicaLoad(member.name, on_measured)
        self.health = ReplicaHealth()
        self.prefixes = prefixes
        self.cache_value = CacheValue()
        self.names = frozenset((*member.adapters, *member.aliases))
        """What it serves besides its model's own name: adapters, aliases, its side of a canary rollout, and its side
        followed by each of these."""
        self.revision = member.revision
        self.is_draining = member.is_draining
        """Whether discovery reports it as draining (pod being deleted, rollout of a local fleet)."""
        self.has_announced_drain = False
        """Whether the replica itself has announced that it is draining."""
        self.link: ReplicaState = "connecting"
        """State of the telemetry stream: connecting, synced, stale or foreign."""
        self.hello: Hello | None = None
        self.heard_at: float | None = None
        """Monotonic time of the last heartbeat; None before the first."""
        self.inflight_attempts: set[InflightAttempt] = set()
        """Attempts that were sent to it and have not ended."""
        self.was_tried = False
        """Whether an attempt to reach it has ended, well or not."""
        self.syncs = 0
        """Telemetry snapshots applied: one per connection, if nothing is lost."""

    @property
    def is_routable(self) -> bool:
        """Whether requests may be sent to it, ejections aside."""
        if self.is_draining or self.has_announced_drain:
            return False
        if self.link == "foreign":
            return self.health.is_answering
        return self.link != "connecting"

    def note_tried(self) -> bool:
        """Note that an attempt to reach it has ended. Return whether it was the first."""
        is_first, self.was_tried = not self.was_tried, True
        return is_first

    @property
    def has_work(self) -> bool:
        """Whether it has reported requests, or this router has attempts in flight there."""
        return self.load.reported_requests > 0 or bool(self.inflight_attempts)

    @property
    def is_stalled(self) -> bool:
        """Whether, by the last heartbeat, its core has work but has run no step for too long."""
        return self.health.is_core_overdue and self.has_work

    @property
    def is_computing(self) -> bool:
        """Whether it currently reports that it is working on requests."""
        if self.link not in ("synced", "foreign") or not self.is_routable:
            return False
        return self.load.reported_requests > 0 and not self.is_stalled

    def serves(self, name: str) -> bool:
        """Whether it can answer as this adapter or alias, on this side; the empty name is the model itself."""
        return not name or name in self.names

    @property
    def is_available(self) -> bool:
        """Whether it is routable and not ejected."""
        return self.is_routable and not self.health.is_ejected

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model; replicas with the same one can continue each other's streams. Empty if unknown."""
        return self.hello.model_fingerprint if self.hello is not None and self.link != "foreign" else ""

    @property
    def is_argosy_engine(self) -> bool:
        """Whether the process at this address has identified itself as an Argosy engine."""
        return self.hello is not None and self.link != "foreign"

    @property
    def takes_model_names(self) -> bool:
        """Whether its answers use the model name that a header tells it the client used."""
        return self.hello is not None and self.hello.takes_model_name and self.link != "foreign"

    @property
    def announced_name(self) -> str:
        """Its own name for its model; empty if unknown."""
        return self.hello.model if self.hello is not None and self.link != "foreign" else ""

    @property
    def is_synced(self) -> bool:
        return self.link == "synced"

    @property
    def state(self) -> ReplicaState:
        """State for people: draining, connecting or the health condition if one applies, else the link."""
        if self.is_draining or self.has_announced_drain:
            return "draining"
        if self.link == "connecting":
            return "connecting"
        condition = self.health.condition(time.monotonic())
        return self.link if condition == "healthy" else condition

    def report(self) -> ReplicaReport:
        return ReplicaReport(
            service=self.service,
            name=self.name,
            uid=self.uid,
            url=self.url,
            state=self.state,
            routable=self.is_available,
            epoch=self.hello.epoch if self.hello else "",
            inflight=self.load.inflight,
        )


def endpoint_of(url: str) -> str:
    """Return HOST:PORT of a URL."""
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0]
    has_port = ":" in authority.rpartition("]")[2]
    return authority if has_port else f"{authority}:{443 if scheme == 'https' else 80}"
