"""Batches of a router that died: another one takes over, goes on after the last result, and repeats none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from argosy_batch.batch_run import ORPHAN_S, BatchRun, BatchRunner, RunContext
from argosy_batch.batches import BatchesApi, BatchLeases, BatchRecords, HeldLease
from argosy_batch.directory_store import DirectoryStore
from argosy_batch.files_api import FilesApi
from argosy_batch.line_requests import LinePace, LineRequests
from argosy_batch.object_store import Blob, BlobEntry, ObjectStore, Quarantine, Quota, owner_of
from argosy_batch.router_client import AccountGone, AnswerMemory, Attempt, HeldAnswer
from argosy_protocol.batch_program import StoredBatch, StoredFile, decode_create, new_batch
from argosy_protocol.errors import StorageUnavailable

from .batch_rig import CHATS, lines
from .fake_engine import completion
from .harness import until

OWNER = owner_of("")
LEASE_S = 30.0
DAY_S = 86400.0
AMPLE = Quota(1 << 30, 1000)


class VirtualTime:
    """A clock that tests move, and those who sleep by it."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self._changed = asyncio.Event()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self._changed.set()
        self._changed = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        due = self.now + seconds
        while self.now < due:
            await self._changed.wait()

    async def passes_until(self, is_true: Callable[[], bool]) -> None:
        """Move the clock, as slowly as routers can follow, until something has happened."""
        async with asyncio.timeout(60.0):
            while not is_true():
                self.advance(LEASE_S / 6)
                await asyncio.sleep(0.05)


class MortalStore:
    """A router's way to the storage, which ends when the router dies."""

    def __init__(self, root: Path) -> None:
        self._store = DirectoryStore(root)
        self.is_alive = True
        self.num_listings = 0
        self.may_upload = asyncio.Event()
        self.may_upload.set()
        self.uploads: list[str] = []

    def _check(self) -> DirectoryStore:
        if not self.is_alive:
            raise StorageUnavailable
        return self._store

    async def get(self, key: str) -> Blob | None:
        return await self._check().get(key)

    async def create(self, key: str, data: bytes) -> str:
        return await self._check().create(key, data)

    async def replace(self, key: str, data: bytes, version: str) -> str:
        return await self._check().replace(key, data, version)

    async def upload(self, key: str, chunks: AsyncIterable[bytes]) -> int:
        self.uploads.append(key)
        await self.may_upload.wait()
        return await self._check().upload(key, chunks)

    def read(self, key: str) -> AsyncGenerator[bytes, None]:
        return self._check().read(key)

    async def delete(self, key: str) -> bool:
        return await self._check().delete(key)

    async def entries(self, folder: str) -> list[BlobEntry]:
        self.num_listings += 1
        return await self._check().entries(folder)

    async def time(self) -> float:
        return await self._check().time()

    async def remove_leftovers(self, older_than: float) -> None:
        await self._check().remove_leftovers(older_than)


async def no_room(_: str) -> int:
    return 0


