"""Calls that many wait for at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from argosy_batch.directory_store import DirectoryStore
from argosy_batch.object_store import BlobEntry, ObjectStore, Quota, SharedCalls

DAY_S = 86400.0


class Calls:
    """Each call ends when the test says so, and returns its number."""

    def __init__(self) -> None:
        self.begun = 0
        self.ends: list[asyncio.Future[None]] = []
        self.shared = SharedCalls(self._call)

    async def _call(self, _: str) -> int:
        self.begun += 1
        number = self.begun
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        await end
        return number

    async def ask(self, number: int, key: str = "a") -> list[asyncio.Task[int]]:
        """Ask for this many calls; return when what may begin has begun."""
        tasks = [asyncio.create_task(self.shared.run(key)) for _ in range(number)]
        for _ in range(10):
            await asyncio.sleep(0)
        return tasks


async def test_callers_share_a_call_that_begins_after_they_asked() -> None:
    calls = Calls()
    first = await calls.ask(3)
    late = await calls.ask(5)
    assert calls.begun == 1
    calls.ends[0].set_result(None)
    assert await asyncio.gather(*first) == [1, 1, 1]
    last = await calls.ask(1)
    assert calls.begun == 2
    calls.ends[1].set_result(None)
    assert await asyncio.gather(*late) == [2] * 5
    await asyncio.sleep(0)
    calls.ends[2].set_result(None)
    assert await last[0] == 3


async def test_keys_do_not_wait_for_each_other() -> None:
    calls = Calls()
    tasks = [*await calls.ask(2, "a"), *await calls.ask(2, "b")]
    assert calls.begun == 2
    for end in calls.ends:
        end.set_result(None)
    assert await asyncio.gather(*tasks) == [1, 1, 2, 2]


async def test_a_failure_is_that_of_its_callers_and_one_that_leaves_ends_nothing() -> None:
    calls = Calls()
    first, gone = await calls.ask(2)
    late = await calls.ask(1)
    gone.cancel()
    calls.ends[0].set_exception(OSError("disk"))
    with pytest.raises(OSError, match="disk"):
        await first
    await calls.ask(0)
    calls.ends[1].set_result(None)
    assert await late[0] == 2


class CountingStore(DirectoryStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.num_listings = 0

    async def entries(self, folder: str) -> list[BlobEntry]:
        self.num_listings += 1
        return await super().entries(folder)


async def test_listings_of_one_owner_at_the_same_time_are_made_once(tmp_path: Path) -> None:
    blobs = CountingStore(tmp_path)
    store = ObjectStore(blobs, Quota(1000, 100))
    made = [store.new_id("file-", DAY_S) for _ in range(20)]
    await asyncio.gather(*(store.create("files", "owner", each, b"x") for each in made))
    assert blobs.num_listings == 1
    lists = await asyncio.gather(*(store.ids("files", "owner") for _ in range(20)))
    assert blobs.num_listings == 2
    assert all(set(each) == set(made) for each in lists)
    assert lists[0] is not lists[1]
