"""Capacity: how many more sequences some replicas can take together, kept up to date as their loads change.

Owns: the room of each replica, and the sum. Must not know: which replicas these are, who waits for them.
Invariant: a lookup costs as much as there were changes since the last one, whatever the number of replicas; only for an
account of a router with keys it also looks at replicas that run calls with several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from argosy_router.fleet.replica import Replica
from argosy_router.fleet.replica_load import ReplicaLoad

BATCHES_PER_REPLICA: Final = 1.5
"""Capacity of a replica, as a multiple of its batch size (`max_num_seqs`). Half a batch waits inside the engine, so
that it never runs dry; requests that wait in the router instead can still be ordered, and go to the first free
replica."""
NO_LIMIT: Final = 1 << 30
"""Capacity of a service whose replicas do not report their batch size."""


class Capacity:
    """The capacity of some replicas of one service."""

    __slots__ = ("_free", "_num_unknown", "_replicas", "_rooms", "_with_large_calls", "largest", "limit")

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
        """Return how many more sequences the replicas can take together; zero or less if they are full.

        Args:
            account: whose sequences they would be. Other accounts' calls with several sequences then count as half of a
                replica's batch at most: an engine gives slots that such calls hold beyond that to others, so these need
                not wait until the calls have ended. Without an account they count in full.
        """
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
