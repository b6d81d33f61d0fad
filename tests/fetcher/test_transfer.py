"""Transfer of files under cuts, wrong content, full disks and slow servers."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from argosy_fetcher.errors import FetchError, HashMismatch, NoSpace, SourceChanged, TransientError
from argosy_fetcher.progress import Progress
from argosy_fetcher.retry import Cancelled, RetryPolicy
from argosy_fetcher.source import Algorithm, Chunk, RemoteFile
from argosy_fetcher.transfer import Transfer, TransferSettings
from recorded_progress import RecordedProgress
from retry_time import RetryTime
from scripted_source import Read, ScriptedSource, Stop

PATIENT = RetryPolicy(wait=lambda event, seconds: None)
QUICK = TransferSettings(part_bytes=100, retry=RetryPolicy(wait=lambda event, seconds: None))
CONTENT = {"a": bytes(range(256)) * 3, "b": b"b" * 250, "empty": b""}
TOTAL = sum(map(len, CONTENT.values()))


def fetch(
    source: ScriptedSource,
    directory: Path,
    progress: RecordedProgress | None = None,
    settings: TransferSettings = QUICK,
) -> None:
    targets = {directory / file.path: file for file in source.files}
    Transfer(source, targets, directory, progress=progress or Progress(), settings=settings, known={}).run()


def found(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


CUTS = {
    "cuts": st.lists(st.tuples(st.integers(0, 120), st.booleans()), max_size=60),
    "part_bytes": st.integers(1, 1100),
    "chunk_bytes": st.integers(1, 300),
    "in_flight": st.integers(1, 8),
    "algorithm": st.sampled_from([None, "sha256", "md5", "git-sha1"]),
}


@given(**CUTS)
@settings(deadline=None, max_examples=30)
def test_cuts_at_any_byte_lose_nothing_but_time(**case: Any) -> None:
    check_cuts(**case)


@pytest.mark.full
@given(**CUTS)
@settings(deadline=None, max_examples=100)
def test_many_cuts_at_any_byte_lose_nothing_but_time(**case: Any) -> None:
    check_cuts(**case)


def check_cuts(
    cuts: list[tuple[int, bool]],
    part_bytes: int,
    chunk_bytes: int,
    in_flight: int,
    algorithm: Algorithm | None,
) -> None:
    def cut(read: Read) -> Stop | None:
        if read.number >= len(cuts):
            return None
        after, raises = cuts[read.number]
        return Stop(after, TransientError("cut") if raises else None)

    source = ScriptedSource(CONTENT, algorithm=algorithm, chunk_bytes=chunk_bytes)
    source.on_read = cut
    progress = RecordedProgress()
    with tempfile.TemporaryDirectory() as directory:
        fetch(source, Path(directory), progress, TransferSettings(part_bytes, in_flight, PATIENT))
        assert found(Path(directory)) == CONTENT
    assert source.num_bytes == TOTAL  # no byte was sent twice
    assert progress.present + progress.received == progress.total == TOTAL


STOPS = {
    "stops": st.lists(st.integers(0, TOTAL), max_size=6),
    "part_bytes": st.integers(20, 300),
    "algorithm": st.sampled_from([None, "sha256"]),
}


@given(**STOPS)
@settings(deadline=None, max_examples=30)
def test_interrupted_transfers_continue_with_the_finished_parts(**case: Any) -> None:
    check_interruptions(**case)


@pytest.mark.full
@given(**STOPS)
@settings(deadline=None, max_examples=100)
def test_transfers_that_any_stops_interrupt_continue(**case: Any) -> None:
    check_interruptions(**case)


def check_interruptions(stops: list[int], part_bytes: int, algorithm: Algorithm | None) -> None:
    one_at_a_time = TransferSettings(part_bytes, 1, PATIENT)
    num_bytes = 0
    with tempfile.TemporaryDirectory() as directory:
        for stop in stops:
            source = ScriptedSource(CONTENT, algorithm=algorithm, chunk_bytes=10)
            source.on_read = stop_after(source, stop)
            with suppress(FetchError):
                fetch(source, Path(directory), settings=one_at_a_time)
            num_bytes += source.num_bytes
        source, progress = ScriptedSource(CONTENT, algorithm=algorithm), RecordedProgress()
        fetch(source, Path(directory), progress, one_at_a_time)
        assert found(Path(directory)) == CONTENT
    assert progress.received == source.num_bytes
    assert progress.present + progress.received == TOTAL
    assert num_bytes + source.num_bytes <= TOTAL + len(stops) * part_bytes


def stop_after(source: ScriptedSource, num_bytes: int) -> Callable[[Read], Stop | None]:
    """Fail for good when a source has yielded so many bytes."""

    def script(read: Read) -> Stop | None:
        rest = num_bytes - source.num_bytes
        return Stop(rest, FetchError("stopped")) if rest < read.stop - read.start else None

    return script


def test_an_endless_failure_is_given_up_and_keeps_what_has_arrived(tmp_path: Path) -> None:
    time = RetryTime()
    source = ScriptedSource({"a": CONTENT["a"]})
    source.on_read = lambda read: Stop(0, TransientError("503")) if read.start >= 300 else None
    with pytest.raises(TransientError, match=r"hf://acme/tiny: a: gave up after .* without progress: 503"):
        fetch(source, tmp_path, settings=TransferSettings(100, 1, time.policy()))
    assert 300 <= time.now <= 330
    assert all(0.25 <= wait <= 30 for wait in time.waits)
    rest = ScriptedSource({"a": CONTENT["a"]})
    fetch(rest, tmp_path)
    assert min(read.start for read in rest.reads) == 300


def test_progress_resets_the_count_of_failures(tmp_path: Path) -> None:
    source = ScriptedSource({"a": CONTENT["a"]}, chunk_bytes=10)
    source.on_read = lambda read: Stop(10 if read.number % 7 == 6 else 0, TransientError("slow"))
    fetch(source, tmp_path, settings=TransferSettings(100, 1, QUICK.retry))
    assert len(source.reads) > 400
    assert found(tmp_path) == {"a": CONTENT["a"]}


def test_retry_after_is_obeyed_and_told(tmp_path: Path) -> None:
    waits: list[float] = []
    policy = RetryPolicy(wait=lambda event, seconds: waits.append(seconds))
    source, progress = ScriptedSource({"a": CONTENT["a"]}), RecordedProgress()
    source.on_read = lambda read: Stop(0, TransientError("429", 17.0)) if read.number == 0 else None
    fetch(source, tmp_path, progress, TransferSettings(1000, 1, policy))
    assert waits == [17.0]
    assert progress.notes == ["waiting for hf://acme/tiny: a (attempt 2 in 17.0 s): 429"]


def test_an_outage_of_minutes_is_waited_for(tmp_path: Path) -> None:
    time = RetryTime()
    source = ScriptedSource({"a": CONTENT["a"]})
    source.on_read = lambda read: Stop(0, TransientError("503")) if read.start and time.now < 250 else None
    fetch(source, tmp_path, settings=TransferSettings(100, 1, time.policy()))
    assert found(tmp_path) == {"a": CONTENT["a"]}
    assert time.now >= 250


class Trickle(ScriptedSource):
    """Sends a byte every 29 seconds, and never an end."""

    time: RetryTime
    is_well = False

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        for chunk in super().read(file, start, stop):
            self.time.now += 0 if self.is_well else 29
            yield chunk


def trickle() -> Trickle:
    source = Trickle({"a": CONTENT["a"]}, chunk_bytes=1)
    source.time = RetryTime()
    return source


def test_a_source_that_trickles_is_given_up(tmp_path: Path) -> None:
    source = trickle()
    with pytest.raises(
        TransientError, match=r"without progress: the source sends too slowly \(4 bytes in 87 s"
    ):
        fetch(source, tmp_path, settings=TransferSettings(1000, 1, source.time.policy()))
    assert source.time.now < 1000


def test_a_trickle_is_cut_and_the_next_attempt_continues(tmp_path: Path) -> None:
    source = trickle()

    def recover(read: Read) -> None:
        source.is_well = read.number == 2

    source.on_read = recover
    fetch(source, tmp_path, settings=TransferSettings(1000, 1, source.time.policy()))
    assert [read.start for read in source.reads] == [0, 4, 8]
    assert found(tmp_path) == {"a": CONTENT["a"]}


def test_a_source_that_first_sends_what_nobody_asked_for_is_not_slow(tmp_path: Path) -> None:
    """As those do that cannot begin in the middle of a file."""
    time = RetryTime()

    class Skipping(ScriptedSource):
        def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
            time.now += 200
            yield from super().read(file, start, stop)

    source = Skipping({"a": CONTENT["a"]}, chunk_bytes=1)
    fetch(source, tmp_path, settings=TransferSettings(1000, 1, time.policy()))
    assert len(source.reads) == 1


def test_time_that_the_disk_takes_is_not_the_source_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, write = RetryTime(), os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        time.now += 100
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    source = ScriptedSource({"a": CONTENT["a"]}, chunk_bytes=1)
    fetch(source, tmp_path, settings=TransferSettings(1000, 1, time.policy()))
    assert len(source.reads) == 1


def test_a_cancelled_transfer_stops_at_the_next_chunk(tmp_path: Path) -> None:
    cancelled = threading.Event()

    class Cancelling(ScriptedSource):
        def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
            for chunk in super().read(file, start, stop):
                if self.num_bytes == 500:
                    cancelled.set()
                yield chunk

    source = Cancelling({"a": bytes(10_000)}, chunk_bytes=100)
    targets = {tmp_path / file.path: file for file in source.files}
    with pytest.raises(Cancelled):
        Transfer(
            source,
            targets,
            tmp_path,
            progress=Progress(),
            settings=TransferSettings(10_000, 1, PATIENT),
            known={},
            cancelled=cancelled,
        ).run()
    assert source.num_bytes == 500
    assert "a" not in found(tmp_path)


def test_connection_errors_that_a_source_lets_through_are_transient(tmp_path: Path) -> None:
    source = ScriptedSource(CONTENT)
    source.on_read = lambda read: Stop(3, ConnectionResetError()) if read.number == 0 else None
    fetch(source, tmp_path)
    assert found(tmp_path) == CONTENT


def test_wrong_content_is_fetched_once_more(tmp_path: Path) -> None:
    source, progress = ScriptedSource(CONTENT), RecordedProgress()
    right = source.content["a"]
    source.content["a"] = b"?" + right[1:]

    def restore(read: Read) -> None:
        if sum(other.path == "a" for other in source.reads) > 8:  # the file has 8 parts
            source.content["a"] = right

    source.on_read = restore
    fetch(source, tmp_path, progress)
    assert found(tmp_path) == CONTENT
    assert progress.notes == ["hf://acme/tiny: the content of a is wrong; fetching it again"]
    assert progress.received == progress.total == TOTAL


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "git-sha1"])
def test_content_that_is_wrong_twice_is_an_error(tmp_path: Path, algorithm: Algorithm) -> None:
    source = ScriptedSource({"a": CONTENT["a"]}, algorithm=algorithm)
    source.content["a"] = CONTENT["a"][:-1] + b"?"
    with pytest.raises(
        HashMismatch, match=rf"hf://acme/tiny: the content of a does not have the {algorithm}"
    ):
        fetch(source, tmp_path)
    assert source.num_bytes == 2 * len(CONTENT["a"])
    assert "a" not in found(tmp_path)
    good = ScriptedSource({"a": CONTENT["a"]}, algorithm=algorithm)
    fetch(good, tmp_path)
    assert found(tmp_path) == {"a": CONTENT["a"]}
    assert good.num_bytes == len(CONTENT["a"])


def test_parts_of_an_earlier_attempt_do_not_count_as_wrong_content(tmp_path: Path) -> None:
    """They may have been damaged on this disk, so what follows is the first attempt of the source."""
    source = ScriptedSource({"a": CONTENT["a"]})
    source.on_read = lambda read: Stop(0, FetchError("stopped")) if read.start == 700 else None
    with pytest.raises(FetchError, match="stopped"):
        fetch(source, tmp_path, settings=TransferSettings(100, 1, PATIENT))
    with (tmp_path / "a.part").open("r+b") as file:
        file.write(b"damaged by a crash")
    source = ScriptedSource({"a": CONTENT["a"]})
    source.content["a"] = b"?" + CONTENT["a"][1:]
    source.on_read = lambda read: source.content.update(CONTENT) if read.number > 8 else None
    fetch(source, tmp_path, settings=TransferSettings(100, 1, PATIENT))
    assert found(tmp_path) == {"a": CONTENT["a"]}
    assert len(source.reads) == 1 + 8 + 8


def test_more_bytes_than_asked_for_are_cut_off(tmp_path: Path) -> None:
    class Generous(ScriptedSource):
        def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
            yield from super().read(file, start, stop)
            yield b"more"
            raise AssertionError("nobody asked for more")

    fetch(Generous(CONTENT), tmp_path)
    assert found(tmp_path) == CONTENT


def test_the_first_error_stops_all_parts(tmp_path: Path) -> None:
    waiting = threading.Semaphore(0)

    def wait(cancelled: threading.Event, seconds: float) -> None:
        waiting.release()
        assert cancelled.wait(60)

    def fail_last(read: Read) -> Stop:
        return Stop(0, TransientError("cut") if read.start else SourceChanged("a has changed"))

    class Changing(ScriptedSource):
        def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
            if start == 0:
                for _ in range(7):
                    assert waiting.acquire(timeout=60)
            yield from super().read(file, start, stop)

    source = Changing({"a": bytes(10_000)})
    source.on_read = fail_last
    with pytest.raises(SourceChanged):
        fetch(source, tmp_path, settings=TransferSettings(100, 8, RetryPolicy(wait=wait)))
    assert sorted(read.start for read in source.reads) == list(range(0, 800, 100))


def test_a_full_disk_keeps_what_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [400]

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if room[0] < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= len(data)
        return write(descriptor, data, offset)

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    one_at_a_time = TransferSettings(100, 1, PATIENT)
    with pytest.raises(NoSpace, match=r"hf://acme/tiny: the disk of .* is full; make room"):
        fetch(ScriptedSource(CONTENT, chunk_bytes=50), tmp_path, settings=one_at_a_time)
    room[0] = TOTAL
    source, progress = ScriptedSource(CONTENT), RecordedProgress()
    fetch(source, tmp_path, progress, one_at_a_time)
    assert found(tmp_path) == CONTENT
    assert progress.present == 400
    assert source.num_bytes == TOTAL - 400


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:3], offset))
    fetch(ScriptedSource(CONTENT), tmp_path)
    assert found(tmp_path) == CONTENT


class CountedProgress(RecordedProgress):
    num_advances = 0

    def advance(self, num_bytes: int) -> None:
        super().advance(num_bytes)
        self.num_advances += 1


class CachedSource(ScriptedSource):
    """A source some of whose files lie on this machine."""

    copies: dict[str, Path]

    def local_copy(self, file: RemoteFile) -> Path | None:
        return self.copies.get(file.path)


def cached_source(directory: Path, content: bytes, algorithm: Algorithm | None = "sha256") -> CachedSource:
    directory.mkdir()
    (directory / "blob").write_bytes(content)
    (directory / "link").symlink_to("blob")
    source = CachedSource(CONTENT, algorithm=algorithm)
    source.copies = {"a": directory / "link"}
    return source


def test_local_copies_are_linked_instead_of_fetched(tmp_path: Path) -> None:
    source, progress = cached_source(tmp_path / "cache", CONTENT["a"]), RecordedProgress()
    (tmp_path / "store").mkdir()
    fetch(source, tmp_path / "store", progress)
    assert found(tmp_path / "store") == CONTENT
    assert source.paths_read() == {"b"}
    assert (tmp_path / "store" / "a").samefile(tmp_path / "cache" / "blob")
    assert progress.present == len(CONTENT["a"])
    assert progress.present + progress.received == TOTAL


def test_local_copies_are_copied_where_links_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)
    source = cached_source(tmp_path / "cache", CONTENT["a"])
    (tmp_path / "store").mkdir()
    fetch(source, tmp_path / "store")
    assert found(tmp_path / "store") == CONTENT
    assert source.paths_read() == {"b"}


@pytest.mark.parametrize("is_copied", [False, True])
def test_local_copies_show_progress_part_by_part(
    is_copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who wait for this fetch would take a large copy, or its check, for one that stands still."""

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if is_copied:
        monkeypatch.setattr(os, "link", link)
    source, progress = cached_source(tmp_path / "cache", CONTENT["a"]), CountedProgress()
    (tmp_path / "store").mkdir()
    targets = {tmp_path / "store" / file.path: file for file in source.files if file.path == "a"}
    Transfer(source, targets, tmp_path / "store", progress=progress, settings=QUICK, known={}).run()
    num_parts = -(-len(CONTENT["a"]) // QUICK.part_bytes)
    assert progress.num_advances == num_parts * (2 if is_copied else 1) + 1
    assert progress.received == 0


@pytest.mark.parametrize("damaged", [b"?" + CONTENT["a"][1:], CONTENT["a"][:-1]])
def test_wrong_local_copies_are_left_alone_and_the_file_is_fetched(tmp_path: Path, damaged: bytes) -> None:
    source, progress = cached_source(tmp_path / "cache", damaged), RecordedProgress()
    (tmp_path / "store").mkdir()
    fetch(source, tmp_path / "store", progress)
    assert found(tmp_path / "store") == CONTENT
    assert (tmp_path / "cache" / "blob").read_bytes() == damaged
    assert progress.present + progress.received == TOTAL


def test_local_copies_that_cannot_be_checked_are_not_used(tmp_path: Path) -> None:
    source = cached_source(tmp_path / "cache", CONTENT["a"], algorithm=None)
    (tmp_path / "store").mkdir()
    fetch(source, tmp_path / "store")
    assert source.paths_read() == {"a", "b"}


def test_a_source_without_ranges_reads_each_file_once(tmp_path: Path) -> None:
    class WithoutRanges(ScriptedSource):
        def can_read_ranges(self, file: RemoteFile) -> bool:
            return False

    source = WithoutRanges(CONTENT)
    fetch(source, tmp_path)
    assert sorted((read.path, read.start, read.stop) for read in source.reads) == [
        ("a", 0, len(CONTENT["a"])),
        ("b", 0, len(CONTENT["b"])),
    ]


def test_a_source_is_not_asked_about_files_that_are_here(tmp_path: Path) -> None:
    class Asked(CachedSource):
        def can_read_ranges(self, file: RemoteFile) -> bool:
            assert file.path == "b"
            return True

    source = Asked(CONTENT)
    (tmp_path / "blob").write_bytes(CONTENT["a"])
    source.copies = {"a": tmp_path / "blob"}
    (tmp_path / "store").mkdir()
    fetch(source, tmp_path / "store")
    assert found(tmp_path / "store") == CONTENT


def test_a_link_in_place_of_a_partial_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(bytes(len(CONTENT["a"])))
    directory = tmp_path / "store"
    directory.mkdir()
    (directory / "a.part").symlink_to(tmp_path / "precious")
    fetch(ScriptedSource(CONTENT), directory)
    assert found(directory) == CONTENT
    assert (tmp_path / "precious").read_bytes() == bytes(len(CONTENT["a"]))
