"""Candidates: the replicas of a service that a request may be sent to now, cached until something changes.

Owns: which replicas are candidates (routable, healthy, below the in-flight limit, able to serve an adapter or alias, of
the request's side in a canary rollout, among those that a gateway allows), and their `capacity`.
Must not know: how one of them is chosen.
Invariant: a request is refused only when no replica could take it; ejected and suspect replicas are used before that,
and so are the other side of a canary rollout and, after that, replicas of neither side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Final

from argosy_protocol.errors import TooManyRequests, Unavailable
from argosy_protocol.fleet import FleetService
from argosy_router.fleet.capacity import Capacity
from argosy_router.fleet.health.ejection_limits import panics
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.replica_load import ReplicaLoad
from argosy_router.fleet.revision_sides import CANARY, STABLE, in_parts
from argosy_router.policy.policy_interface import Candidate
from argosy_router.prefixes.index import PrefixIndex

_ONLY: Final = "\0only\0"
"""Beginning of a name that only some endpoints serve: these follow, then NUL and the name that they serve otherwise."""
_MAX_KEPT: Final = 256
"""Names whose candidates are cached; a gateway may allow any subset."""


class Candidates:
    """The replicas that a request may be sent to, ordered by name as policies expect."""

    __slots__ = ("capacity", "loads", "positions", "replicas", "slot_changes")

    def __init__(self, replicas: list[Replica], slot_changes: int) -> None:
        self.replicas = replicas
        self.loads: list[Candidate] = [replica.load for replica in replicas]
        self.positions = {
            slot: position for position, replica in enumerate(replicas) for slot in replica.prefixes.slots
        }
        """slot -> position"""
        self.slot_changes = slot_changes
        """The index's counter of slot changes when `positions` was made."""
        self.capacity: Capacity | None = None
        """Set by the first lookup."""


def _in_parts(name: str) -> tuple[frozenset[str] | None, str]:
    """Return the endpoints (None for any) and the rest of a name."""
    if not name.startswith(_ONLY):
        return None, name
    endpoints, _, rest = name[len(_ONLY) :].partition("\0")
    return frozenset(endpoints.split(",")), rest


