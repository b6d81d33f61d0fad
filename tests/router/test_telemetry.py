"""The telemetry client against engines of this and neighbouring versions, and its effect on routing."""

from __future__ import annotations

import asyncio
import math
import struct
from collections import Counter

import msgspec
import pytest

from argosy_protocol.chunk_hash import chain_seed, chunk_hashes, prompt_segments
from argosy_protocol.fleet import FleetDocument
from argosy_protocol.openai import decode_request
from argosy_protocol.telemetry import (
    MAX_FRAME_BYTES,
    Cleared,
    Draining,
    Hello,
    Load,
    Removed,
    encode_frame,
    pack_u64,
)
from argosy_router.fleet import telemetry
from argosy_router.fleet.health import SUSPECT_STEP_AGE_S
from argosy_router.http.upstream import fetch

from .fake_engine import MODEL, FakeEngine
from .harness import Rig, chat, rig, service

PROMPT = "The quick brown fox jumps over the lazy dog. " * 60


def chunks_of(prompt: str, tokens_per_chunk: int = 60) -> dict[int, int]:
    """The chunks an engine would announce for a chat with this one message."""
    request = decode_request("chat/completions", msgspec.json.encode(chat(prompt)))
    hashes = chunk_hashes(prompt_segments(request)[0], chain_seed(MODEL))
    return {chunk: tokens_per_chunk * (position + 1) for position, chunk in enumerate(hashes)}


def raw_frame(fields: dict[str, object]) -> bytes:
    payload = msgspec.msgpack.encode(fields)
    return struct.pack("<I", len(payload)) + payload


async def barrier(r: Rig, number: int = 0) -> None:
    """Returns once everything the engine announced so far was applied: a load report travels last."""
    mark = r.replica(number).load.reported_tokens + 1
    r.engines[number].announce(Load(core_step_age_s=0.0, queued_uncached_tokens=mark))
    await r.until(lambda: r.replica(number).load.reported_tokens == mark)


async def test_announced_prefixes_attract() -> None:
    async with rig([FakeEngine() for _ in range(4)]) as r:
        chunks = chunks_of(PROMPT)
        r.engines[2].store(chunks)
        await barrier(r, 2)
        r.engines[2].announce(Load(core_step_age_s=0.0))
        for _ in range(3):
            response = await r.chat(PROMPT)
            assert response.headers["x-argosy-replica"] == "r2"
            assert response.headers["x-argosy-route"] == "cached"
            assert int(response.headers["x-argosy-predicted-tokens"]) == max(chunks.values())
        response = await r.chat(PROMPT[:1000] + "but then it went another way")
        assert response.headers["x-argosy-replica"] == "r2"
        assert int(response.headers["x-argosy-predicted-tokens"]) == 60 * (1 + 1000 // 256)
        other_salt = await r.chat(PROMPT, cache_salt="tenant-2")
        assert other_salt.headers["x-argosy-predicted-tokens"] == "0"


async def test_a_dispatched_prefix_is_expected_until_announced() -> None:
    async with rig([FakeEngine() for _ in range(4)]) as r:
        first = await r.chat(PROMPT)
        assert first.headers["x-argosy-route"] == "load"
        second = await r.chat(PROMPT)
        assert second.headers["x-argosy-replica"] == first.headers["x-argosy-replica"]
        assert second.headers["x-argosy-route"] == "predicted"


@pytest.mark.parametrize("how", ["removed", "cleared", "restart"])
async def test_lost_prefixes_are_forgotten(how: str) -> None:
    async with rig([FakeEngine(), FakeEngine()]) as r:
        engine = r.engines[0]
        chunks = chunks_of(PROMPT)
        engine.store(chunks)
        await barrier(r)
        if how == "removed":
            engine.announce(Removed(hashes=pack_u64(list(chunks))))
            await barrier(r)
        elif how == "cleared":
            engine.announce(Cleared())
            await barrier(r)
        else:
            engine.resident.clear()
            await engine.stop()
            await r.until_state(0, "stale", "ejected")
            await engine.start()
            await r.until_state(0, "synced")
        assert (await r.chat(PROMPT)).headers["x-argosy-predicted-tokens"] == "0"


async def test_a_snapshot_warms_a_new_router() -> None:
    engines = [FakeEngine(), FakeEngine(resident=chunks_of(PROMPT))]
    async with rig(engines) as r:
        response = await r.chat(PROMPT)
        assert (response.headers["x-argosy-replica"], response.headers["x-argosy-route"]) == ("r1", "cached")


async def test_lost_telemetry_changes_the_mode_and_ejects_no_replica() -> None:
    async with rig([FakeEngine()]) as r:
        engine = r.engines[0]
        engine.store(chunks_of(PROMPT))
        await barrier(r)
        engine.hello = {"model": "x" * (MAX_FRAME_BYTES + 1)}  # the next stream breaks the protocol
        engine.cut_telemetry()
        await r.until_state(0, "stale")
        assert r.replica(0).is_routable
        assert r.replica(0).load.reported_tokens == 0
        response = await r.chat(PROMPT)
        assert response.status_code == 200
        assert int(response.headers["x-argosy-predicted-tokens"]) > 0, "what was known stays a good guess"
        engine.hello = {}
        await r.until_state(0, "synced")


async def test_load_reports_steer() -> None:
    async with rig([FakeEngine(), FakeEngine()], policy="least-load") as r:
        r.engines[0].announce(Load(core_step_age_s=0.0, queued_uncached_tokens=5000, num_running=3))
        await r.until(lambda: r.replica(0).load.reported_tokens == 5000)
        assert {(await r.chat()).headers["x-argosy-replica"] for _ in range(4)} == {"r1"}


async def test_a_stuck_core_is_avoided_but_better_than_nothing() -> None:
    async with rig([FakeEngine(), FakeEngine()]) as r:
        r.engines[0].announce(Load(core_step_age_s=SUSPECT_STEP_AGE_S + 1))
        await r.until(lambda: r.replica(0).health.is_suspect)
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(8)} == {"r1"}
        r.engines[1].announce(Draining())
        await r.until_state(1, "draining")
        assert (await r.chat()).headers["x-argosy-replica"] == "r0"


