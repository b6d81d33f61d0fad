"""Transfer: brings the content of files from a source into a directory, several parts at once.

Owns the division into parts, their order, the partial files (`NAME.part` with a journal), and what happens to content
that is wrong. Must not know which files belong to a model, or where the store keeps it.
Invariants: a file has its final name only if all its bytes were written, matched its digest, and are on disk; whatever
stops a transfer, the next one continues with the parts that were finished; the bytes reported to `Progress` add up to
the files' sizes.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from argosy_fetcher.disk import FreeSpace, disk_errors, format_bytes, require_space
from argosy_fetcher.errors import HashMismatch, ModelTooLarge
from argosy_fetcher.progress import Progress
from argosy_fetcher.retry import Attempts, Cancelled, Outage, RetryPolicy, mismatch_message, read_range
from argosy_fetcher.source import Hasher, RemoteFile, Source, hash_range, new_hasher

Task: TypeAlias = Callable[[], None]
_STOP_S: Final = 5.0
"""How long the end of a fetch waits for threads that are in the middle of a task."""


class TaskQueue:
    """Runs tasks in a few threads until none is left, and stops all of them at the first error.

    Tasks may add tasks. Threads are daemons: one that waits for a dead server does not keep a program from ending. A
    task that goes on after the stop must not change anything, which is why tasks check the `cancelled` event before
    they write.

    Args:
        cancelled: stops the queue when it is set, as soon as a task notices.
    """

    def __init__(self, cancelled: threading.Event | None = None) -> None:
        self.cancelled = cancelled or threading.Event()
        """Set at the first error, and when the queue ends for another reason than that its tasks are done."""
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._num_running = 0
        self._error: BaseException | None = None

    def add(self, tasks: Iterable[Task]) -> None:
        """Add tasks, which run in this order."""
        with self._changed:
            self._tasks.extend(tasks)
            self._changed.notify_all()

    def add_first(self, tasks: Iterable[Task]) -> None:
        """Add tasks that run, in this order, before those that wait."""
        with self._changed:
            self._tasks.extendleft(reversed(list(tasks)))
            self._changed.notify_all()

    def run(self, num_threads: int) -> None:
        """Run all tasks.

        Raises:
            Cancelled: the queue was stopped from outside.
            Exception: the first error of a task.
        """
        threads = [
            threading.Thread(target=self._work, daemon=True, name=f"fetch-{number}")
            for number in range(num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            with self._changed:
                self._changed.wait_for(lambda: self._is_over)
        finally:
            with self._changed:
                if self._tasks or self._num_running:
                    self.cancelled.set()
                    self._tasks.clear()
                self._changed.notify_all()
            deadline = time.monotonic() + _STOP_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        if self.cancelled.is_set():
            raise Cancelled

    @property
    def _is_over(self) -> bool:
        return self.cancelled.is_set() or not (self._tasks or self._num_running)

    def _work(self) -> None:
        while (task := self._take()) is not None:
            error: BaseException | None = None
            try:
                task()
            except Cancelled:
                pass
            except BaseException as raised:
                error = raised
            with self._changed:
                self._num_running -= 1
                if error is not None and self._error is None and not self.cancelled.is_set():
                    self._error = error
                if error is not None:
                    self.cancelled.set()
                if self._is_over:
                    self._changed.notify_all()

    def _take(self) -> Task | None:
        """Return the next task; None if all are done or the queue was cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._tasks) or self._is_over)
            if self.cancelled.is_set() or not self._tasks:
                return None
            self._num_running += 1
            return self._tasks.popleft()


_MAX_HEADER_BYTES: Final = 512
_MAX_LINE_BYTES: Final = 12
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class JournalHeader(msgspec.Struct, frozen=True):
    """First line. A journal with another header says nothing about this file."""

    size: int
    part_bytes: int
    boot: str
    """Id of the machine's boot in which the parts were written; empty if that does not matter."""


