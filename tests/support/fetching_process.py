"""Fetches a model in a process of its own, whose every chunk the test that runs it releases.

    python fetching_process.py STORE LOG

A chunk waits for a byte on standard input, and is reported by a dot on standard output; after the end of the input none
waits. A wait for another process is reported by a `w`. Each request is a line of LOG: path, start, stop.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.progress import Progress
from argosy_fetcher.source import Chunk, RemoteFile
from argosy_fetcher.store import Store
from argosy_fetcher.transfer import TransferSettings
from model_files import served_files
from scripted_source import ScriptedSource

PART_BYTES = 500
CHUNK_BYTES = 100


def model() -> dict[str, bytes]:
    return served_files(num_shards=3, shard_bytes=3000)


def start(store: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a process that fetches `model` into a store."""
    support, package = Path(__file__).parent, Path(sys.modules["argosy_fetcher"].__path__[0]).parent
    return subprocess.Popen(
        [sys.executable, __file__, str(store), str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (support, package)))},
    )


class _LockStepSource(ScriptedSource):
    def __init__(self, log: Path) -> None:
        super().__init__(model(), chunk_bytes=CHUNK_BYTES)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[Chunk]:
        os.write(self._log, f"{file.path} {start} {stop}\n".encode())
        for chunk in super().read(file, start, stop):
            os.read(0, 1)
            os.write(1, b".")
            yield chunk


class _NotedWaits(Progress):
    def note(self, text: str) -> None:
        if "waiting" in text:
            os.write(1, b"w")


def main() -> None:
    store, log = map(Path, sys.argv[1:])
    fetch_model(
        _LockStepSource(log),
        Store(store),
        progress=_NotedWaits(),
        settings=TransferSettings(part_bytes=PART_BYTES),
    )


if __name__ == "__main__":
    main()
