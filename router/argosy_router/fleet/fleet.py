"""The live fleet: services and replicas with their tasks, kept equal to discovery's latest snapshot.

Owns: the lifecycle of services, replicas and telemetry tasks; the name table; the revision that the operator waits for.
Must not know: where snapshots come from, how requests are sent.
Invariants: applying a snapshot never interrupts a request in flight; every telemetry task ends with its replica.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from argosy_protocol.fleet import FleetDocument, FleetService, NameTable, resolve_names
from argosy_protocol.fleet_keys import FleetKeys
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import RoutableReport
from argosy_router.config import DEFAULT_INDEX_MEMORY, UpstreamLimits
from argosy_router.fleet.replica import Member, Replica, ReplicaKey, ServiceKeys
from argosy_router.fleet.service import Service
from argosy_router.fleet.telemetry import (
    FleetTelemetryBudget,
    Reconnects,
    ServiceTelemetryBudget,
    TelemetryClient,
)
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.upstream import ConnectionPool, FirstByteTimeout, UpstreamTls
from argosy_router.prefixes import SHARDS, ReplicaPrefixes, shares

log = logging.getLogger(__name__)

MAINTENANCE_S = 0.25
"""Pause between rounds of expiring speculative inserts and scrubbing indexes."""
MAX_NOTED_GONE = 1000
"""Services that have left, of which readers of the report are told, beside as many as there are."""
REPLICAS_PER_TURN, SERVICES_PER_TURN = 1000, 32
"""As many are looked at in one turn of the event loop."""
FIRST_ANSWER_S = 1.0
"""Time in which a replica that is well answers a new router."""
MAX_LOGGED_CONFLICTS = 20
"""Contested names that are logged of one document; a tenant may contest as many as it likes."""
SHARING_ROUNDS = 4
"""Rounds between two divisions of the indexes' memory; measuring takes 30 us per service."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """A result of discovery: the fleet document, and the members of each service by its qualified name."""

    document: FleetDocument = field(default_factory=FleetDocument)
    revision: str = ""
    """xxh3 hex digest of the document as read."""
    members: Mapping[str, tuple[Member, ...]] = field(default_factory=dict)
    routers: int = 0
    """Live routers, this one included; zero if they are not counted."""
    unheard: int = 0
    """Replicas that were asked for their models and have not told them yet."""
    unasked: int = 0
    """Those of them whose first question has not ended, well or not."""


