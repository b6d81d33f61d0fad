"""Transfer: brings the content of files from a source into a directory, several parts at once.

Owns the division into parts, their order, and what happens to content that is wrong. Must not know which files belong
to a model, or where the store keeps it.
Invariants: a file has its final name only if it is complete and matched its digest; whatever stops a transfer, the next
one continues with the parts that were finished; the bytes reported to `Progress` add up to the files' sizes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from argosy_fetcher.disk import FreeSpace, disk_errors, format_bytes, require_space
from argosy_fetcher.errors import HashMismatch, ModelTooLarge
from argosy_fetcher.partial_file import PartialFile
from argosy_fetcher.progress import Progress
from argosy_fetcher.range_reader import mismatch_message, read_range
from argosy_fetcher.retry import Attempts, Cancelled, Outage, RetryPolicy
from argosy_fetcher.snapshot import RemoteFile
from argosy_fetcher.sources.source import Source
from argosy_fetcher.task_queue import Task, TaskQueue

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


def transfer(
    source: Source,
    targets: Mapping[Path, RemoteFile],
    directory: Path,
    *,
    progress: Progress,
    settings: TransferSettings,
    known: Mapping[str, bytes],
    extra_bytes: int = 0,
    cancelled: threading.Event | None = None,
) -> None:
    """Fetch files to their targets. Targets that exist with the right size are taken for complete.

    A source may have a method `local_copy(file) -> Path | None`, which names a file on this machine that should have
    the same content; and a method `can_read_ranges(file) -> bool`, which may make a request: if it returns False, the
    file is one part.

    Args:
        directory: holds the targets, and nothing that others write.
        known: content of files that the caller has read and checked already, by path in the snapshot.
        extra_bytes: room that the caller will need in addition.
        cancelled: ends the transfer when it is set. What has arrived is kept.

    Raises:
        Cancelled: the event was set.
        HashMismatch: a file's content was wrong twice.
        NoSpace: the disk has no room. What has arrived is kept.
        ModelTooLarge: the files are larger than `settings` allow. Nothing is fetched.
        FetchError: from the source, or the directory cannot be written.
        TransientError: nothing came from the source for too long.
    """
    with disk_errors(source.name, directory):
        _Transfer(source, targets, directory, progress, settings, known, cancelled).run(extra_bytes)


class _Transfer:
    def __init__(
        self,
        source: Source,
        targets: Mapping[Path, RemoteFile],
        directory: Path,
        progress: Progress,
        settings: TransferSettings,
        known: Mapping[str, bytes],
        cancelled: threading.Event | None,
    ) -> None:
        self._source = source
        self._directory = directory
        self._progress = progress
        self._settings = settings
        self._known = known
        self._queue = TaskQueue(cancelled)
        self._outage = Outage()
        self._files = [PartialFile(file, path, self._part_bytes(file)) for path, file in targets.items()]
        self._wrong: set[Path] = set()
        """Files whose content, fetched from its first to its last byte by this process, was wrong once."""

    def _part_bytes(self, file: RemoteFile) -> int:
        part_bytes = self._settings.part_bytes
        can_read_ranges = getattr(self._source, "can_read_ranges", None)
        if file.size <= part_bytes or can_read_ranges is None or self._local_copy(file) is not None:
            return part_bytes
        return part_bytes if can_read_ranges(file) else file.size

    def run(self, extra_bytes: int) -> None:
        total = sum(file.file.size for file in self._files)
        self._check_size(total + extra_bytes)
        present = needed = 0
        for file in self._files:
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
        local_copy = getattr(self._source, "local_copy", None)
        if local_copy is None or file.digest is None:  # nothing to check it against
            return None
        found: Path | None = local_copy(file)
        return found

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
