"""Objects of owners on a directory and in a bucket: quotas, time to live, and two routers on one storage."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from argosy_batch.bucket_store import BucketStore
from argosy_batch.config import BatchConfig, ConfigError
from argosy_batch.directory_store import NUM_THREADS, DirectoryStore
from argosy_batch.object_store import (
    LEFTOVER_S,
    LISTING_MAX_AGE_S,
    AlreadyExists,
    BlobStore,
    Changed,
    ObjectStore,
    OwnerUsage,
    Quota,
    QuotaExceeded,
    owner_of,
)
from argosy_batch.program import open_blobs
from argosy_protocol.batch_program import created_at, expires_at, is_id, new_id
from argosy_protocol.errors import StorageUnavailable
from bucket_server import forget_cloud
from moto_server import running_moto

from .batch_rig import DEADLINE_S, lines, official, results, start_batch
from .fake_engine import FakeEngine
from .harness import rig

pytestmark = pytest.mark.timeout(600)  # moto is installed first

OWNER, OTHER = owner_of("shop"), owner_of("lab")
DAY_S = 86400.0
AMPLE = Quota(1 << 30, 1000)


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    async def of_storage(self) -> float:
        return self.now


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def cut(*chunks: bytes) -> AsyncIterator[bytes]:
    """Pieces of an upload whose client disconnects."""
    for chunk in chunks:
        yield chunk
    raise ConnectionError


async def whole(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


@pytest.fixture(scope="module")
def bucket_url() -> Iterator[str]:
    with running_moto() as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/router", method="PUT")).close()
        yield url


@pytest.fixture
def bucket(bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty folder of a bucket, which the environment has the credentials of."""
    forget_cloud(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket_url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://router/{tmp_path.name}"


@pytest.fixture(params=["directory", "bucket"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BlobStore]:
    """Opens the same storage, as each of several routers does."""
    if request.param == "directory":
        return lambda: DirectoryStore(tmp_path)
    url: str = request.getfixturevalue("bucket")
    return lambda: BucketStore(url)


async def test_blobs_are_created_replaced_listed_and_deleted(open_again: Callable[[], BlobStore]) -> None:
    one, two = open_again(), open_again()
    assert await one.get("a/b.json") is None
    first = await one.create("a/b.json", b"1")
    with pytest.raises(AlreadyExists):
        await two.create("a/b.json", b"2")
    blob = await two.get("a/b.json")
    assert blob is not None
    assert (blob.data, blob.version) == (b"1", first)
    second = await two.replace("a/b.json", b"22", blob.version)
    with pytest.raises(Changed):
        await one.replace("a/b.json", b"3", first)
    await one.create("a/c/d.json", b"4")
    await one.create("b/a.json", b"5")
    assert [(entry.key, entry.size) for entry in await two.entries("a")] == [
        ("a/b.json", 2),
        ("a/c/d.json", 1),
    ]
    assert await two.entries("absent") == []
    await two.delete("a/b.json")
    with pytest.raises(Changed):
        await one.replace("a/b.json", b"3", second)
    assert await one.get("a/b.json") is None


async def test_of_many_that_replace_one_version_one_succeeds(tmp_path: Path) -> None:
    stores = [DirectoryStore(tmp_path) for _ in range(8)]
    version = await stores[0].create("lease", b"free")
    results = await asyncio.gather(
        *(store.replace("lease", b"%d" % number, version) for number, store in enumerate(stores)),
        return_exceptions=True,
    )
    winners = [number for number, result in enumerate(results) if isinstance(result, str)]
    assert len(winners) == 1
    assert all(isinstance(result, Changed) for result in results if not isinstance(result, str))
    blob = await stores[0].get("lease")
    assert blob is not None
    assert blob.data == b"%d" % winners[0]


async def test_an_upload_is_there_as_a_whole_or_not_at_all(open_again: Callable[[], BlobStore]) -> None:
    store = open_again()
    chunk = bytes(range(256)) * 4096
    assert await store.upload("a/big", pieces(*[chunk] * 7)) == 7 * len(chunk)
    assert await whole(store.read("a/big")) == chunk * 7
    with pytest.raises(ConnectionError):
        await store.upload("a/half", cut(chunk))
    assert await whole(store.read("a/half")) == b""
    assert [entry.key for entry in await store.entries("a")] == ["a/big"]
    assert await store.upload("a/empty", pieces()) == 0
    assert await whole(store.read("a/empty")) == b""


async def test_objects_are_found_by_their_owner_until_they_expire(
    open_again: Callable[[], BlobStore],
) -> None:
    clock = Clock()
    one, two = (ObjectStore(open_again(), AMPLE, now=clock, storage_now=clock.of_storage) for _ in range(2))
    first = one.new_id("file-", DAY_S)
    await one.upload("files", OWNER, first, pieces(b"con", b"tent"))
    version = await one.create("files", OWNER, first, b'{"a":1}')
    clock.now += 1.0
    second = two.new_id("file-", 2 * DAY_S)
    await two.create("files", OWNER, second, b"{}")

    assert await two.ids("files", OWNER) == [first, second]
    assert await two.ids("files", OTHER) == await two.ids("batches", OWNER) == []
    document = await two.read("files", OWNER, first)
    assert document is not None
    assert document.data == b'{"a":1}'
    assert await two.read("files", OTHER, first) is None
    assert not await two.delete("files", OTHER, first)
    assert await whole(two.content("files", OWNER, first)) == b"content"
    await two.replace("files", OWNER, first, b'{"a":2}', version)
    with pytest.raises(Changed):
        await one.replace("files", OWNER, first, b'{"a":3}', version)

    clock.now += DAY_S
    assert await one.read("files", OWNER, first) is None
    assert await one.ids("files", OWNER) == [second]
    await one.sweep()
    assert one.total == (2, 1)
    assert [entry.key for entry in await one.blobs.entries("owners")] == [
        f"owners/{OWNER}/files/{second}.json"
    ]
    assert await two.delete("files", OWNER, second)
    assert not await one.delete("files", OWNER, second)


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc/passwd", "file-", "file-" + "0" * 51, "file-" + "g" * 52, "x/" + "0" * 52]
)
async def test_what_is_no_id_finds_nothing(tmp_path: Path, name: str) -> None:
    store = ObjectStore(DirectoryStore(tmp_path), AMPLE)
    assert await store.read("files", OWNER, name) is None
    assert not await store.delete("files", OWNER, name)


def test_an_id_tells_when_its_object_was_made_and_expires() -> None:
    ids = {new_id("batch_", 1_800_000_000.25, DAY_S) for _ in range(100)}
    assert len({each[-32:] for each in ids}) == 100
    for each in ids:
        assert is_id(each)
        assert (created_at(each), expires_at(each)) == (1_800_000_000.25, 1_800_086_400)


async def test_quotas_bound_bytes_and_objects_of_each_owner(tmp_path: Path) -> None:
    clock = Clock()
    quota = Quota(max_bytes=100, max_objects=3)
    one, two = (ObjectStore(DirectoryStore(tmp_path), quota, now=clock, monotonic=clock) for _ in range(2))
    big = one.new_id("file-", DAY_S)
    with pytest.raises(QuotaExceeded, match="--storage-max-bytes"):
        await one.upload("files", OWNER, big, pieces(b"x" * 60, b"x" * 60))
    await one.upload("files", OWNER, big, pieces(b"x" * 60, b"x" * 30))
    await one.create("files", OWNER, big, b"x" * 5)
    with pytest.raises(QuotaExceeded):
        await one.create("files", OWNER, one.new_id("file-", DAY_S), b"x" * 6)
    await one.create("files", OTHER, one.new_id("file-", DAY_S), b"x" * 100)
    await two.delete("files", OWNER, big)
    clock.now += LISTING_MAX_AGE_S + 1.0  # by then one has noticed
    for _ in range(3):
        await one.create("files", OWNER, one.new_id("file-", DAY_S), b"x")
    with pytest.raises(QuotaExceeded, match="--storage-max-objects"):
        await one.create("files", OWNER, one.new_id("file-", DAY_S), b"x")
    await one.create("files", OWNER, one.new_id("file-", DAY_S), b"x" * 500, is_counted=False)


async def test_uploads_at_the_same_time_share_the_quota(tmp_path: Path) -> None:
    store = ObjectStore(DirectoryStore(tmp_path), Quota(100, 10))
    has_begun, is_second_done = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x" * 60
        has_begun.set()
        await is_second_done.wait()
        yield b"x" * 10

    first = asyncio.create_task(store.upload("files", OWNER, store.new_id("file-", DAY_S), slow()))
    await has_begun.wait()
    with pytest.raises(QuotaExceeded):
        await store.upload("files", OWNER, store.new_id("file-", DAY_S), pieces(b"x" * 50))
    await store.upload("files", OWNER, store.new_id("file-", DAY_S), pieces(b"x" * 30))
    is_second_done.set()
    assert await first == 70


async def test_writes_at_the_same_time_keep_to_the_number_of_objects(tmp_path: Path) -> None:
    store = ObjectStore(DirectoryStore(tmp_path), Quota(1000, 2))
    ids = [store.new_id("file-", DAY_S) for _ in range(6)]
    told = await asyncio.gather(
        *(store.create("files", OWNER, each, b"x") for each in ids), return_exceptions=True
    )
    assert sum(isinstance(each, QuotaExceeded) for each in told) == 4
    assert len(await store.ids("files", OWNER)) == 2


async def test_what_is_written_while_a_listing_is_made_counts() -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def measure(owner: str) -> tuple[int, int]:
        has_begun.set()
        await may_end.wait()
        return 0, 0

    usage = OwnerUsage(Quota(1000, 1), measure, lambda: 0.0)
    refreshed = asyncio.create_task(usage.refresh(OWNER))
    await has_begun.wait()
    usage.written(OWNER, 10, 1)
    may_end.set()
    await refreshed
    with pytest.raises(QuotaExceeded):
        usage.reserve(OWNER, 1, 1)


async def test_a_sweep_removes_what_crashes_have_left(tmp_path: Path) -> None:
    clock = Clock()
    store = ObjectStore(DirectoryStore(tmp_path), AMPLE, now=clock, storage_now=clock.of_storage)
    await store.upload("files", OWNER, store.new_id("file-", 100 * DAY_S), pieces(b"no document follows"))
    unfinished = tmp_path / "unfinished" / "of-a-crash"
    unfinished.write_bytes(b"half")
    clock.now = unfinished.stat().st_mtime
    await store.sweep()
    assert unfinished.exists()
    assert len(await store.blobs.entries("owners")) == 1
    batch_id = store.new_id("batch_", DAY_S)
    await store.blobs.create(f"leases/{OWNER}/{batch_id}.json", b"{}")
    await store.blobs.create(f"work/{batch_id}/1.jsonl", b"{}")
    await store.sweep()
    assert len([*await store.blobs.entries("leases"), *await store.blobs.entries("work")]) == 2
    clock.now += LEFTOVER_S + 60.0
    await store.sweep()
    assert not unfinished.exists()
    assert await store.blobs.entries("owners") == []
    assert [*await store.blobs.entries("leases"), *await store.blobs.entries("work")] == []


async def test_folders_that_batches_have_left_empty_are_removed_once_they_are_old(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for key in ("work/batch_1/part.jsonl", "work/batch_2/part.jsonl", "work/batch_3/part.jsonl"):
        await store.create(key, b"{}")
    for gone in ("work/batch_1/part.jsonl", "work/batch_3/part.jsonl"):
        await store.delete(gone)
    objects = tmp_path / "objects"
    for old in ("work/batch_1", "work/batch_2", "work"):
        os.utime(objects / old, (1000.0, 1000.0))
    await store.remove_leftovers(2000.0)
    assert sorted(path.name for path in (objects / "work").iterdir()) == ["batch_2", "batch_3"]
    await store.create("work/batch_1/part.jsonl", b"{}")
    assert [entry.key for entry in await store.entries("work")] == [
        "work/batch_1/part.jsonl",
        "work/batch_2/part.jsonl",
    ]


async def test_a_blob_is_written_while_its_old_empty_folder_is_removed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    folder = tmp_path / "objects" / "work" / "batch_1"
    folder.mkdir(parents=True)
    is_over = asyncio.Event()

    async def remove() -> None:
        while not is_over.is_set():
            await store.remove_leftovers(2000.0)

    removing = asyncio.create_task(remove())
    for number in range(100):
        key = f"work/batch_1/{number}.jsonl"
        await (store.create(key, b"{}") if number % 2 else store.upload(key, pieces(b"{}")))
        assert await store.delete(key)
        os.utime(folder, (1000.0, 1000.0))
    is_over.set()
    await removing


async def test_files_are_for_the_routers_user_only(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "storage")
    await store.create("a/b/c.json", b"{}")
    paths = [tmp_path / "storage", *(tmp_path / "storage").rglob("*")]
    assert len(paths) >= 8
    assert all(not path.stat().st_mode & 0o077 for path in paths)


class HangingFiles:
    """Files of a directory whose reading hangs until the test ends, as on a volume whose server is gone."""

    def __init__(self, root: Path, deadline_s: float) -> None:
        self.store = DirectoryStore(root, deadline_s=deadline_s)
        self._objects = root / "objects"

    def add(self, key: str) -> None:
        path = self._objects / key
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)

    def release(self) -> None:
        """Let everything that hangs go on."""
        for path in self._objects.rglob("*"):
            if path.is_fifo():
                # For reading too: then the opening waits for nobody.
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


async def test_calls_that_hang_are_given_up_and_hold_up_others_only_if_no_thread_is_left(
    tmp_path: Path,
) -> None:
    """In two stores at once: each waits for a deadline that a slow machine keeps."""
    one, every = (HangingFiles(tmp_path / name, 5.0) for name in ("one", "every"))
    try:
        await asyncio.gather(one_call_hangs(one), all_calls_hang(every))
    finally:
        one.release()
        every.release()


async def one_call_hangs(hanging: HangingFiles) -> None:
    hanging.add("a/hangs")
    calls = hanging.store.get("a/hangs"), whole(hanging.store.read("a/hangs"))
    told = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, StorageUnavailable) for each in told)
    assert "has not ended in 5 s" in str(told[0])
    assert await hanging.store.upload("a/works", pieces(b"x")) == 1
    assert await whole(hanging.store.read("a/works")) == b"x"


