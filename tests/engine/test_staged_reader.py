"""A staged reader whose threads cannot all be started."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from argosy_engine.checkpoint.streamed_weights import Piece, StagedReader


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weight reader")]


def test_no_thread_stays_if_one_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_started = threading.Thread.start, 0

    def start_two(thread: threading.Thread) -> None:
        nonlocal num_started
        if num_started == 2:
            raise RuntimeError("can't start new thread")
        num_started += 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    path = tmp_path / "weights"
    path.write_bytes(bytes(64))
    with path.open("rb") as file:
        pieces = [Piece(file.fileno(), range(place, place + 8)) for place in range(0, 64, 8)]
        reader = StagedReader(pieces, [torch.zeros(8, dtype=torch.uint8)], num_threads=4)
        with pytest.raises(RuntimeError, match="can't start new thread"), reader:
            pytest.fail("it was entered")
        assert num_started == 2
        assert not readers()
