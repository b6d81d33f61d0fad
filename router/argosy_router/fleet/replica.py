"""One replica as the router sees it.

Owns: identity, connection pool, load, health, residency, and the state shown to operators.
Must not know: how any of them is fed.
Invariant: `is_routable` is the one place that says whether a replica may get requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from argosy_protocol.report import ReplicaReport, ReplicaState
from argosy_protocol.telemetry import Hello
from argosy_router.fleet.health import SUSPECT_STEP_AGE_S, Health
from argosy_router.fleet.load import LoadAccount
from argosy_router.http.pool import ConnectionPool
from argosy_router.prefixes.residency import Residency


class Member(NamedTuple):
    """A replica as discovery names it."""

    name: str
    uid: str
    url: str
    is_draining: bool = False
    hostname: str = ""
    """What the replica is called where `url` has only its address: the name on its certificate."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters it serves besides its model."""
    aliases: tuple[str, ...] = ()
    """Further names of its model that it knows."""


class Movable(Protocol):
    """An attempt at a replica, as far as the replica's life matters to it."""

    def core_stalled(self, age_s: float, bound_s: float) -> None:
        """The replica's core has been silent for `age_s`, which is more than `bound_s`."""
        ...


class Replica:
    """One member of a service."""

    def __init__(
        self,
        service: str,
        member: Member,
        pool: ConnectionPool,
        residency: Residency,
        on_measured: Callable[[], None] | None = None,
    ) -> None:
        """`on_measured` is `LoadAccount`'s."""
        self.service = service
        self.name = member.name
        self.uid = member.uid
        self.url = member.url
        self.name_header = b"x-argosy-replica: %b\r\nx-argosy-service: %b\r\n" % (
            member.name.encode("latin-1", "replace"),
            service.encode("latin-1", "replace"),
        )
        self.pool = pool
        self.load = LoadAccount(member.name, on_measured)
        self.health = Health()
        self.residency = residency
        self.names = frozenset((*member.adapters, *member.aliases))
        """What it serves by other names than its model's own."""
        self.is_draining = member.is_draining
        """Discovery says so (pod being deleted, local fleet rolling)."""
        self.has_announced_drain = False
        """The replica said so itself."""
        self.link: ReplicaState = "connecting"
        """Where the telemetry stream stands: connecting, synced, stale or foreign."""
        self.is_answering = False
        """Foreign replicas: whether the last health poll succeeded."""
        self.hello: Hello | None = None
        self.heard_at: float | None = None
        """Monotonic time of the last heartbeat."""
        self.core_step_age_s = 0.0
        """Of the core, at the last heartbeat."""
        self.stall_bound_s = SUSPECT_STEP_AGE_S
        """What the core may be silent for while it has work."""
        self.under_way: set[Movable] = set()
        """Attempts that were sent to it and are not over."""
        self.syncs = 0
        """Snapshots taken in: one per connection of the telemetry stream, if nothing is lost."""

    @property
    def is_routable(self) -> bool:
        """Whether a request may be sent, short-lived ejections aside."""
        if self.is_draining or self.has_announced_drain:
            return False
        if self.link == "foreign":
            return self.is_answering
        return self.link != "connecting"

    @property
    def has_work(self) -> bool:
        """Whether it said that it has requests, or was sent some."""
        return self.load.reported_requests > 0 or bool(self.under_way)

    @property
    def is_stalled(self) -> bool:
        """Whether its core has work and has been silent for too long, by the last heartbeat."""
        return self.core_step_age_s > self.stall_bound_s and self.has_work

    @property
    def is_computing(self) -> bool:
        """Whether it says now that it works on requests."""
        if self.link not in ("synced", "foreign") or not self.is_routable:
            return False
        return self.load.reported_requests > 0 and not self.is_stalled

    def serves(self, name: str) -> bool:
        """Whether it can answer as this adapter or alias; the empty one is the model itself."""
        return not name or name in self.names

    @property
    def is_available(self) -> bool:
        """Whether it is routable and not ejected."""
        return self.is_routable and not self.health.is_ejected

    @property
    def fingerprint(self) -> str:
        """Replicas with the same one can go on with each other's streams. Empty where that is not known."""
        return self.hello.model_fingerprint if self.hello is not None and self.link != "foreign" else ""

    @property
    def is_ours(self) -> bool:
        """Whether the process that answers there has shown itself to be our engine."""
        return self.hello is not None and self.link != "foreign"

    @property
    def takes_model_names(self) -> bool:
        """Whether it answers by the name that it is told the client used."""
        return self.hello is not None and self.hello.takes_model_name and self.link != "foreign"

    @property
    def announced_name(self) -> str:
        """Its own name for its model; empty where that is not known."""
        return self.hello.model if self.hello is not None and self.link != "foreign" else ""

    @property
    def is_synced(self) -> bool:
        return self.link == "synced"

    @property
    def state(self) -> ReplicaState:
        """For people: the link, unless there is something more telling."""
        if self.is_draining or self.has_announced_drain:
            return "draining"
        if self.link == "connecting":
            return "connecting"
        condition = self.health.condition(time.monotonic())
        return self.link if condition == "well" else condition

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