async def all_calls_hang(hanging: HangingFiles) -> None:
    """Others are refused then, and nothing else waits."""
    names = [f"a/{number}" for number in range(NUM_THREADS)]
    for name in names:
        hanging.add(name)
    told = await asyncio.gather(*(hanging.store.get(name) for name in names), return_exceptions=True)
    assert all(isinstance(each, StorageUnavailable) for each in told)
    with pytest.raises(StorageUnavailable):
        await hanging.store.create("a/new", b"x")
    with pytest.raises(StorageUnavailable):  # without a turn of the loop
        hanging.store.upload("a/new", pieces(b"x")).send(None)
    assert await asyncio.to_thread(lambda: "the default executor") == "the default executor"
    hanging.release()
    async with asyncio.timeout(60):
        while not await works(hanging.store):
            pass
    assert await hanging.store.get("a/new") is None


async def works(store: BlobStore) -> bool:
    try:
        await store.get("a/absent")
    except StorageUnavailable:
        await asyncio.sleep(0)  # it may have been refused without a turn of the loop
        return False
    return True


async def test_a_failing_disk_is_an_error_that_clients_may_retry(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / "objects" / "a").write_bytes(b"a file where a folder should be")
    with pytest.raises(StorageUnavailable):
        await store.create("a/b.json", b"{}")