class Pending:
    """A request that waits for its answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()

    def respond(self, status: int, body: bytes, request_id: str = "") -> None:
        if not self.answer.done():
            self.answer.set_result(Attempt(status, 0.0, request_id, body))


class BatchProcess:
    """What of `argosy batch` runs batches, with a router that answers as the test says."""

    def __init__(self, root: Path, time: VirtualTime) -> None:
        self.blobs = MortalStore(root)
        self.storage_now: Callable[[], float] = time

        async def storage_now() -> float:
            return self.storage_now()

        self.store = ObjectStore(self.blobs, AMPLE, now=time, storage_now=storage_now, monotonic=time)
        self.files = FilesApi(self.store, max_file_bytes=1 << 30, ttl_s=30 * DAY_S)
        self.records = BatchRecords(self.store)
        self.leases = BatchLeases(self.blobs, self.store.quarantine, LEASE_S, time)
        self.asked: Counter[str] = Counter()
        self.held: list[tuple[str, Pending]] = []
        """Requests that wait for their answer."""
        self.answers: Callable[[str], bool] = lambda _: True
        """Whether a request is answered at once."""
        self.has_account = True
        self.is_away = False
        """Whether only what stands before the routers answers."""
        self.num_looks = 0
        self.backoffs: list[float] = []
        self._pace = LinePace(no_room, max_inflight=64)  # one request of a model is in flight at a time
        self.ended: list[str] = []
        context = RunContext(
            store=self.store,
            files=self.files,
            records=self.records,
            leases=self.leases,
            requests=LineRequests(self, self._pace, lambda: None, self.back_off),
            answers=AnswerMemory(),
            max_requests=1000,
            max_pending=64,
            on_done=lambda _: None,
            on_ended=self.ended.append,
            sleep=time.sleep,
        )
        self.runner = BatchRunner(self.leases, lambda held: BatchRun(held, context), poll_s=0.01)
        self.api = BatchesApi(
            self.store,
            self.files,
            self.records,
            self.leases,
            ttl_s=30 * DAY_S,
            on_created=self.runner.wake,
        )
        self._task = asyncio.create_task(self.runner.run())

    async def post(self, path: str, body: bytes, account: str, held: HeldAnswer) -> Attempt:
        if not self.has_account:
            raise AccountGone
        content = json.loads(body)["messages"][0]["content"]
        self.asked[content] += 1
        pending = Pending()
        if self.answers(content):
            pending.respond(200, completion(content))
        else:
            self.held.append((content, pending))
        return await pending.answer

    async def is_reached(self) -> bool:
        self.num_looks += 1
        await asyncio.sleep(0)
        return not self.is_away

    async def back_off(self, seconds: float) -> None:
        self.backoffs.append(seconds)

    def die(self) -> None:
        """Stop all at once, without a word to the storage."""
        self.blobs.is_alive = False

    async def close(self) -> None:
        self.die()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.runner.close()
        self._pace.close()

    async def start_batch(self, content: bytes) -> str:
        async def chunks() -> AsyncIterator[bytes]:
            yield content

        file_id = self.store.new_id("file-", 30 * DAY_S)
        size = await self.store.upload("files", OWNER, file_id, chunks())
        await self.files.add(OWNER, StoredFile(id=file_id, filename="a", purpose="batch", bytes=size))
        create = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
        batch_id = self.store.new_id("batch_", 30 * DAY_S)
        await self.leases.create(OWNER, batch_id)
        stored = new_batch(batch_id, decode_create(json.dumps(create).encode()), "", 30 * DAY_S)
        await self.records.create(OWNER, stored)
        self.runner.wake()
        return batch_id

    async def batch(self, batch_id: str) -> StoredBatch:
        stored = await self.records.read(OWNER, batch_id)
        assert stored is not None
        return stored

    async def until_status(self, batch_id: str, status: str) -> StoredBatch:
        async with asyncio.timeout(60.0):
            while (stored := await self.batch(batch_id)).batch.status != status:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return stored

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        chunks = [chunk async for chunk in self.files.chunks(OWNER, file_id)]
        return [json.loads(line) for line in b"".join(chunks).splitlines()]


@contextlib.asynccontextmanager
async def routers(root: Path, time: VirtualTime, count: int = 2) -> AsyncIterator[list[BatchProcess]]:
    running = [BatchProcess(root, time) for _ in range(count)]
    try:
        yield running
    finally:
        for router in running:
            await router.close()


TWENTY = tuple(map(str, range(20)))


async def test_another_router_goes_on_after_the_last_result_of_one_that_died(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time) as (first, second):
        second.blobs.is_alive = False
        first.answers = lambda content: int(content) < 10
        batch_id = await first.start_batch(lines(*TWENTY))
        await until(lambda: len(first.held) == 1)
        time.advance(LEASE_S / 6)  # the lease is renewed, and the results are kept
        await until(lambda: bool(list((tmp_path / "objects" / "work").rglob("*.jsonl"))))
        async with asyncio.timeout(60.0):
            while (await first.batch(batch_id)).batch.request_counts.completed < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        first.die()

        second.blobs.is_alive = True
        second.runner.wake()
        assert not second.asked
        await time.passes_until(lambda: bool(second.asked))
        stored = await second.until_status(batch_id, "completed")
        assert stored.batch.request_counts.completed == 20
        results = await second.results(stored.batch.output_file_id)
        assert sorted(result["custom_id"] for result in results) == sorted(TWENTY)
        assert set(second.asked) == set(TWENTY[10:]), "what has a result is not sent again"
        await until(lambda: second.ended == ["completed"], 60.0)
        await until(lambda: not list((tmp_path / "objects").glob("*/*/batch_*")), 60.0)
        await until(lambda: not list((tmp_path / "objects").glob("work/*/*")), 60.0)


async def test_a_request_that_a_router_fails_to_execute_is_an_error_of_its_line(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time, 1) as (router,):

        def answer(content: str) -> bool:
            if content == "7":
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
            return True

        router.answers = answer
        batch_id = await router.start_batch(lines(*TWENTY))
        stored = await router.until_status(batch_id, "completed")
        (failed,) = await router.results(stored.batch.error_file_id)
        assert (failed["custom_id"], failed["error"]["code"]) == ("7", "internal_error")
        assert len(await router.results(stored.batch.output_file_id)) == 19
        assert router.asked["7"] == 1


async def test_a_router_that_was_suspended_changes_nothing_when_it_wakes(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time) as (first, second):
        second.blobs.is_alive = False
        first.answers = lambda _: False
        batch_id = await first.start_batch(lines("a"))
        await until(lambda: len(first.held) == 1)
        first.die()
        second.blobs.is_alive = True
        await time.passes_until(lambda: bool(second.asked))
        stored = await second.until_status(batch_id, "completed")
        first.blobs.is_alive = True
        for _, client in first.held:
            client.respond(200, completion("late"))
        time.advance(LEASE_S)
        for _ in range(50):
            await asyncio.sleep(0.002)
        (result,) = await second.results(stored.batch.output_file_id)
        assert result["response"]["body"]["choices"][0]["message"]["content"] == "a"
        assert await second.batch(batch_id) == stored
        assert first.ended == []


async def test_a_router_whose_clock_stood_still_replaces_no_file_of_results(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, VirtualTime(), 1) as (first,), routers(tmp_path, time, 1) as (second,):
        second.blobs.is_alive = False
        batch_id = await first.start_batch(lines("a", "b"))
        first.blobs.may_upload.clear()
        await first.until_status(batch_id, "finalizing")
        output_id = (await first.batch(batch_id)).output_id
        await until(lambda: any(output_id in key for key in first.blobs.uploads), 60.0)
        second.blobs.is_alive = True
        await time.passes_until(lambda: second.ended == ["completed"])
        await until(lambda: not list((tmp_path / "objects").glob("work/*/*")), 60.0)
        first.blobs.may_upload.set()
        await until(lambda: not any(count for _, count in first.runner.statuses()), 60.0)
        assert first.ended == []
        results = await second.results(output_id)
        assert sorted(each["custom_id"] for each in results) == ["a", "b"]


async def test_several_routers_share_batches_and_run_each_once(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time, 3) as running:
        ids = [
            await running[number % 3].start_batch(lines(f"{number}-a", f"{number}-b")) for number in range(9)
        ]
        for batch_id in ids:
            stored = await running[0].until_status(batch_id, "completed")
            assert len(await running[0].results(stored.batch.output_file_id)) == 2
        asked: Counter[str] = sum((router.asked for router in running), Counter())
        assert len(asked) == 18
        assert set(asked.values()) == {1}
        await until(lambda: sum(len(router.ended) for router in running) == 9, 60.0)


async def test_a_batch_ends_with_its_window_and_names_what_was_not_executed(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time, 1) as (router,):
        router.answers = lambda content: content == "a"
        batch_id = await router.start_batch(lines("a", "b", "c"))
        await until(lambda: len(router.held) == 1)
        time.advance(DAY_S)
        stored = await router.until_status(batch_id, "expired")
        assert stored.batch.expired_at is not None
        (done,) = await router.results(stored.batch.output_file_id)
        assert done["custom_id"] == "a"
        expired = await router.results(stored.batch.error_file_id)
        assert [(each["custom_id"], each["response"], each["error"]["code"]) for each in expired] == [
            ("b", None, "batch_expired"),
            ("c", None, "batch_expired"),
        ]


async def test_a_clock_that_is_ahead_ends_no_batch(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time, 1) as (router,):
        now = time()
        router.storage_now = lambda: now
        router.answers = lambda content: content == "a"
        batch_id = await router.start_batch(lines("a", "b"))
        await until(lambda: len(router.held) == 1)
        time.advance(2 * DAY_S)
        for _ in range(20):  # it notes its progress, and looks whether its window is over
            time.advance(LEASE_S / 6)
            await asyncio.sleep(0.01)
        router.held.pop()[1].respond(200, completion("b"))
        stored = await router.until_status(batch_id, "completed")
        assert stored.batch.request_counts.completed == 2


async def test_a_batch_whose_input_was_deleted_fails_and_says_so(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time, 1) as (router,):
        router.has_account = False  # so that no request is sent
        batch_id = await router.start_batch(lines("a", "b"))
        stored = await router.until_status(batch_id, "in_progress")
        await router.files.delete(OWNER, stored.batch.input_file_id)
        stored = await router.until_status(batch_id, "failed")
        assert stored.batch.errors is not None
        assert [error.code for error in stored.batch.errors.data] == ["input_file_unavailable"]


async def test_a_batch_waits_while_no_key_has_its_account(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time, 1) as (router,):
        router.has_account = False
        batch_id = await router.start_batch(lines("a"))
        await router.until_status(batch_id, "in_progress")
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not router.asked
        router.has_account = True
        await router.until_status(batch_id, "completed")


async def test_a_lease_without_a_batch_is_removed_once_it_is_old(tmp_path: Path) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time, 1) as (router,):
        await router.leases.create(OWNER, router.store.new_id("batch_", DAY_S))
        router.runner.wake()
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert await router.leases.batches(), "its batch may be about to be made"
        time.advance(ORPHAN_S + 1.0)
        async with asyncio.timeout(60.0):
            while await router.leases.batches():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_the_end_of_a_run_leaves_the_lease_of_the_next_one_of_its_process(tmp_path: Path) -> None:
    time, blobs = VirtualTime(), MortalStore(tmp_path)
    quarantine = Quarantine(blobs)
    leases, elsewhere = (BatchLeases(blobs, quarantine, LEASE_S, time) for _ in range(2))
    batch_id = ObjectStore(blobs, AMPLE, now=time).new_id("batch_", DAY_S)
    await leases.create(OWNER, batch_id)
    before = await leases.take(OWNER, batch_id)
    now = await leases.take(OWNER, batch_id)
    assert before is not None
    assert now is not None
    await leases.release(before)
    assert await elsewhere.take(OWNER, batch_id) is None
    await leases.renew(now)
    assert leases.is_held(now)


async def test_a_batch_is_not_taken_again_while_its_lease_is_released(tmp_path: Path) -> None:
    async with routers(tmp_path, VirtualTime(), 1) as (router,):
        await router.start_batch(lines("a"))
        router.has_account = False  # each run ends at once, and another one begins
        release, take = router.leases.release, router.leases.take
        releasing = set[str]()
        taken_meanwhile, num_released = list[str](), 0

        async def slow_release(held: HeldLease) -> None:
            nonlocal num_released
            releasing.add(held.batch_id)
            for _ in range(3):
                looks = router.blobs.num_listings
                router.runner.wake()
                await until(lambda looks=looks: router.blobs.num_listings > looks)  # type: ignore[misc]
            releasing.discard(held.batch_id)
            await release(held)
            num_released += 1

        async def watched_take(owner: str, batch_id: str) -> HeldLease | None:
            taken_meanwhile.extend(releasing & {batch_id})
            return await take(owner, batch_id)

        router.leases.release = slow_release  # type: ignore[method-assign]
        router.leases.take = watched_take  # type: ignore[method-assign]
        await until(lambda: num_released >= 2)
        router.leases.release, router.leases.take = release, take  # type: ignore[method-assign]
        assert not taken_meanwhile


async def upload_for_batch(router: BatchProcess) -> bytes:
    """Upload a file; return the body of the request that makes a batch of it."""

    async def chunks() -> AsyncIterator[bytes]:
        yield lines("a")

    file_id = router.store.new_id("file-", 30 * DAY_S)
    size = await router.store.upload("files", OWNER, file_id, chunks())
    await router.files.add(OWNER, StoredFile(id=file_id, filename="a", purpose="batch", bytes=size))
    create = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
    return json.dumps(create).encode()


async def test_a_batch_whose_lease_is_gone_when_it_is_stored_runs_all_the_same(tmp_path: Path) -> None:
    async with routers(tmp_path, VirtualTime(), 1) as (router,):
        body = await upload_for_batch(router)
        create = router.blobs.create

        async def slow(key: str, data: bytes) -> str:
            if "/batches/" in key:  # so slow that the lease is taken for one that no batch will have
                for owner, batch_id in await router.leases.batches():
                    await router.leases.remove(owner, batch_id)
            return await create(key, data)

        router.blobs.create = slow  # type: ignore[method-assign]
        batch = await router.api.create(OWNER, "", body)
        await router.until_status(batch.id, "completed")


async def test_a_batch_that_is_stored_although_the_answer_was_lost_runs(tmp_path: Path) -> None:
    async with routers(tmp_path, VirtualTime(), 1) as (router,):
        body = await upload_for_batch(router)
        create = router.blobs.create

        async def lost(key: str, data: bytes) -> str:
            version = await create(key, data)
            if "/batches/" in key:
                raise StorageUnavailable
            return version

        router.blobs.create = lost  # type: ignore[method-assign]
        with pytest.raises(StorageUnavailable):
            await router.api.create(OWNER, "", body)
        (batch,) = (await router.api.list(OWNER, {})).data
        await router.until_status(batch.id, "completed")


async def test_a_sweep_makes_the_lease_of_a_batch_that_has_lost_it(tmp_path: Path) -> None:
    async with routers(tmp_path, VirtualTime(), 1) as (router,):
        batch_id = await router.start_batch(lines("a"))
        await router.until_status(batch_id, "completed")
        await until(lambda: router.ended == ["completed"])
        body = await upload_for_batch(router)
        lost = router.store.new_id("batch_", 30 * DAY_S)
        await router.records.create(OWNER, new_batch(lost, decode_create(body), "", 30 * DAY_S))
        await router.api.cancel(OWNER, lost)
        await router.api.lease_again(await router.store.sweep())
        await router.until_status(lost, "cancelled")
        await until(lambda: len(router.ended) > 1)
        assert router.ended == ["completed", "cancelled"], "one that has ended is not begun again"


async def test_routers_that_are_away_for_long_cost_a_request_one_of_its_attempts(tmp_path: Path) -> None:
    """An ingress answers 502 and 504 in their place."""
    async with routers(tmp_path, VirtualTime(), 1) as (router,):
        router.answers = lambda _: False
        batch_id = await router.start_batch(lines("a"))
        for _ in range(3):
            await until(lambda: bool(router.held))
            router.is_away = True
            router.held.pop()[1].respond(502, b"<html>Bad Gateway</html>", "")
            looks = router.num_looks
            await until(lambda looks=looks: router.num_looks >= looks + 10)
            assert not router.held, "nothing is sent to routers that do not answer"
            router.is_away = False
        await until(lambda: bool(router.held))
        router.held.pop()[1].respond(200, completion("a"))
        stored = await router.until_status(batch_id, "completed")
        assert stored.batch.request_counts.completed == 1


@pytest.mark.parametrize("status", [502, 504])
async def test_failures_of_replicas_are_repeated_a_few_times(tmp_path: Path, status: int) -> None:
    time = VirtualTime()
    async with routers(tmp_path, time, 1) as (router,):
        router.answers = lambda _: False
        batch_id = await router.start_batch(lines("a"))
        for _ in range(4):
            await until(lambda: bool(router.held))
            router.held.pop()[1].respond(status, b'{"error":{"message":"lost"}}', "r")
        stored = await router.until_status(batch_id, "completed")
        assert stored.batch.request_counts.failed == 1
        (result,) = await router.results(stored.batch.error_file_id)
        assert (result["response"]["status_code"], result["response"]["request_id"]) == (status, "r")
        assert router.asked["a"] == 4
        assert len(router.backoffs) == 3
        assert all(later > earlier for earlier, later in itertools.pairwise(router.backoffs))