async def test_a_draining_replica_gets_nothing_new() -> None:
    async with rig([FakeEngine(), FakeEngine()]) as r:
        r.engines[0].announce(Draining())
        await r.until_state(0, "draining")
        assert {(await r.chat(str(n))).headers["x-argosy-replica"] for n in range(8)} == {"r1"}


# neighbouring versions

HELLO = {
    "type": "hello",
    "epoch": "e",
    "model": MODEL,
    "model_fingerprint": "f",
    "block_size": 16,
    "max_model_len": 10,
    "max_num_seqs": 4,
    "kv_cache_tokens": 100,
}
SNAPSHOT = {"type": "snapshot", "first": True, "last": True}
LOAD = {"type": "load", "core_step_age_s": 0.0}


class Speaker(FakeEngine):
    """An engine that sends hand-made frames."""

    frames: tuple[bytes, ...] = ()

    async def stream_telemetry(self, connection) -> None:  # type: ignore[no-untyped-def]
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.argosy.telemetry; v=2\r\n\r\n")
        for frame in self.frames:
            connection.send(frame)
        self.telemetry.append(connection.writer)
        await connection.gone()
        raise ConnectionResetError


def speaker(*frames: dict[str, object]) -> Speaker:
    engine = Speaker()
    engine.frames = tuple(raw_frame(frame) for frame in frames)
    return engine


async def test_an_older_engine_is_understood() -> None:
    async with rig([speaker({**HELLO, "version": 0}, SNAPSHOT, LOAD)]) as r:
        await r.until_state(0, "synced")
        assert r.replica(0).hello is not None
        assert r.replica(0).hello.version == 0


async def test_a_newer_engine_is_understood_where_it_can_be() -> None:
    newer = speaker(
        {**HELLO, "version": 2, "topology": {"tp": 8}},
        {"type": "weather", "is": "fine"},
        {**SNAPSHOT, "compression": "none"},
        {**LOAD, "num_running": 3, "gpu_temperature": 60.5},
    )
    async with rig([newer]) as r:
        await r.until_state(0, "synced")
        await r.until(lambda: r.replica(0).load.reported_requests == 3)
        newer.cut_telemetry()
        await r.until(lambda: r.router.fleet.skipped_frames() > 0)


async def test_an_engine_that_excludes_us_is_foreign() -> None:
    async with rig([speaker({**HELLO, "version": 9, "min_reader_version": 9}, SNAPSHOT)]) as r:
        await r.until(lambda: r.replica(0).state == "foreign" and r.replica(0).is_routable)
        assert (await r.chat()).status_code == 200