@pytest.mark.parametrize("location", ["ftp://host/path", "file://host/path", "https://bucket/x"])
def test_locations_of_other_kinds_are_refused(location: str) -> None:
    with pytest.raises(ConfigError, match="must be a path"):
        open_blobs(location)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_blobs(str(tmp_path / "file"))


async def test_a_path_with_and_without_scheme_is_one_storage(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    await open_blobs(str(folder)).create("a", b"1")
    assert await open_blobs(folder.as_uri()).get("a") is not None


async def test_a_clock_that_is_ahead_deletes_nothing(open_again: Callable[[], BlobStore]) -> None:
    clock = Clock()
    clock.now = time.time()
    store = ObjectStore(open_again(), AMPLE, now=clock)
    file_id = store.new_id("file-", DAY_S)
    await store.create("files", OWNER, file_id, b"{}")
    clock.now += 30 * DAY_S
    await store.sweep()
    clock.now -= 30 * DAY_S
    assert await store.read("files", OWNER, file_id) is not None


async def test_an_object_that_cannot_be_read_is_put_aside(open_again: Callable[[], BlobStore]) -> None:
    store = ObjectStore(open_again(), AMPLE)
    good, bad = (store.new_id("file-", DAY_S) for _ in range(2))
    for each, document in ((good, b"1"), (bad, b'{"half":')):
        await store.create("files", OWNER, each, document)
    assert await store.read_as("files", OWNER, bad, msgspec.json.decode) is None
    assert (await store.read_as("files", OWNER, good, msgspec.json.decode) or ())[:1] == (1,)
    assert await store.ids("files", OWNER) == [good]
    [kept] = await store.blobs.entries("quarantine")
    assert bad in kept.key
    assert store.quarantine.num_taken == 1


async def test_a_batch_runs_with_all_that_is_stored_in_a_bucket(bucket: str) -> None:
    config = BatchConfig(storage=bucket)
    async with (
        rig([FakeEngine()], storage=config) as r,
        rig([FakeEngine()], storage=config) as other,
        official(r) as client,
        official(other) as reader,
    ):
        contents = [f"request {number} {'x' * 400}" for number in range(100)]
        batch = await start_batch(client, lines(*contents))
        async with asyncio.timeout(DEADLINE_S):
            while (batch := await reader.batches.retrieve(batch.id)).status not in ("completed", "failed"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert batch.errors is None
        assert set(await results(reader, batch.output_file_id)) == set(contents)
        assert [file.purpose async for file in reader.files.list()] == ["batch_output", "batch"]
