"""What a router believes a replica's prefix cache holds, against the block pool's truth, under random events.

The path is the real one: block pool -> `PrefixAnnouncer` -> `TelemetryHub` -> frames -> the router's
`ReplicaPrefixes`.
"""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from argosy_engine.api.observability.telemetry import TelemetryHub
from argosy_engine.core.block_pool import BlockPool, PoolListener
from argosy_engine.core.prefix_residency import PrefixAnnouncer
from argosy_engine.messages import EngineCoreOutputs
from argosy_protocol.telemetry import FrameReader
from argosy_router.fleet.telemetry import apply_residency
from argosy_router.prefixes import PrefixIndex, ReplicaPrefixes
from telemetry_hubs import make_hub

CHUNKS = range(1, 4)
"""Few, and few blocks: what is evicted comes back soon."""


class Router:
    """The reading end of one telemetry stream after another."""

    def __init__(self, hub: TelemetryHub) -> None:
        self._hub = hub
        self._index = PrefixIndex()
        self._residency = ReplicaPrefixes(self._index)
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._reading is not None and not self._reading.done()

    def connect(self) -> None:
        self._reading = asyncio.create_task(self._read())

    async def disconnect(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    def believes(self, chunk: int) -> bool:
        return self._index.holds(self._residency.slot, chunk)

    async def _read(self) -> None:
        reader = FrameReader()
        async for data in self._hub.stream():
            for frame in reader.feed(data):
                apply_residency(self._residency, frame)


class ResidencyMachine(PoolListener, RuleBasedStateMachine):
    """Truth is a plain mapping block -> chunks, kept beside the announcer."""

    @initialize(num_blocks=st.integers(2, 4))
    def start(self, num_blocks: int) -> None:
        self.runner = asyncio.Runner()
        self.announcer = PrefixAnnouncer()
        self.truth: dict[int, set[int]] = {}
        self.pool = BlockPool(num_blocks, self)
        self.held: list[int] = []
        self.num_contents = 0
        self.runner.run(self._begin())

    async def _begin(self) -> None:
        self.hub = make_hub()
        self.router = Router(self.hub)
        self.router.connect()
        await settle()

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        self.truth.pop(block_id, None)
        self.announcer.evict(block_id)

    def _tie(self, block_id: int, chunks: list[int]) -> None:
        for chunk in chunks:
            self.truth.setdefault(block_id, set()).add(chunk)
            self.announcer.add(chunk, 16 * chunk, block_id)

    @rule(
        blocks=st.lists(st.lists(st.sampled_from(CHUNKS), max_size=2), min_size=1, max_size=4),
        num_held=st.sampled_from([0, 0, 1]),
    )
    def run_step(self, blocks: list[list[int]], num_held: int) -> None:
        """Requests compute blocks one after another, each of which evicts what its place held."""
        for number, chunks in enumerate(blocks):
            if not self.pool.num_free_blocks:
                break
            (block_id,) = self.pool.allocate(1)
            self.num_contents += 1
            assert self.pool.register(block_id, self.num_contents.to_bytes(8, "big"))
            self._tie(block_id, chunks)
            if number < num_held:
                self.held.append(block_id)
            else:
                self.pool.free([block_id])
        self.publish()

    @precondition(lambda self: self.truth)
    @rule(chunks=st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=3), data=st.data())
    def tie_again(self, chunks: list[int], data: st.DataObject) -> None:
        """Another request with the same tokens, cut into other chunks."""
        self._tie(data.draw(st.sampled_from(sorted(self.truth))), chunks)

    @precondition(lambda self: self.held)
    @rule()
    def free(self) -> None:
        self.pool.free([self.held.pop(0)])

    @rule()
    def clear(self) -> None:
        if self.pool.reset_prefix_cache():
            self.announcer.clear()
            assert not self.truth

    def publish(self) -> None:
        """A step ends: its delta travels to the router."""
        self.runner.run(self._publish())
        if self.router.is_connected:
            resident = set().union(*self.truth.values())
            assert {chunk for chunk in CHUNKS if self.router.believes(chunk)} == resident

    async def _publish(self) -> None:
        self.hub.on_core_outputs(EngineCoreOutputs(residency=self.announcer.take_delta()))
        await settle()

    @rule()
    def lose_the_stream(self) -> None:
        self.runner.run(self.router.disconnect())

    @rule()
    def reconnect(self) -> None:
        async def reconnect() -> None:
            await self.router.disconnect()
            self.router.connect()
            await settle()

        self.runner.run(reconnect())

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        try:
            self.reconnect()
            self.publish()
        finally:
            self.runner.run(self._end())
            self.runner.close()

    async def _end(self) -> None:
        await self.router.disconnect()
        self.hub.close()


async def settle() -> None:
    """Lets the reader take what was sent: everything is in its queue already."""
    for _ in range(3):
        await asyncio.sleep(0)


TestResidency = ResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


async def test_a_reader_that_overflows_is_cut_off_and_learns_the_rest_from_a_snapshot() -> None:
    hub, announcer = make_hub(), PrefixAnnouncer()
    router = Router(hub)
    router.connect()
    await settle()
    for chunk in range(1, 10_000):  # the reader gets no turn
        announcer.add(chunk, 16, chunk)
        if chunk > 1:
            announcer.evict(chunk - 1)
        hub.on_core_outputs(EngineCoreOutputs(residency=announcer.take_delta()))
    await settle()
    assert not router.is_connected
    router.connect()
    await settle()
    assert router.is_connected
    assert [chunk for chunk in range(1, 10_000) if router.believes(chunk)] == [9_999]
    await router.disconnect()
    hub.close()
