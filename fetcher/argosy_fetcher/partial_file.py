"""Partial file: one file of a model while its parts arrive.

Owns `NAME.part` with its journal, and the digest, which follows the parts in order while later ones still arrive.
Invariant: a file has its final name only if all its bytes were written, matched its digest, and are on disk.
Must not know sources, retries or progress.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from argosy_fetcher.digests import Hasher, hash_range, new_hasher
from argosy_fetcher.part_journal import PartJournal
from argosy_fetcher.snapshot import RemoteFile

_COPY_BYTES: Final = 1 << 22


class PartialFile:
    """Methods may be called by several threads unless they say otherwise.

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
