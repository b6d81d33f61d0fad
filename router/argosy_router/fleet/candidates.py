"""Candidates: the replicas of a service that a request may be sent to now, cached until something changes.

Owns: which replicas are candidates (routable, healthy, below the in-flight limit, able to serve an adapter or alias, of
the request's side in a canary rollout, among those that a gateway allows), how many more sequences they can take, and
the two sides of a canary rollout. Must not know: how one of the candidates is chosen, who waits for them.
Invariant: a request is refused only when no replica could take it; ejected and suspect replicas are used before that,
and so are the other side of a canary rollout and, after that, replicas of neither side.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Final

from xxhash import xxh3_64_intdigest

from argosy_protocol.errors import TooManyRequests, Unavailable
from argosy_protocol.fleet import FleetService, RevisionSplit
from argosy_protocol.reports import SIDE_BOUNDS_S, TTFT_BOUNDS_S, WINDOW_SLICES, RolloutReport, SideReport
from argosy_router.fleet.health import panics
from argosy_router.fleet.replica import Replica, ReplicaLoad
from argosy_router.policy import Candidate
from argosy_router.prefixes import MODEL_ITSELF, PrefixIndex, ServedName, Side

_ATTEMPTS: Final = 0
_FAILURES: Final = 1
_CLIENT_ERRORS: Final = 2
_PROMPT: Final = 3
_PREDICTED: Final = 4
_CACHED: Final = 5
_SAMPLED: Final = 6
_SAMPLED_CACHED: Final = 7
_EXPECTED: Final = 8
_EXPECTED_CACHED: Final = 9
_TTFT_COARSE: Final = 10
_TTFT: Final = _TTFT_COARSE + len(TTFT_BOUNDS_S) + 1
_ITL: Final = _TTFT + len(SIDE_BOUNDS_S) + 1
_SIZE: Final = _ITL + len(SIDE_BOUNDS_S) + 1
"""Positions in a slice. The buckets of times come last: to the first token, by both lists of bounds, and between
tokens."""


class _SideCounts:
    """What the attempts at one side came to: in the slices of a window, and in all."""

    def __init__(self, window_s: float) -> None:
        self._slice_s = window_s / WINDOW_SLICES
        self._slices: dict[int, list[int]] = {}
        self._total = [0] * _SIZE

    def add(self, position: int, amount: int, now: float) -> None:
        number = int(now / self._slice_s)
        counts = self._slices.get(number)
        if counts is None:
            self._forget(number)
            counts = self._slices[number] = [0] * _SIZE
        counts[position] += amount
        self._total[position] += amount

    def report(self, now: float) -> SideReport:
        """The window that ends now."""
        self._forget(int(now / self._slice_s))
        if not self._slices:
            return SideReport()
        return _reported([sum(column) for column in zip(*self._slices.values(), strict=True)])

    def total(self) -> SideReport:
        """All since the service is divided so."""
        return _reported(self._total)

    def _forget(self, number: int) -> None:
        for past in [past for past in self._slices if past <= number - WINDOW_SLICES]:
            del self._slices[past]


def _reported(counts: list[int]) -> SideReport:
    return SideReport(
        attempts=counts[_ATTEMPTS],
        failures=counts[_FAILURES],
        client_errors=counts[_CLIENT_ERRORS],
        prompt_tokens=counts[_PROMPT],
        predicted_tokens=counts[_PREDICTED],
        cached_tokens=counts[_CACHED],
        ttft_counts=_unless_empty(counts[_TTFT_COARSE:_TTFT]),
        ttft=_unless_empty(counts[_TTFT:_ITL]),
        itl=_unless_empty(counts[_ITL:_SIZE]),
        sampled=counts[_SAMPLED],
        sampled_cached=counts[_SAMPLED_CACHED],
        expected=counts[_EXPECTED],
        expected_cached=counts[_EXPECTED_CACHED],
    )


def _unless_empty(counts: list[int]) -> tuple[int, ...]:
    return tuple(counts) if any(counts) else ()


class RevisionSides:
    """How one service is divided during a canary rollout, into replicas of the stable and of the canary revision, and
    the figures of both sides.

    Invariants: routers draw the same side for the same session without communicating, and a session that the canary
    answers at one weight stays with it at any higher one; memory is bounded by the number of slices, whatever the
    number of requests; another division starts counting anew, so that a figure never mixes two weights; below weight
    100 a canary replica is drawn for no more requests than a stable one.
    """

    def __init__(self, split: RevisionSplit) -> None:
        self.split = split
        self._counts = {side: _SideCounts(float(split.window_s)) for side in ("stable", "canary")}

    def side_of(self, revision: str) -> Side:
        """The side of a replica of this revision; empty if it is of another one, which answers only if no side can."""
        if revision == self.split.canary:
            return "canary"
        return "stable" if self.split.stable in ("", revision) else ""

    def draw(self, drawn_by: bytes, share: float) -> Side:
        """The side that answers a request; the same for equal `drawn_by`, at all routers that know of the same
        replicas. `share` is the canary's, as `share` computes it."""
        drawn = xxh3_64_intdigest(b"revision " + drawn_by)
        # The whole part first, as routers have drawn that know no other.
        percent = drawn % 100 + drawn // 100 % 100 / 100
        return "canary" if percent < 100 * share else "stable"

    def share(self, num_stable: int, num_canary: int) -> float:
        """The canary's share of the requests with so many routable replicas on each side: its weight, but no more than
        its part of the replicas unless it is to have every request."""
        share = self.split.weight / 100
        if share >= 1.0 or not num_stable:
            return share
        return min(share, num_canary / (num_stable + num_canary))

    # what an attempt at a replica of this revision came to

    def ended(self, revision: str, status: int, now: float) -> None:
        """Count an attempt that ended with an answer, an error of the client's (4xx) included."""
        self._add(revision, _ATTEMPTS, 1, now)
        if 400 <= status < 500:
            self._add(revision, _CLIENT_ERRORS, 1, now)

    def failed(self, revision: str, now: float) -> None:
        """Count an attempt that ended without one."""
        self._add(revision, _ATTEMPTS, 1, now)
        self._add(revision, _FAILURES, 1, now)

    def observe_ttft(self, revision: str, seconds: float, now: float) -> None:
        """Count a streamed attempt whose answer began after so many seconds, or had not by then."""
        self._add(revision, _TTFT_COARSE + bisect_left(TTFT_BOUNDS_S, seconds), 1, now)
        self._add(revision, _TTFT + bisect_left(SIDE_BOUNDS_S, seconds), 1, now)

    def observe_itl(self, revision: str, seconds: float, now: float) -> None:
        """Count a streamed answer by the mean time between its tokens."""
        self._add(revision, _ITL + bisect_left(SIDE_BOUNDS_S, seconds), 1, now)

    def observe_tokens(self, revision: str, prompt: int, predicted: int, cached: int, now: float) -> None:
        """Count an answer's prompt tokens, those that were expected to be cached, and those that were."""
        self._add(revision, _PROMPT, prompt, now)
        self._add(revision, _PREDICTED, predicted, now)
        self._add(revision, _CACHED, cached, now)
        drawn = random.random()  # noqa: S311 - a sample, no secret
        if prompt > 0:
            self._add(revision, _SAMPLED, 1, now)
            self._add(revision, _SAMPLED_CACHED, int(drawn * prompt < cached), now)
        if predicted > 0:
            self._add(revision, _EXPECTED, 1, now)
            self._add(revision, _EXPECTED_CACHED, int(drawn * predicted < cached), now)

    def _add(self, revision: str, position: int, amount: int, now: float) -> None:
        counts = self._counts.get(self.side_of(revision))
        if counts is not None:
            counts.add(position, amount, now)

    def report(self, now: float) -> RolloutReport:
        """The figures of the window that ends now, and of all since the service is divided so."""
        return RolloutReport(
            canary_revision=self.split.canary,
            weight=self.split.weight,
            stable=self._counts["stable"].report(now),
            canary=self._counts["canary"].report(now),
            stable_total=self._counts["stable"].total(),
            canary_total=self._counts["canary"].total(),
        )


