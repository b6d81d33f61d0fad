"""Header fetch: a model's directory with the headers of its weights only, for programs that compute a model's size.

Owns which bytes are read: configs and the index in full, and of each safetensors file its header. The rest of such a
file is a hole, so its size is right and it takes no room. Must not know what the headers are used for, or the store.
Invariants: no byte of a weight is requested beyond the first `FIRST_BYTES` of a file; what a hostile source can make
of the directory is bounded, in files, in their sizes and in the bytes that are stored.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from argosy_fetcher.disk import disk_errors
from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.model_fetch import checked_snapshot
from argosy_fetcher.range_reader import read_range, read_whole
from argosy_fetcher.retry import Attempts, Outage, RetryPolicy, retrying
from argosy_fetcher.selection import MAX_SMALL_FILE_BYTES, CheckConfig, select
from argosy_fetcher.snapshot import RemoteFile, Snapshot
from argosy_fetcher.sources.source import Source
from argosy_fetcher.task_queue import TaskQueue

FIRST_BYTES: Final = 64 << 10
"""Read of each file at first: most headers fit, and more than one request costs more time than these bytes."""
MAX_HEADER_BYTES: Final = 100 << 20
"""The limit that the format defines."""
MAX_WEIGHT_FILES: Final = 2000
"""Several times the shards of the largest models."""
MAX_WEIGHT_BYTES: Final = 16 << 40
"""Of all files together: what one file may have on common file systems, even if it is a hole."""
MAX_STORED_BYTES: Final = 256 << 20
"""Of all headers together. Those of a model with 100,000 tensors have 15 MB."""
_MAX_READS_IN_FLIGHT: Final = 8
_CONFIGS: Final = ("config.json", "generation_config.json", "model.safetensors.index.json", "modules.json")


def fetch_headers(
    source: Source,
    directory: Path,
    *,
    check_config: CheckConfig | None = None,
    note: Callable[[str], None] = lambda text: None,
    retry: RetryPolicy | None = None,
) -> Snapshot:
    """Fill an empty directory, and return what the source holds.

    Args:
        check_config: raises if a config.json is of a model that the caller does not serve.
        note: takes a line about something that takes time.

    Raises:
        UnsupportedModel: the model is not served, a header is malformed, the model is in an archive, or there are more
            files or bytes than any model has.
        FetchError: from the source, or the directory cannot be written.
        TransientError: nothing came from the source for too long.
    """
    reader = _HeaderReader(source, retry or RetryPolicy(), note)
    snapshot = checked_snapshot(retrying(reader.attempts(source.name), source.snapshot), source.name)
    if any(file.packing != "none" for file in snapshot.files):
        raise UnsupportedModel(
            f"{source.name} is an archive, whose headers cannot be read apart; "
            f"`argosy models pull {source.name}` fetches all of it"
        )
    contents: dict[str, bytes] = {}

    def read_small(file: RemoteFile) -> bytes:
        if file.path not in contents:
            contents[file.path] = reader.read_small(file)
        return contents[file.path]

    files = select(snapshot, read_small, check_config)
    weights = [file for file in files if file.path.endswith(".safetensors")]
    _check_bounds(source.name, weights)
    with disk_errors(source.name, directory):
        for file in files:
            if file.path in _CONFIGS or "/" in file.path:  # only a small file is in a folder
                (directory / file.path).parent.mkdir(exist_ok=True)
                (directory / file.path).write_bytes(read_small(file))
        reader.queue.add(partial(reader.store_header, file, directory / file.path) for file in weights)
        reader.queue.run(_MAX_READS_IN_FLIGHT)
    return snapshot


def _check_bounds(source: str, weights: Sequence[RemoteFile]) -> None:
    size = sum(file.size for file in weights)
    if len(weights) > MAX_WEIGHT_FILES:
        raise UnsupportedModel(
            f"{source}: the weights are in {len(weights)} files; headers of at most {MAX_WEIGHT_FILES} are read"
        )
    if size > MAX_WEIGHT_BYTES:
        raise UnsupportedModel(
            f"{source}: the weights have {size} bytes; headers are read of at most {MAX_WEIGHT_BYTES}"
        )


class _HeaderReader:
    """Reads of one source, ended together."""

    def __init__(self, source: Source, retry: RetryPolicy, note: Callable[[str], None]) -> None:
        self.queue = TaskQueue()
        self._source = source
        self._retry = retry
        self._note = note
        self._outage = Outage()
        self._lock = threading.Lock()
        self._num_stored_bytes = 0

    def attempts(self, what: str) -> Attempts:
        return Attempts(what, self._retry, self._note, self.queue.cancelled, self._outage)

    def read_small(self, file: RemoteFile) -> bytes:
        attempts = self.attempts(f"{self._source.name}: {file.path}")
        return read_whole(self._source, file, MAX_SMALL_FILE_BYTES, attempts)

    def store_header(self, file: RemoteFile, path: Path) -> None:
        """Write a file's header, with a hole behind it."""
        header = self._read_header(file)
        if self.queue.cancelled.is_set():
            return
        with path.open("xb") as opened:
            opened.write(header)
            opened.truncate(file.size)

    def _read_header(self, file: RemoteFile) -> bytes:
        """Return the bytes of a file up to the end of its header."""
        first = self._read(file, 0, min(FIRST_BYTES, file.size))
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > MAX_HEADER_BYTES or 8 + length > file.size:
            raise UnsupportedModel(
                f"{self._source.name}: {file.path} is not a safetensors file; use another revision"
            )
        stop = 8 + length
        self._reserve(stop)
        return first[:stop] if stop <= len(first) else first + self._read(file, len(first), stop)

    def _reserve(self, num_bytes: int) -> None:
        """Count bytes that will be stored, before they are read."""
        with self._lock:
            self._num_stored_bytes += num_bytes
            if self._num_stored_bytes > MAX_STORED_BYTES:
                raise UnsupportedModel(
                    f"{self._source.name}: the headers of the weights have more than {MAX_STORED_BYTES} bytes together"
                )

    def _read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        attempts = self.attempts(f"{self._source.name}: {file.path}")
        return b"".join(bytes(view) for view in read_range(self._source, file, start, stop, attempts))