class Fleet:
    """All services and replicas of one router."""

    def __init__(
        self,
        wheel: TimerWheel,
        limits: UpstreamLimits,
        *,
        tls: UpstreamTls | None = None,
        fleet_keys: FleetKeys | None = None,
        index_memory: int = DEFAULT_INDEX_MEMORY,
        policy: str = "",
        rng: random.Random | None = None,
    ) -> None:
        self._wheel = wheel
        self._limits = limits
        self._tls = tls or UpstreamTls()
        self._fleet_keys = fleet_keys or FleetKeys()
        self._index_memory = index_memory
        self.policy = policy
        """Overrides every service's own policy unless empty."""
        self.rng = rng or random.Random()  # noqa: S311 - ties, not secrets
        self.services: dict[str, Service] = {}
        self.names = NameTable({}, ())
        self._by_name: dict[str, Service] = {}
        """Model name -> service, resolved by `names`."""
        self.permitted: dict[tuple[str, ...], list[tuple[str, Service]]] = {}
        """What `proxy.call.names_for` has found since services or their names have changed, by a key's models."""
        self._applied = FleetSnapshot()
        self.fleet_revision = ""
        self.is_loaded = False
        self._loaded_at = 0.0
        """Monotonic time of the first snapshot."""
        self._was_accepted = False
        """Whether a replica has accepted a key of this router."""
        self._num_unheard = 0
        self._num_unasked = 0
        self._is_initialized = False
        self.revision = 0
        self._epoch = secrets.token_hex(8)
        self._unlisted: set[Service] = set()
        """Services that may have models of another length than lists of models say."""
        self._num_lengths = 0
        self._changed_in: dict[str, int] = {}
        """The last revision in which each service has changed; those without one have changed in `_all_changed_in`."""
        self._all_changed_in = 0
        self._changed = asyncio.Event()
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._clients: dict[Replica, TelemetryClient] = {}
        self._untried: dict[Replica, None] = {}
        """Replicas that no attempt to reach has ended of, and maybe others behind the first such one."""
        self.reconnects = Reconnects()
        self._telemetry_budget = FleetTelemetryBudget()
        self._service_budgets: dict[Service, ServiceTelemetryBudget] = {}
        self._divisions = 0
        """How often the memory for indexes was divided."""

    def apply(self, snapshot: FleetSnapshot) -> None:
        """Make the fleet equal to `snapshot`.

        Only services are touched whose entry or members have changed: in a large fleet one of them does all the time.
        """
        before, self._applied = self._applied, snapshot
        if snapshot.document is before.document:
            for name, service in self.services.items():
                members = snapshot.members.get(name, ())
                if members is not before.members.get(name, ()):
                    self._apply_members(service, members)
                    self._note_changed(service)
        else:
            self._apply_document(before, snapshot)
        self.fleet_revision = snapshot.revision
        self._loaded_at = self._loaded_at or time.monotonic()
        self.is_loaded = True
        self._num_unheard = snapshot.unheard
        self._num_unasked = snapshot.unasked
        self._increment()

    def _apply_document(self, before: FleetSnapshot, snapshot: FleetSnapshot) -> None:
        document = snapshot.document
        wanted = {spec.qualified_name: spec for spec in document.services}
        present = set(self.services.values())
        for name in [name for name in self.services if name not in wanted]:
            self._remove_service(name)
            self._note_gone(name)
        for name, spec in wanted.items():
            present_one, members = self.services.get(name), snapshot.members.get(name, ())
            if (
                present_one is not None
                and present_one.spec == spec
                and members == before.members.get(name, ())
            ):
                continue
            service = self._keep_service(spec)
            self._apply_members(service, members)
            self._note_changed(service)
        if present != set(self.services.values()):
            for _ in self._share_index_memory():
                pass
        known = set(self.names.conflicts)
        self.names = resolve_names(document)
        self.permitted = {}
        self._by_name = {name: self.services[spec.qualified_name] for name, spec in self.names.names.items()}
        new = [conflict for conflict in self.names.conflicts if conflict not in known]
        for conflict in new[:MAX_LOGGED_CONFLICTS]:
            log.warning("model name %r: %s wins over %s", conflict.name, conflict.winner, conflict.loser)
        if len(new) > MAX_LOGGED_CONFLICTS:
            log.warning("%d further model names are contested", len(new) - MAX_LOGGED_CONFLICTS)

    @property
    def knows_all_models(self) -> bool:
        """Whether a model name that is not known now is unknown to all replicas."""
        return self.is_loaded and self._num_unheard == 0

    def service_of(self, name: str) -> Service | None:
        """Return the service behind a model name; None if there is none."""
        return self._by_name.get(name)

    def adapter_of(self, name: str) -> str:
        """Return the adapter that a model name stands for; empty for the model itself."""
        return self.names.adapters.get(name, "")

    def answering(self, service: Service, drawn_by: bytes) -> Service:
        """Draw the service that answers a request for `service`: itself or its canary, the same for equal `drawn_by`.

        Routers agree without communicating, and a `drawn_by` that draws the canary at one weight draws it at any higher
        one. A canary that cannot answer is never returned.
        """
        spec = service.spec
        if spec.canary is None:
            return service
        canary = self.services.get(f"{spec.namespace}/{spec.canary.service}")
        if canary is None or xxh3_64_intdigest(b"canary " + drawn_by) % 100 >= spec.canary.weight:
            return service
        return canary if canary.candidates.can_answer(time.monotonic()) else service

    def replicas(self) -> Iterator[Replica]:
        for service in self.services.values():
            yield from service.replicas.values()

    def fleet_keys_changed(self) -> None:
        """Derive the services' keys anew. Replicas keep the key that they accept until they accept a newer one."""
        for service in self.services.values():
            service.keys.replace(self._keys_of(service.spec))

    @property
    def is_initialized(self) -> bool:
        """Whether an attempt to reach each replica has ended, well or not, or `FIRST_ANSWER_S` have passed since
        discovery reported: before that, replicas that are well would count as unreachable. Once true, it stays. The
        term is Envoy's, for a cluster whose hosts all had their first health check."""
        return self._is_initialized or (self.is_loaded and not self._is_early)

    @property
    def is_shut_out(self) -> bool:
        """Whether no replica has accepted a key of this router since its start, and all that there are refuse them: it
        has started with a fleet key that has not reached the engines yet. Right after the start one that refuses is
        enough, since others may be about to."""
        if self._was_accepted or not self._fleet_keys.keys:
            return False
        refusals = [replica.key.is_refused for replica in self.replicas() if not replica.is_draining]
        return any(refusals) if self._is_early else bool(refusals) and all(refusals)

    @property
    def _is_early(self) -> bool:
        """Whether replicas that are well may not have answered yet since discovery reported."""
        return time.monotonic() < self._loaded_at + FIRST_ANSWER_S

    def skipped_frames(self) -> int:
        return sum(client.skipped_frames for client in self._clients.values())

    # revisions

    def changed(self) -> None:
        """Drop all cached candidates, increment the revision and wake its waiters."""
        for service in self.services.values():
            service.invalidate()
        self._unlisted.update(self.services.values())
        self._note_all_changed()
        self._increment()

    def replica_changed(self, replica: Replica) -> None:
        """The same for the service of a replica whose state has changed. It costs the same in a fleet of any size,
        because a replica may change its state as often as it likes."""
        self._was_accepted |= replica.link != "connecting"
        service = self.services.get(replica.service)
        if service is not None:
            self._note_changed(service)
            self._increment()

    def model_lengths(self) -> int:
        """Return a number that changes when a service's `max_model_len` does. It costs as much as there are services
        that have changed since it was asked for."""
        while self._unlisted:
            service = self._unlisted.pop()
            if service.max_model_len != service.listed_len:
                service.listed_len = service.max_model_len
                self._num_lengths += 1
        return self._num_lengths

    def _note_changed(self, service: Service) -> None:
        service.invalidate()
        self._unlisted.add(service)
        self._changed_in[service.spec.qualified_name] = self.revision + 1

    def _note_gone(self, name: str) -> None:
        self._changed_in[name] = self.revision + 1
        if len(self._changed_in) > 2 * len(self.services) + MAX_NOTED_GONE:
            self._note_all_changed()

    def _note_all_changed(self) -> None:
        self._changed_in.clear()
        self._all_changed_in = self.revision + 1

    def _increment(self) -> None:
        """Begin the next revision, whose changes are noted."""
        self.revision += 1
        while self._untried and next(iter(self._untried)).was_tried:
            del self._untried[next(iter(self._untried))]
        if not self._is_initialized:
            self._is_initialized = self.is_initialized or (
                self.is_loaded and not self._num_unasked and not self._untried
            )
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, after: int, timeout_s: float) -> None:
        """Wait until the revision differs from `after`, at most `timeout_s`."""
        if self.revision != after:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def report(self, router: str, *, since: int = -1, epoch: str = "") -> RoutableReport:
        """The report of this router, which has that name: of what has changed since a revision, if that was of this
        `epoch` and not all has; otherwise of all."""
        has_base = epoch == self._epoch and self._all_changed_in <= since <= self.revision
        changed = tuple(name for name, revision in self._changed_in.items() if revision > since)
        replicas = (
            (
                each
                for name in changed
                if name in self.services
                for each in self.services[name].replicas.values()
            )
            if has_base
            else self.replicas()
        )
        return RoutableReport(
            router=router,
            revision=self.revision,
            fleet_revision=self.fleet_revision,
            epoch=self._epoch,
            base=since if has_base else None,
            services=changed if has_base else (),
            replicas=tuple(replica.report() for replica in replicas),
        )

    # lifecycle

    async def maintain(self) -> None:
        """Maintain replicas and indexes until cancelled, in slices between which the event loop turns.

        Expires speculative inserts, updates assumed rates, scrubs departed replicas out of the indexes, and divides
        memory among the indexes.
        """
        round_number = 0
        while True:
            await asyncio.sleep(MAINTENANCE_S)
            for number, replica in enumerate(list(self.replicas()), 1):
                replica.prefixes.expire(time.monotonic())
                if number % REPLICAS_PER_TURN == 0:
                    await asyncio.sleep(0)
            for number, service in enumerate(list(self.services.values()), 1):
                service.assume_rates()
                for _ in range(SHARDS):  # a replica that clears all the time holds up no other service
                    if not service.index.scrub():
                        break
                    await asyncio.sleep(0)  # one shard per turn of the loop
                if number % SERVICES_PER_TURN == 0:
                    await asyncio.sleep(0)
            round_number += 1
            if round_number % SHARING_ROUNDS == 0:
                await self._share_again()

    def _share_index_memory(self) -> Iterator[Service]:
        """Give each index its share of memory, one after the other, as each service is asked for."""
        self._divisions += 1
        services = list(self.services.values())
        indexes = [service.index for service in services]
        for service, share in zip(services, shares(self._index_memory, indexes), strict=True):
            service.index.fit(share)
            yield service

    async def _share_again(self) -> None:
        """Divide memory anew, and trim what has less than before, in turns."""
        overfull = []
        division = self._divisions + 1
        for number, service in enumerate(self._share_index_memory(), 1):
            if service.index.is_overfull:
                overfull.append(service)
            if number % SERVICES_PER_TURN == 0:
                await asyncio.sleep(0)
                if self._divisions != division:
                    return  # services have come or gone, and all have their shares
        for service in overfull:
            for shard in range(SHARDS):
                service.index.trim(shard)
                await asyncio.sleep(0)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for name in list(self.services):
            self._remove_service(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep_service(self, spec: FleetService) -> Service:
        service = self.services.get(spec.qualified_name)
        if service is not None and (
            service.spec.uid,
            service.spec.engine_name,
            service.spec.internal_key,
        ) != (spec.uid, spec.engine_name, spec.internal_key):
            # Another model or key behind the same name: nothing that is known of the engines holds any more.
            self._remove_service(spec.qualified_name)
            service = None
        if service is None:
            service = self.services[spec.qualified_name] = Service(spec, ServiceKeys(*self._keys_of(spec)), 0)
            self._service_budgets[service] = ServiceTelemetryBudget(self._telemetry_budget)
        service.rename(spec)
        return service

    def _keys_of(self, spec: FleetService) -> tuple[str, ...]:
        """The keys of a service's engines, newest first; empty if they have none."""
        if spec.internal_key:
            return (spec.internal_key,)
        return tuple(internal_key(key, spec.uid) for key in self._fleet_keys.keys)

    def _apply_members(self, service: Service, members: tuple[Member, ...]) -> None:
        wanted = {member.name: member for member in members}
        for name, replica in list(service.replicas.items()):
            member = wanted.get(name)
            if member is None or (member.uid, member.url) != (replica.uid, replica.url):
                self._remove_replica(service, replica)
            else:
                replica.is_draining = member.is_draining
                replica.revision = member.revision
        for name, member in wanted.items():
            if name not in service.replicas:
                self._add_replica(service, member)
        for name, replica in service.replicas.items():
            replica.side = "" if service.sides is None else service.sides.side_of(replica.revision)
            replica.names = frozenset((*wanted[name].adapters, *wanted[name].aliases))
        lists = {member.aliases for member in members}  # nearly always one
        service.candidates.partial_aliases = frozenset(
            alias for aliases in lists for alias in frozenset(service.spec.aliases).difference(aliases)
        )
        self._service_budgets[service].grant_replicas(len(service.replicas), time.monotonic())
        service.assume_rates()

    def _add_replica(self, service: Service, member: Member) -> None:
        try:
            pool = ConnectionPool(member.url, self._limits, self._wheel, self._tls, member.hostname)
        except ValueError as error:
            log.error("replica %s of %s is left out: %s", member.name, service.spec.qualified_name, error)
            return
        replica = Replica(
            service.spec.qualified_name,
            member,
            pool,
            ReplicaPrefixes(service.index),
            service.assume_rates,
            ReplicaKey(service.keys),
        )
        service.replicas[member.name] = replica
        client = TelemetryClient(
            replica,
            service.spec.engine_name,
            lambda: self.replica_changed(replica),
            lambda is_certain: _fail_requests_of(service, replica, is_certain=is_certain),
            service.may_eject,
            self.rng,
            self._service_budgets[service],
            self.reconnects,
        )
        self._clients[replica] = client
        self._untried[replica] = None
        self._tasks[replica] = asyncio.create_task(client.run(), name=f"telemetry {member.name}")

    def _remove_replica(self, service: Service, replica: Replica) -> None:
        del service.replicas[replica.name]
        self._tasks.pop(replica).cancel()
        del self._clients[replica]
        self._untried.pop(replica, None)
        replica.is_draining = True  # requests that still hold it must not retry on it
        replica.prefixes.close()
        replica.pool.close()

    def _remove_service(self, name: str) -> None:
        service = self.services.pop(name)
        for replica in list(service.replicas.values()):
            self._remove_replica(service, replica)
        self._service_budgets.pop(service).close()
        self._unlisted.discard(service)


def _fail_requests_of(service: Service, replica: Replica, *, is_certain: bool) -> None:
    """Fail the requests at a silent replica, so that they move to a healthy one; without a healthy one they wait.
    `is_certain`: also fail requests whose response has begun, not only those without a response."""
    others = (other for other in service.replicas.values() if other is not replica)
    if any(other.is_routable and other.health.is_healthy for other in others):
        replica.pool.fail_requests(FirstByteTimeout("the replica fell silent"), include_begun=is_certain)