def boot_id() -> str | None:
    """Return what identifies the time since the machine started, or None where the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()[:64] or None
    except OSError:
        return None


class PartJournal:
    """The journal of one file: which of its parts are on disk.

    A part is noted after its last byte was written, with one append, so the journal tells the truth however the process
    ends. A crash of the machine may lose bytes that the journal counts: content with a digest is checked in the end,
    and parts of a file without one count only within the same boot.

    Args:
        has_digest: whether the file's content will be checked.
    """

    def __init__(self, path: Path, *, size: int, part_bytes: int, has_digest: bool) -> None:
        boot = "" if has_digest else boot_id()
        self._path = path
        self._num_parts = -(-size // part_bytes)
        self._is_lasting = boot is not None
        self._lock = threading.Lock()
        self._header = JournalHeader(size, part_bytes, boot or "")

    def load(self) -> set[int]:
        """Return the finished parts; empty if there is no journal, or none of this file."""
        if not self._is_lasting:
            return set()
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_HEADER_BYTES + _MAX_LINE_BYTES * (2 * self._num_parts + 1))
        except FileNotFoundError:
            return set()
        try:
            header, *lines, torn = text.split(b"\n")
            if msgspec.json.decode(header, type=JournalHeader) != self._header:
                return set()
            parts = {int(line) for line in lines}
        except (msgspec.MsgspecError, ValueError):
            return set()
        if not all(0 <= part < self._num_parts for part in parts):
            return set()
        if torn:  # the next line must not continue it
            os.truncate(self._path, len(text) - len(torn))
        return parts

    def start(self) -> None:
        """Begin an empty journal."""
        self._path.write_bytes(msgspec.json.encode(self._header) + b"\n")

    def add(self, part: int) -> None:
        """Note a part whose bytes were written. Called by several threads.

        Raises:
            OSError: the disk is full or fails. The journal is then as it was.
        """
        line = b"%d\n" % part
        with self._lock, self._path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            if file.write(line) < len(line):
                file.truncate(start)  # or the next line would continue this one, and be another number
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def delete(self) -> None:
        self._path.unlink(missing_ok=True)


_COPY_BYTES: Final = 1 << 22


class PartialFile:
    """One file of a model while its parts arrive. The digest follows the parts in order while later ones still arrive.

    Methods may be called by several threads unless they say otherwise.

    Args:
        path: final name.
        part_bytes: size of a part. The last one is smaller.
    """

    def __init__(self, file: RemoteFile, path: Path, part_bytes: int) -> None:
        self.file = file
        self.path = path
        self.was_resumed = False
        """Whether an earlier process wrote some of the parts."""
        self._part_bytes = part_bytes
        self._num_parts = -(-file.size // part_bytes)
        self._part_path = path.with_name(f"{path.name}.part")
        self._local_path = path.with_name(f"{path.name}.local")
        self._journal = PartJournal(
            path.with_name(f"{path.name}.journal"),
            size=file.size,
            part_bytes=part_bytes,
            has_digest=file.digest is not None,
        )
        self._lock = threading.Lock()
        self._finished: set[int] = set()
        self._hasher: Hasher | None = None
        self._num_hashed = 0
        self._is_hashing = False
        self._reset()

    @property
    def is_complete(self) -> bool:
        return _regular_size(self.path) == self.file.size

    @property
    def num_present_bytes(self) -> int:
        """Bytes of finished parts."""
        return sum(stop - start for start, stop in map(self.bounds, self._finished))

    def bounds(self, part: int) -> tuple[int, int]:
        """Return where a part starts and stops in the file."""
        start = part * self._part_bytes
        return start, min(start + self._part_bytes, self.file.size)

    def resume(self) -> None:
        """Continue with the parts that an earlier attempt has finished. Called before any part is written."""
        parts = self._journal.load() if _regular_size(self._part_path) == self.file.size else set()
        if parts:
            self._reset()
            self._finished = parts
            self.was_resumed = True
        else:
            self.restart()

    def restart(self) -> None:
        """Forget all parts. Called while no thread writes one."""
        self._journal.delete()
        self._part_path.unlink(missing_ok=True)
        descriptor = os.open(self._part_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(descriptor, self.file.size)
        finally:
            os.close(descriptor)
        self._journal.start()
        self._reset()

    def _reset(self) -> None:
        self._finished = set()
        self._hasher = None if self.file.digest is None else new_hasher(self.file.digest, self.file.size)
        self._num_hashed = 0
        self._is_hashing = False
        self.was_resumed = False

    def missing_parts(self) -> list[int]:
        return [part for part in range(self._num_parts) if part not in self._finished]

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file for reading and writing parts."""
        descriptor = os.open(self._part_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def finish_part(self, part: int) -> bool:
        """Note a part whose bytes were all written; returns what `advance` returns."""
        self._journal.add(part)
        with self._lock:
            self._finished.add(part)
        return self.advance()

    def advance(self, on_progress: Callable[[], None] = lambda: None) -> bool:
        """Bring the digest up to the first missing part, unless another thread does that.

        Args:
            on_progress: called after each part.

        Returns:
            True for exactly one call, after the last part: `is_intact` and `commit` come next.
        """
        with self._lock:
            if self._is_hashing:
                return False
            self._is_hashing = True
        with self.opened() as descriptor:
            while True:
                with self._lock:
                    part = self._num_hashed
                    if part == self._num_parts:
                        return True  # and nobody else comes here, because the flag stays set
                    if part not in self._finished:
                        self._is_hashing = False
                        return False
                if self._hasher is not None:
                    hash_range(self._hasher, descriptor, *self.bounds(part))
                self._num_hashed = part + 1
                on_progress()

    def is_intact(self) -> bool:
        """Whether the content of all parts has the digest."""
        digest = self.file.digest
        return digest is None or self._hasher is None or self._hasher.hexdigest() == digest.hex

    def sync(self) -> None:
        """Force the content to disk.

        Raises:
            OSError: it may not be there, and another `fsync` need not notice. All parts count as missing after that.
        """
        with self.opened() as descriptor:
            try:
                os.fsync(descriptor)
            except OSError:
                self._journal.delete()
                raise

    def commit(self) -> None:
        """Give the file its final name."""
        self._part_path.replace(self.path)
        self._journal.delete()

    def adopt(self, local: Path, on_progress: Callable[[], None] = lambda: None) -> bool:
        """Take the content from another file of this machine, by a hard link if that is possible.

        Args:
            on_progress: called after each piece that was copied, of a part at most, each part that was hashed,
                and when all is on disk.

        Returns:
            Whether its content has the digest. If not, nothing has changed.
        """
        digest = self.file.digest
        self._local_path.unlink(missing_ok=True)
        if digest is None or not self._link_or_copy(local, on_progress):
            return False
        hasher = new_hasher(digest, self.file.size)
        descriptor = os.open(self._local_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for part in range(self._num_parts):
                hash_range(hasher, descriptor, *self.bounds(part))
                on_progress()
            os.fsync(descriptor)
            on_progress()
        finally:
            os.close(descriptor)
        if hasher.hexdigest() != digest.hex:
            self._local_path.unlink()
            return False
        self._local_path.replace(self.path)
        self._part_path.unlink(missing_ok=True)
        self._journal.delete()
        return True

    def _link_or_copy(self, local: Path, on_progress: Callable[[], None]) -> bool:
        """Return False if the other file cannot be read or has another size."""
        try:
            local = local.resolve(strict=True)
            found = local.stat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode) or found.st_size != self.file.size:
            return False
        if found.st_uid == os.geteuid():  # a file of another user could change after its digest was checked
            try:
                os.link(local, self._local_path)
                return True
            except OSError:
                pass  # another file system, or one without links
        try:
            readable = local.open("rb")
        except OSError:
            return False
        with readable, self._local_path.open("xb") as copy:
            while data := readable.read(min(_COPY_BYTES, self._part_bytes)):
                copy.write(data)
                on_progress()
        return _regular_size(self._local_path) == self.file.size


def _regular_size(path: Path) -> int | None:
    """Return the size of a regular file; None if there is none, or something else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


PART_BYTES: Final = 16 << 20
"""Large enough that a request's latency hardly counts, small enough that a kill loses seconds at most."""
MAX_PARTS_IN_FLIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class TransferSettings:
    part_bytes: int = PART_BYTES
    max_parts_in_flight: int = MAX_PARTS_IN_FLIGHT
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    make_room: Callable[[int], None] | None = None
    """Called with the bytes that must still be stored, before the disk's room is checked."""
    room_of: str = ""
    """Where `make_room` looks for models that may go, for messages."""
    min_free: FreeSpace = field(default_factory=FreeSpace)
    """What a fetch leaves of the disk."""
    max_bytes: int | None = None
    """Most that the model may have; None: no limit."""


class Transfer:
    """Fetches files to their targets. Targets that exist with the right size are taken for complete.

    A source may have a method `local_copy(file) -> Path | None`, which names a file on this machine that should have
    the same content; and a method `can_read_ranges(file) -> bool`, which may make a request: if it returns False, the
    file is one part.

    Args:
        directory: holds the targets, and nothing that others write.
        known: content of files that the caller has read and checked already, by path in the snapshot.
        local_copy: asked instead of the source's.
        cancelled: ends the transfer when it is set. What has arrived is kept.
    """

    def __init__(
        self,
        source: Source,
        targets: Mapping[Path, RemoteFile],
        directory: Path,
        *,
        progress: Progress,
        settings: TransferSettings,
        known: Mapping[str, bytes],
        local_copy: Callable[[RemoteFile], Path | None] | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._source = source
        self._targets = targets
        self._directory = directory
        self._progress = progress
        self._settings = settings
        self._known = known
        self._find_local = local_copy or getattr(source, "local_copy", None)
        self._queue = TaskQueue(cancelled)
        self._outage = Outage()
        self._wrong: set[Path] = set()
        """Files whose content, fetched from its first to its last byte by this process, was wrong once."""

    def run(self, extra_bytes: int = 0) -> None:
        """
        Args:
            extra_bytes: room that the caller will need in addition.

        Raises:
            Cancelled: the event was set.
            HashMismatch: a file's content was wrong twice.
            NoSpace: the disk has no room. What has arrived is kept.
            ModelTooLarge: the files are larger than `settings` allow. Nothing is fetched.
            FetchError: from the source, or the directory cannot be written.
            TransientError: nothing came from the source for too long.
        """
        with disk_errors(self._source.name, self._directory):
            self._run(extra_bytes)

    def _part_bytes(self, file: RemoteFile) -> int:
        part_bytes = self._settings.part_bytes
        can_read_ranges = getattr(self._source, "can_read_ranges", None)
        if file.size <= part_bytes or can_read_ranges is None or self._local_copy(file) is not None:
            return part_bytes
        return part_bytes if can_read_ranges(file) else file.size

    def _run(self, extra_bytes: int) -> None:
        files = [PartialFile(file, path, self._part_bytes(file)) for path, file in self._targets.items()]
        total = sum(file.file.size for file in files)
        self._check_size(total + extra_bytes)
        present = needed = 0
        for file in files:
            found, stored = self._plan(file)
            present += found
            needed += file.file.size - stored
        if self._settings.make_room is not None:
            self._settings.make_room(needed + extra_bytes)
        room_of = self._settings.room_of
        tried = f"{room_of} is all that this fetch may take models from, and those stay; " if room_of else ""
        require_space(
            self._directory, needed + extra_bytes, self._source.name, self._settings.min_free, tried
        )
        self._progress.begin(total, present)
        self._queue.run(self._settings.max_parts_in_flight)

    def _check_size(self, num_bytes: int) -> None:
        most = self._settings.max_bytes
        if most is not None and num_bytes > most:
            size, limit = format_bytes(num_bytes), format_bytes(most)
            raise ModelTooLarge(f"{self._source.name}: {size} must be stored, and at most {limit} may be")

    def _plan(self, file: PartialFile) -> tuple[int, int]:
        """Queue a file's tasks. Returns how much of it is on this machine, and how much takes no more room."""
        size = file.file.size
        if file.is_complete:
            return size, size
        file.resume()
        if (data := self._known.get(file.file.path)) is not None:
            self._queue.add([partial(self._store_known, file, data)])
            return 0, 0
        if (local := self._local_copy(file.file)) is not None:
            self._queue.add([partial(self._adopt, file, local)])
            return size, size if self._can_link(local) else 0
        self._queue.add(self._part_tasks(file))
        return file.num_present_bytes, file.num_present_bytes

    def _local_copy(self, file: RemoteFile) -> Path | None:
        if self._find_local is None or file.digest is None:  # nothing to check it against
            return None
        return self._find_local(file)

    def _can_link(self, local: Path) -> bool:
        try:
            return local.stat().st_dev == self._directory.stat().st_dev
        except OSError:
            return False

    def _part_tasks(self, file: PartialFile) -> list[Task]:
        tasks: list[Task] = [partial(self._fetch_part, file, part) for part in file.missing_parts()]
        if file.was_resumed or not tasks:
            tasks.insert(0, partial(self._advance, file))  # reads back what is there, while the rest arrives
        return tasks

    def _advance(self, file: PartialFile) -> None:
        if file.advance(lambda: self._progress.advance(0)):
            self._complete(file)

    def _fetch_part(self, file: PartialFile, part: int) -> None:
        start, stop = file.bounds(part)
        attempts = Attempts(
            f"{self._source.name}: {file.file.path}",
            self._settings.retry,
            self._progress.note,
            self._queue.cancelled,
            self._outage,
        )
        with file.opened() as descriptor:
            for view in read_range(self._source, file.file, start, stop, attempts):
                _write_at(descriptor, view, start)
                start += view.nbytes
                self._progress.advance(view.nbytes)
        self._check_cancelled()
        if file.finish_part(part):
            self._complete(file)

    def _store_known(self, file: PartialFile, data: bytes) -> None:
        file.restart()
        with file.opened() as descriptor:
            _write_at(descriptor, memoryview(data), 0)
        self._progress.advance(len(data))
        file.sync()
        file.commit()

    def _adopt(self, file: PartialFile, local: Path) -> None:
        if file.adopt(local, lambda: self._progress.advance(0)):
            return
        self._progress.note(f"{self._source.name}: {local} is not {file.file.path}; fetching it")
        self._progress.advance(file.num_present_bytes - file.file.size)
        self._queue.add_first(self._part_tasks(file))

    def _complete(self, file: PartialFile) -> None:
        """Give a file whose parts are all there its name, or fetch it again if its content is wrong."""
        if file.is_intact():
            file.sync()
            self._check_cancelled()
            file.commit()
            return
        is_last_time = not file.was_resumed and file.path in self._wrong
        if not file.was_resumed:
            self._wrong.add(file.path)
        file.restart()
        self._progress.advance(-file.file.size)
        if is_last_time:
            raise HashMismatch(mismatch_message(self._source.name, file.file))
        self._progress.note(
            f"{self._source.name}: the content of {file.file.path} is wrong; fetching it again"
        )
        self._queue.add_first(self._part_tasks(file))

    def _check_cancelled(self) -> None:
        if self._queue.cancelled.is_set():
            raise Cancelled


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        count = os.pwrite(descriptor, data, offset)
        data = data[count:]
        offset += count
