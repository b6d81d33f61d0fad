"""Capacity of a service: it is kept up to date, not looked up in every replica."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_protocol.errors import Unavailable
from argosy_protocol.fleet import FleetService, ServiceLimits
from argosy_protocol.telemetry import Hello
from argosy_router.auth.accounts import ANONYMOUS
from argosy_router.fair_queue import QueuedRequest
from argosy_router.fleet.candidates import BATCHES_PER_REPLICA, NO_LIMIT
from argosy_router.fleet.replica import Member, Replica, ServiceKeys
from argosy_router.fleet.service import Service
from argosy_router.flow_control import NAMES_PER_TICK, Bounds, ServiceQueue
from argosy_router.prefixes import MODEL_ITSELF, ReplicaPrefixes, ServedName
from argosy_router.simulation import unused_pool

HELLO = Hello(
    epoch="e",
    model="m",
    model_fingerprint="f",
    block_size=16,
    max_model_len=4096,
    max_num_seqs=4,
    kv_cache_tokens=4096,
)

POOL = unused_pool("http://10.0.0.1:8000")


def service(replicas: int, limit: int = 0, adapters: int = 0) -> Service:
    spec = FleetService(
        namespace="n", name="s", uid="u", model="m", limits=ServiceLimits(max_inflight_per_replica=limit)
    )
    made = Service(spec, ServiceKeys(), 1 << 16)
    for number in range(replicas):
        member = Member(f"r{number}", "", f"http://10.0.0.{number}:8000")
        replica = Replica("n/s", member, POOL, ReplicaPrefixes(made.index))
        replica.link, replica.hello = "synced", HELLO
        replica.load.max_num_seqs = HELLO.max_num_seqs
        replica.names = frozenset(f"adapter-{number}" for number in range(adapters))
        made.replicas[replica.name] = replica
    return made


def expected(replicas: list[Replica], limit: int, account: object) -> int:
    """What a look at every replica finds."""
    free = 0
    for replica in replicas:
        load = replica.load
        if limit:
            free += max(0, limit - load.inflight_sequences)
            continue
        if replica.hello is None:
            return NO_LIMIT
        capacity = int(BATCHES_PER_REPLICA * load.max_num_seqs)
        taken = load.requests
        if account is not None:
            taken -= max(0, load.yielding_to(account) - load.max_num_seqs // 2)
        free += max(capacity - taken, load.max_num_seqs - capacity)
    return free


@pytest.mark.parametrize("limit", [0, 3])
@settings(max_examples=150)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.just("charge"), st.integers(0, 3), st.sampled_from([1, 1, 2, 9]), st.sampled_from("ab")
            ),
            st.tuples(st.just("release"), st.integers(0, 50)),
            st.tuples(st.just("report"), st.integers(0, 3), st.integers(0, 12), st.integers(0, 12)),
            st.tuples(st.just("forget"), st.integers(0, 3)),
            st.tuples(st.just("batch"), st.integers(0, 3), st.integers(1, 9)),
            st.tuples(st.just("unknown"), st.integers(0, 3)),
            st.tuples(st.just("drain"), st.integers(0, 3)),
            st.tuples(st.just("slot"), st.integers(0, 3)),
        ),
        max_size=40,
    )
)
def test_the_capacity_is_that_of_a_look_at_every_replica(limit: int, steps: list[tuple[Any, ...]]) -> None:
    made = service(4, limit, adapters=1)
    replicas = list(made.replicas.values())
    charges: list[Any] = []
    for step in steps:
        kind, which = step[0], step[1]
        load = replicas[which % 4].load
        if kind == "charge":
            charges.append(load.charge(10, step[2], step[3]))
        elif kind == "release":
            if charges:
                charges.pop(which % len(charges)).release()
        elif kind == "report":
            load.report(requests=step[2], tokens=0, yielding=step[3])
        elif kind == "forget":
            load.forget()
        elif kind == "batch":  # as a hello of a new process does
            replicas[which].hello, load.max_num_seqs = HELLO, step[2]
            load.forget()
            made.invalidate()
        elif kind == "unknown":
            replicas[which].hello = None
            load.forget()
            made.invalidate()
        elif kind == "drain":
            replicas[which].is_draining = not replicas[which].is_draining
            made.invalidate()
        else:
            replicas[which].prefixes.clear()
        routable = [replica for replica in replicas if not replica.is_draining]
        for name in (MODEL_ITSELF, ServedName("adapter-0")):
            for account in (None, "a", "b"):
                if not routable:
                    with pytest.raises(Unavailable):
                        made.candidates.free_sequences(0.0, name, account)
                    continue
                found = made.candidates.free_sequences(0.0, name, account)
                assert found == expected(routable, limit, account)


class Waiting:
    def __init__(self, made: Service, name: str) -> None:
        self.request = QueuedRequest(ANONYMOUS, 0, 1.0, 1, ServedName(name), 1, self.admit, self.refuse)
        self._made = made
        self.is_sent = False

    def admit(self) -> None:
        self.is_sent = True
        loads = [replica.load for replica in self._made.replicas.values()]
        next(load for load in loads if load.inflight_sequences < 2).charge(1)

    def refuse(self, error: Exception) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("replicas", [10, 1000])
def test_a_tick_computes_the_rooms_that_have_changed(replicas: int) -> None:
    """Not those of all replicas, for each name that is queued and each request that is admitted."""
    names, admitted = 10, 20
    made = service(replicas, limit=2, adapters=names)
    loads = [replica.load for replica in made.replicas.values()]
    charges = [load.charge(1) for load in loads for _ in range(2)]
    queue = ServiceQueue(
        "m",
        made.candidates.free_sequences,
        lambda: Bounds(1000, 1 << 20, 60.0, 60.0),
        0.0,
        made.candidates.can_take,
    )
    waiting = [Waiting(made, f"adapter-{number % names}") for number in range(200)]
    for each in waiting:
        assert not queue.try_admit(0.0, each.request.name)
        queue.enqueue(each.request, 0.0)
    queue.tick(0.0)
    computed = made.candidates.num_rooms_computed
    assert computed == (1 + names) * replicas, "once for each name, as nothing has changed"
    for charge in charges[-admitted:]:
        charge.release()
    queue.tick(0.0)
    assert sum(each.is_sent for each in waiting) == admitted
    changes = admitted // 2 + admitted  # each replica that has room again, and each request that is sent
    assert made.candidates.num_rooms_computed - computed <= changes * (1 + names)


def test_a_tick_looks_at_some_of_many_names() -> None:
    """With more names than are kept, each request that was admitted had the replicas of all names looked at: a thousand
    adapters held the event loop for 1.7 s."""
    replicas, names, most = 40, 5 * NAMES_PER_TICK, 64
    made = service(replicas, adapters=names)
    for replica in made.replicas.values():
        replica.load.max_num_seqs = 100
    charges = [replica.load.charge(1, 200) for replica in made.replicas.values()]
    queue = ServiceQueue(
        "m",
        made.candidates.free_sequences,
        lambda: Bounds(1000, 1 << 20, 60.0, 60.0),
        0.0,
        made.candidates.can_take,
    )
    waiting = [Sent(f"adapter-{number}") for number in range(names)]
    for each in waiting:
        queue.enqueue(each.request, 0.0)
    for charge in charges:
        charge.release()
    ticks = 0
    while not all(each.is_sent for each in waiting):
        computed = made.candidates.num_rooms_computed
        sent = queue.tick(1.0 + ticks / 10.0, most)
        assert made.candidates.num_rooms_computed - computed <= 3 * NAMES_PER_TICK * replicas
        assert sent == most, "there is room for all"
        ticks += 1
    assert ticks == names // most
    assert queue.num_queued == 0


class Sent:
    def __init__(self, name: str) -> None:
        self.request = QueuedRequest(ANONYMOUS, 0, 1.0, 1, ServedName(name), 1, self.admit, self.refuse)
        self.is_sent = False

    def admit(self) -> None:
        self.is_sent = True

    def refuse(self, error: Exception) -> None:
        raise AssertionError(error)