@pytest.mark.parametrize(
    "frames",
    [
        (raw_frame(SNAPSHOT),),
        (raw_frame({**HELLO, "epoch": 5}),),
        (
            encode_frame(Hello(**{k: v for k, v in HELLO.items() if k != "type"})),
            raw_frame({**SNAPSHOT, "hashes": b"123"}),
        ),
        (raw_frame(HELLO), raw_frame({**SNAPSHOT, "hashes": b"12345678", "tokens": b""})),
        (struct.pack("<I", MAX_FRAME_BYTES + 1),),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1",),
    ],
)
async def test_broken_streams_are_never_believed(frames: tuple[bytes, ...]) -> None:
    engine = Speaker()
    engine.frames = frames
    async with rig([engine, FakeEngine()], wait=False) as r:
        await r.until_state(1, "synced")
        connections = engine.connections
        await r.until(lambda: engine.connections >= connections + 2)
        assert r.replica(0).state == "connecting"
        assert (await r.chat()).headers["x-argosy-replica"] == "r1"


class Quitter(Speaker):
    """Ends each stream in an orderly way."""

    async def stream_telemetry(self, connection) -> None:  # type: ignore[no-untyped-def]
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.argosy.telemetry\r\n\r\n")
        connection.send(b"".join(self.frames))
        connection.writer.close()
        await connection.gone()
        raise ConnectionResetError


async def test_streams_that_end_before_they_are_of_use_are_asked_for_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doublings: list[int] = []
    real_sleep = asyncio.sleep

    async def sleep(delay: float) -> None:
        """Note the backoff's pauses, which alone are long, and skip them; compiled code finds this, too."""
        if delay >= 500.0:
            doublings.append(int(math.log2(delay / 500.0)))  # a pause is half to all of the base, doubled
            delay = 0.0
        await real_sleep(delay)

    monkeypatch.setattr(telemetry, "BACKOFF_BASE_S", 1000.0)
    monkeypatch.setattr(telemetry, "BACKOFF_CAP_S", 1e9)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    engine = Quitter()
    engine.frames = (raw_frame(HELLO),)
    async with rig([engine, FakeEngine()], wait=False) as r:
        await r.until(lambda: len(doublings) >= 6)
        assert doublings[:6] == [1, 2, 3, 4, 5, 6], "each pause is the next of the backoff"


async def test_streams_begin_a_few_in_each_turn_of_the_loop() -> None:
    """However large the fleet is that a router discovers at once."""
    loop = asyncio.get_running_loop()
    reconnects = telemetry.Reconnects()
    begun: Counter[int] = Counter()
    turn = 0

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if sum(begun.values()) < 99:
            loop.call_soon(count_turns)

    async def begin() -> None:
        await reconnects.turn()
        begun[turn] += 1

    count_turns()
    tasks = [asyncio.create_task(begin()) for _ in range(100)]
    await asyncio.sleep(0)
    tasks[50].cancel()  # its replica has gone, and takes nobody's place
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(begun.values()) == 99
    assert max(begun.values()) == telemetry.CONNECTS_PER_TURN
    assert len(begun) == 7
    await reconnects.turn()  # nobody waits any more


async def test_the_more_replicas_are_unreachable_the_less_often_each_is_tried() -> None:
    engines = [FakeEngine() for _ in range(3)]
    async with rig(engines) as r:
        reconnects = r.router.fleet.reconnects
        name = r.replica(0).service
        assert (reconnects.num_failing, reconnects.cap_s(name)) == (0, telemetry.BACKOFF_CAP_S)
        for engine in engines[:2]:
            await engine.stop()
        await r.until(lambda: reconnects.num_failing == 2)
        reconnects.note("another/large", 20_000)
        assert reconnects.cap_s(name) == telemetry.BACKOFF_CAP_S, "two of its own"
        assert reconnects.cap_s("another/large") == 2 * 20_000 / telemetry.CONNECTS_PER_S
        reconnects.note("another/large", -20_000)
        await engines[0].start()
        await r.until(lambda: reconnects.num_failing == 1)
        r.discovery.set(FleetDocument(services=(service(engines[:1]),)))
        await r.until(lambda: reconnects.num_failing == 0)


# not foreign


async def test_a_replica_that_refuses_our_key_is_not_foreign() -> None:
    async with rig([FakeEngine(key="another")], wait=False) as r:
        connections = r.engines[0].connections
        await r.until(lambda: r.engines[0].connections > connections + 1)
        assert r.replica(0).state == "connecting"
        assert (await r.chat()).status_code == 503


async def test_a_poll_never_shares_a_connection_with_requests() -> None:
    async with rig([FakeEngine(has_telemetry=False)]) as r:
        pool = r.replica(0).pool
        for _ in range(3):
            response = await fetch(pool, "/health", "", 5.0)
            assert response.status == 200
            assert pool.idle == 0, "a request could take it while the poll is about to close it"
