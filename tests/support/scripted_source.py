"""A source in memory that does what a script says: it cuts, fails, and serves other content than it announced."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from argosy_fetcher.source import Algorithm, Chunk, Digest, Packing, RemoteFile, Snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True)
class Read:
    """One call of `read`."""

    number: int
    path: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stop:
    """How a read ends before its time."""

    after: int = 0
    """Bytes that it yields first."""
    error: Exception | None = None
    """What it raises then; without one, it just ends."""


def digest_of(content: bytes, algorithm: Algorithm) -> Digest:
    if algorithm == "git-sha1":
        return Digest("git-sha1", hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())
    return Digest(algorithm, hashlib.new(algorithm, content).hexdigest())


def no_stop(read: Read) -> Stop | None:
    return None


class ScriptedSource:
    """
    Args:
        algorithm: of the announced digests; None if there are none.
        packing: of files that are archives.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        name: str = "hf://acme/tiny",
        revision: str = COMMIT,
        requested_revision: str = "main",
        algorithm: Algorithm | None = "sha256",
        packing: Mapping[str, Packing] | None = None,
        chunk_bytes: int = 64,
    ) -> None:
        self.name = name
        self.revision = revision
        self.requested_revision = requested_revision
        self.content = dict(files)
        """What reads yield. Changing it makes a source that serves other content than it announced."""
        self.files = tuple(
            RemoteFile(
                path,
                len(content),
                None if algorithm is None else digest_of(content, algorithm),
                version="v1",
                packing=(packing or {}).get(path, "none"),
            )
            for path, content in files.items()
        )
        self.chunk_bytes = chunk_bytes
        self.reads: list[Read] = []
        self.num_bytes = 0
        self.num_snapshots = 0
        self.on_read: Callable[[Read], Stop | None] = no_stop
        self.snapshot_failures: list[Exception] = []
        self._lock = threading.Lock()

    def snapshot(self) -> Snapshot:
        self.num_snapshots += 1
        if self.snapshot_failures:
            raise self.snapshot_failures.pop(0)
        return Snapshot(self.name, self.revision, self.files)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        with self._lock:
            read = Read(len(self.reads), file.path, start, stop)
            self.reads.append(read)
            script = self.on_read(read)
        end = stop if script is None else min(stop, start + script.after)
        content = memoryview(self.content[file.path])
        for position in range(start, end, self.chunk_bytes):
            chunk = content[position : min(position + self.chunk_bytes, end)]
            with self._lock:
                self.num_bytes += len(chunk)
            yield chunk
        if script is not None and script.error is not None:
            raise script.error

    def close(self) -> None: ...

    def paths_read(self) -> set[str]:
        return {read.path for read in self.reads}