BATCHES_PER_REPLICA: Final = 1.5
"""Capacity of a replica, as a multiple of its batch size (`max_num_seqs`). Half a batch waits inside the engine, so
that it never runs dry; requests that wait in the router instead can still be ordered, and go to the first free
replica."""
NO_LIMIT: Final = 1 << 30
"""Capacity of a service whose replicas do not report their batch size."""


class Capacity:
    """How many more sequences some replicas of one service can take together, kept up to date as their loads change.

    Invariant: a lookup costs as much as there were changes since the last one, whatever the number of replicas; only
    for an account of a router with keys it also looks at replicas that run calls with several sequences.
    """

    def __init__(self, replicas: Sequence[Replica], limit: int) -> None:
        """`limit`: sequences in flight that a replica may have; 0 if it takes as many as fit into its batch."""
        self.limit = limit
        self.largest = 0
        """Capacity of the largest replica while it is idle, without a limit."""
        self._free = 0
        self._num_unknown = 0
        """Replicas that do not report their batch size, and have no limit."""
        self._replicas: dict[ReplicaLoad, Replica] = {}
        self._rooms: dict[ReplicaLoad, int | None] = {}
        """None of a replica that does not report its batch size."""
        self._with_large_calls: dict[ReplicaLoad, None] = {}
        """Those that run more sequences of calls with several than half of their batch."""
        for replica in replicas:
            self._replicas[replica.load] = replica
            self._rooms[replica.load] = 0
        for load in self._replicas:
            self.update(load)

    def update(self, load: ReplicaLoad) -> None:
        """Note that a replica's load has changed; nothing if it is not among these replicas."""
        replica = self._replicas.get(load)
        if replica is None:
            return
        before = self._rooms[load]
        room = None if not self.limit and replica.hello is None else self._room(load)
        self._rooms[load] = room
        self._free += (room or 0) - (before or 0)
        self._num_unknown += (room is None) - (before is None)
        if not self.limit:
            self.largest = max(self.largest, int(BATCHES_PER_REPLICA * load.max_num_seqs))
            if load.yielding > load.max_num_seqs // 2:
                self._with_large_calls[load] = None
            else:
                self._with_large_calls.pop(load, None)

    def free(self, account: object = None) -> int:
        """Return how many more sequences the replicas can take together; zero or less if they are full. `account`:
        whose sequences they would be. Other accounts' calls with several sequences then count as half of a replica's
        batch at most: an engine gives slots that such calls hold beyond that to others, so these need not wait until
        the calls have ended. Without an account they count in full."""
        if self._num_unknown:
            return NO_LIMIT
        if account is None or not self._with_large_calls:
            return self._free
        free = self._free
        for load in self._with_large_calls:
            free += self._room(load, account) - (self._rooms[load] or 0)
        return free

    def _room(self, load: ReplicaLoad, account: object = None) -> int:
        if self.limit:
            return max(0, self.limit - load.inflight_sequences)
        capacity = int(BATCHES_PER_REPLICA * load.max_num_seqs)
        taken = load.requests
        if account is not None:
            taken -= max(0, load.yielding_to(account) - load.max_num_seqs // 2)
        # A replica overloaded by one huge call counts as negative, but for no more than half a batch, so that its
        # peers' batches can still be filled.
        return max(capacity - taken, load.max_num_seqs - capacity)


_MAX_KEPT: Final = 256
"""Names whose candidates are cached; a gateway may allow any subset."""


class Candidates:
    """The replicas that a request may be sent to, ordered by name as policies expect."""

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


class CandidatePool:
    """The candidates of one service."""

    def __init__(self, spec: FleetService, replicas: Mapping[str, Replica], index: PrefixIndex) -> None:
        """`replicas` is the service's own mapping, which changes over time."""
        self.spec = spec
        self.partial_aliases: frozenset[str] = frozenset()
        """Aliases that some replica does not have."""
        self._replicas = replicas
        self._index = index
        self._kept: dict[ServedName, Candidates] = {}
        """What they serve -> cached candidates."""
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

    def restricted(self, name: ServedName, endpoints: Collection[str]) -> ServedName:
        """Return the name by which only these endpoints (HOST:PORT) count as able to answer as `name`.

        Raises:
            Unavailable: none of them is routable.
        """
        allowed = [replica for replica in self._replicas.values() if replica.endpoint in endpoints]
        if not any(replica.is_routable for replica in allowed):
            raise Unavailable("none of the endpoints that the gateway allows can take the request")
        # Even if they are all that there are: others may join while the request waits.
        return name._replace(endpoints=frozenset(replica.endpoint for replica in allowed))

    def can_answer(self, now: float) -> bool:
        """Whether some replica is routable and not ejected."""
        return any(replica.is_routable and replica.health.admits(now) for replica in self._replicas.values())

    def below_limit(
        self, now: float, tried: Collection[Replica] = (), name: ServedName = MODEL_ITSELF, sequences: int = 1
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

    def free_sequences(self, now: float, name: ServedName = MODEL_ITSELF, account: object = None) -> int:
        """Return how many more sequences the replicas that can answer as `name` can take together, as `Capacity.free`.

        Raises:
            Unavailable: no such replica is routable.
        """
        return self._capacity(now, name).free(account)

    def can_take(self, now: float, name: ServedName, sequences: int, account: object = None) -> bool:
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

    def _capacity(self, now: float, name: ServedName) -> Capacity:
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

    def healthy(
        self, now: float, tried: Collection[Replica] = (), name: ServedName = MODEL_ITSELF
    ) -> Candidates:
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

    def _best_class(self, now: float, tried: Collection[Replica], name: ServedName) -> list[Replica]:
        excluded = set(tried)
        endpoints = name.endpoints
        untried = [
            replica
            for replica in self._replicas.values()
            if replica.is_routable
            and replica not in excluded
            and (endpoints is None or replica.endpoint in endpoints)
        ]
        usable = [replica for replica in untried if replica.serves(name)]
        if name.side and not any(replica.health.admits(now) for replica in usable):
            other = name._replace(side="stable" if name.side == "canary" else "canary")
            usable = [replica for replica in untried if replica.serves(other)]
            usable = usable or [replica for replica in untried if replica.serves(name._replace(side=""))]
        if not usable:
            asked = self.spec.model
            if name.name in self.partial_aliases:
                asked = name.name
            elif name.name:
                asked += f":{name.name}"
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
