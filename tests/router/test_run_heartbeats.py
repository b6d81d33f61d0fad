"""Heartbeats of routers that generate responses: who counts as gone, and who does not."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest

from argosy_batch.directory_store import DirectoryStore
from argosy_batch.object_store import Blob, ObjectStore, Quota
from argosy_batch.stored_responses import GONE_S, MAX_GAP_S, RunHeartbeats, StoredResponses
from argosy_protocol.batch_program import BEAT_S
from argosy_protocol.errors import StorageUnavailable
from argosy_protocol.response_history import StoredResponse
from argosy_router.http.limits import BodyMemory, BodyReservation
from argosy_router.http.messages import Client
from argosy_router.responses.background_responses import BackgroundResponses

from .local_responses import local_responses

OWNER = "owner"
STEP_S = MAX_GAP_S - 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FailingStore(DirectoryStore):
    """Fails to read or to write while it is told to."""

    fails = False

    async def get(self, key: str) -> Blob | None:
        if self.fails:
            raise StorageUnavailable
        return await super().get(key)

    async def replace(self, key: str, data: bytes, version: str) -> str:
        if self.fails:
            raise StorageUnavailable
        return await super().replace(key, data, version)


class Pair:
    """A router that generates, and one that looks whether it is gone."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.blobs = FailingStore(folder)
        self.one, self.other = (RunHeartbeats(self._store(), self.clock) for _ in range(2))

    def _store(self) -> ObjectStore:
        return ObjectStore(self.blobs, Quota(1 << 20, 100))

    async def looks(self, runner: str, times: int, step_s: float = STEP_S) -> list[bool]:
        found = []
        for _ in range(times):
            self.clock.now += step_s
            found.append(await self.other.is_gone(runner))
        return found


async def test_a_router_whose_heartbeat_stands_still_is_gone(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    runner = await pair.one.begin()
    assert await pair.looks(runner, 4) == [False, False, False, True]
    assert 2 * STEP_S < GONE_S <= 3 * STEP_S


async def test_a_router_that_beats_is_not_gone(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    runner = await pair.one.begin()
    for _ in range(10):
        assert await pair.looks(runner, 1) == [False]
        await pair.one.beat([runner])


async def test_a_router_that_was_idle_for_long_is_not_gone_when_it_begins_a_run(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    runner = await pair.one.begin()
    assert (await pair.looks(runner, 5))[-1]
    await pair.one.beat([runner])
    assert await pair.looks(runner, 1, BEAT_S) == [False]


async def test_the_process_that_writes_a_heartbeat_notices_its_end_too(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    runner = await pair.one.begin()
    found = []
    for _ in range(6):
        pair.clock.now += STEP_S
        found.append(await pair.one.is_gone(runner))
    assert found[:3] == [False] * 3
    assert found[-1]


async def test_looks_that_are_far_apart_or_fail_tell_nothing(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    runner = await pair.one.begin()
    assert await pair.looks(runner, 5, MAX_GAP_S + 1) == [False] * 5
    assert await pair.looks(runner, 2) == [False, False]
    pair.blobs.fails = True
    with pytest.raises(StorageUnavailable):
        await pair.other.is_gone(runner)
    with pytest.raises(StorageUnavailable):
        await pair.one.beat([runner])
    pair.blobs.fails = False
    assert await pair.looks(runner, 3) == [False, False, False]
    await pair.one.beat([runner])
    assert await pair.looks(runner, 2) == [False, False]


async def test_a_heartbeat_that_somebody_removed_is_written_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    runner = await pair.one.begin()
    assert await pair.blobs.delete(f"work/{runner}.json")
    assert await pair.looks(runner, 2) == [False, False]
    await pair.one.beat([runner])
    assert await pair.looks(runner, 2) == [False, False]


async def test_processes_take_turns_in_writing_a_heartbeat(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    runner = await pair.one.begin()
    written = []
    for each in (pair.other, pair.one) * 3:
        await each.beat([runner])
        blob = await pair.blobs.get(f"work/{runner}.json")
        assert blob is not None
        written.append(blob.version)
    assert len(set(written)) == 6


async def test_what_is_no_id_of_a_router_is_not_looked_for(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for runner in ("", "../../keys", "router-1"):
        assert await pair.looks(runner, 5) == [False] * 5


async def test_the_response_of_a_router_that_died_has_failed(tmp_path: Path) -> None:
    clock = Clock()
    mine, others = (
        StoredResponses(ObjectStore(DirectoryStore(tmp_path), Quota(1 << 20, 100)), monotonic=monotonic)
        for monotonic in (time.monotonic, clock)
    )
    responses = local_responses(mine)
    background = BackgroundResponses(responses, poll_s=0.01)
    name = responses.new_id()
    fields = {"id": name, "status": "queued", "created_at": int(time.time()), "background": True}
    record = StoredResponse(msgspec.Raw(json.dumps(fields).encode()), [])
    engine: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
    reserved = BodyReservation(BodyMemory(1 << 20), None, 0)
    await background.start(OWNER, name, record, False, reserved, engine.set_result)
    statuses = []
    for _ in range(4):  # faster than a heartbeat comes
        clock.now += STEP_S
        found = await others.find(OWNER, name)
        assert found is not None
        statuses.append(found.state().status)
    assert statuses == ["queued", "queued", "queued", "failed"]
    stored = await mine.find(OWNER, name)
    assert stored is not None
    assert b"has stopped" in bytes(stored.response)
    await background.close()
    assert await mine.find(OWNER, name) == stored  # a router that lives all the same does not change it