class CandidatePool:
    """The candidates of one service."""

    def __init__(self, spec: FleetService, replicas: Mapping[str, Replica], index: PrefixIndex) -> None:
        """`replicas` is the service's own mapping, which changes over time."""
        self.spec = spec
        self.partial_aliases: frozenset[str] = frozenset()
        """Aliases that some replica does not have."""
        self._replicas = replicas
        self._index = index
        self._kept: dict[str, Candidates] = {}
        """Name, as in `Prompt.name` -> cached candidates; the empty name stands for the model itself."""
        self._changed: set[ReplicaLoad] = set()
        """Loads that have changed since the last lookup of a capacity, of replicas that are or were candidates."""
        self.num_rooms_computed = 0
        """Rooms of replicas that lookups of capacities have computed, ever; tests bound it."""
        self._kept_until = 0.0
        """Time at which the candidates may change by the clock alone."""

    def invalidate(self) -> None:
        """Drop the cache: a replica came, went, or changed its state."""
        self._kept.clear()
        self._changed.clear()

    @property
    def is_in_panic(self) -> bool:
        """Whether so many replicas are ejected that ejections are ignored."""
        return panics([replica.health for replica in self._replicas.values() if replica.is_routable])

    def restricted(self, name: str, endpoints: Collection[str]) -> str:
        """Return the name by which only these endpoints (HOST:PORT) count as able to answer as `name`.

        Raises:
            Unavailable: none of them is routable.
        """
        allowed = [replica for replica in self._replicas.values() if replica.endpoint in endpoints]
        if not any(replica.is_routable for replica in allowed):
            raise Unavailable("none of the endpoints that the gateway allows can take the request")
        # Even if they are all that there are: others may join while the request waits.
        return f"{_ONLY}{','.join(sorted(replica.endpoint for replica in allowed))}\0{name}"

    def can_answer(self, now: float) -> bool:
        """Whether some replica is routable and not ejected."""
        return any(replica.is_routable and replica.health.admits(now) for replica in self._replicas.values())

    def below_limit(
        self, now: float, tried: Collection[Replica] = (), name: str = "", sequences: int = 1
    ) -> Candidates:
        """Return the replicas of the best health class below the in-flight limit; of these, the ones with capacity for
        all of the request's sequences, if there are any.

        Raises:
            Unavailable: no replica is routable.
            TooManyRequests: all of them are at the service's in-flight limit.
        """
        candidates = self.healthy(now, tried, name)
        limit = self.spec.limits.max_inflight_per_replica
        if not limit:
            return candidates
        most = limit - min(sequences, limit)  # sequences that a replica may already have
        if any(replica.load.inflight_sequences > most for replica in candidates.replicas):
            below = [replica for replica in candidates.replicas if replica.load.inflight_sequences <= most]
            below = below or [r for r in candidates.replicas if r.load.inflight_sequences < limit]
            if not below:
                model = self.spec.model
                raise TooManyRequests(
                    f"model {model!r} is at its limit of requests", retry_after_s=1.0, model=model
                )
            candidates = self._with_slots(below)
        return candidates

    def free_sequences(self, now: float, name: str = "", account: object = None) -> int:
        """Return how many more sequences the replicas that can answer as `name` can take together, as `Capacity.free`.

        Raises:
            Unavailable: no such replica is routable.
        """
        return self._capacity(now, name).free(account)

    def can_take(self, now: float, name: str, sequences: int, account: object = None) -> bool:
        """Return whether there is capacity for a request with this many sequences (of this account, as in
        `free_sequences`). A request larger than any replica needs only as much as an idle replica has.

        Raises:
            Unavailable: no replica that can answer as `name` is routable.
        """
        capacity = self._capacity(now, name)
        free = capacity.free(account)
        if limit := capacity.limit:
            wanted = min(sequences, limit)
            if free < wanted:
                return False
            replicas = self.healthy(now, (), name).replicas
            return any(limit - replica.load.inflight_sequences >= wanted for replica in replicas)
        return free > 0 and free >= min(sequences, capacity.largest)

    def _capacity(self, now: float, name: str) -> Capacity:
        """Return the capacity of the replicas that can answer as `name`.

        Raises:
            Unavailable: no such replica is routable.
        """
        candidates = self.healthy(now, (), name)
        if self._changed:
            known = [kept.capacity for kept in self._kept.values() if kept.capacity is not None]
            for load in self._changed:
                for each in known:
                    each.update(load)
            self.num_rooms_computed += len(self._changed) * len(known)
            self._changed.clear()
        limit = self.spec.limits.max_inflight_per_replica
        capacity = candidates.capacity
        if capacity is None or capacity.limit != limit:
            for replica in candidates.replicas:
                replica.load.changes = self._changed
            candidates.capacity = capacity = Capacity(candidates.replicas, limit)
            self.num_rooms_computed += len(candidates.replicas)
        return capacity

    def healthy(self, now: float, tried: Collection[Replica] = (), name: str = "") -> Candidates:
        """Return the replicas of the best health class that can answer as `name`, including those at the in-flight
        limit.

        Raises:
            Unavailable: no replica is routable.
        """
        if tried:
            return self._with_slots(self._best_class(now, tried, name))
        if now >= self._kept_until:
            self.invalidate()
        candidates = self._kept.get(name)
        if candidates is None or candidates.slot_changes != self._index.slot_changes:
            before, candidates = candidates, self._with_slots(self._best_class(now, (), name))
            if before is not None and before.replicas == candidates.replicas:
                candidates.capacity = before.capacity
            if not self._kept:
                changes = [replica.health.next_change(now) for replica in self._replicas.values()]
                self._kept_until = min(changes, default=inf)
            elif len(self._kept) >= _MAX_KEPT:
                self.invalidate()
            self._kept[name] = candidates
        return candidates

    def _best_class(self, now: float, tried: Collection[Replica], name: str) -> list[Replica]:
        excluded = set(tried)
        endpoints, name = _in_parts(name)
        untried = [
            replica
            for replica in self._replicas.values()
            if replica.is_routable
            and replica not in excluded
            and (endpoints is None or replica.endpoint in endpoints)
        ]
        usable = [replica for replica in untried if replica.serves(name)]
        side, adapter_or_alias = in_parts(name)
        if side and not any(replica.health.admits(now) for replica in usable):
            other = (STABLE if side == CANARY else CANARY) + adapter_or_alias
            usable = [replica for replica in untried if replica.serves(other)]
            usable = usable or [replica for replica in untried if replica.serves(adapter_or_alias)]
        if not usable:
            asked = self.spec.model
            if adapter_or_alias in self.partial_aliases:
                asked = adapter_or_alias
            elif adapter_or_alias:
                asked += f":{adapter_or_alias}"
            raise Unavailable(
                f"no replica of model {asked!r} is ready{_fetch_note(self.spec)}",
                retry_after_s=1.0,
                model=asked,
            )
        admitted = usable
        if not self.is_in_panic:
            admitted = [replica for replica in usable if replica.health.admits(now)]
        healthy = [replica for replica in admitted if not replica.health.is_suspect]
        fresh = [replica for replica in healthy if not replica.health.is_in_cooldown(now)]
        return sorted(fresh or healthy or admitted or usable, key=lambda replica: replica.name)

    def _with_slots(self, replicas: list[Replica]) -> Candidates:
        return Candidates(replicas, self._index.slot_changes)


def _fetch_note(spec: FleetService) -> str:
    """Why a service may have no replica: the fetch of its model, unless every replica has that."""
    state = "" if spec.fetch is None else spec.fetch.state
    if state in ("", "cached"):
        return ""
    if state in ("failed", "locked"):
        return "; its model could not be fetched"
    return "; its model is being fetched" + ("" if state == "fetching" else f" ({state})")
