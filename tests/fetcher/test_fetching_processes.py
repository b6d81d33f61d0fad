"""Processes that fetch one model: killed at any moment, and two at once."""

from __future__ import annotations

import random
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

import fetching_process
from argosy_fetcher.model_fetch import fetch_model
from argosy_fetcher.store import Store
from argosy_fetcher.transfer import TransferSettings
from scripted_source import COMMIT, ScriptedSource

MODEL = fetching_process.model()
TOTAL = sum(map(len, MODEL.values()))
CHUNK_BYTES = fetching_process.CHUNK_BYTES
NUM_CHUNKS = sum(-(-len(content) // CHUNK_BYTES) for content in MODEL.values())


def let(process: subprocess.Popen[bytes], num_chunks: int) -> int:
    """Release chunks and wait until the process has taken them, or has ended. Returns how many it took."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(bytes(num_chunks))
    taken = 0
    while taken < num_chunks and process.stdout.read(1):
        taken += 1
    return taken


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def assert_complete(store: Store) -> None:
    model = store.find("hf://acme/tiny", COMMIT)
    assert model is not None
    found = {path.name: path.read_bytes() for path in model.path.iterdir() if path.name[:7] != ".argosy"}
    assert found == MODEL


@pytest.mark.parametrize("tenth", range(10))
def test_a_killed_fetch_leaves_nothing_to_load_and_is_continued(tmp_path: Path, tenth: int) -> None:
    store = Store(tmp_path / "store")
    process = fetching_process.start(store.root, tmp_path / "log")
    num_chunks = NUM_CHUNKS * tenth // 10
    assert let(process, num_chunks) == num_chunks
    kill(process)
    assert store.find("hf://acme/tiny", "main") is None
    assert store.find("hf://acme/tiny", COMMIT) is None
    assert store.list() == ()

    source = ScriptedSource(MODEL)
    fetch_model(source, store, settings=TransferSettings(part_bytes=fetching_process.PART_BYTES))
    assert_complete(store)
    taken = num_chunks * CHUNK_BYTES - (NUM_CHUNKS * CHUNK_BYTES - TOTAL)  # at least: last chunks are small
    under_way = 8 * fetching_process.PART_BYTES  # a part of each thread
    read_first = len(MODEL["config.json"]) + len(MODEL["model.safetensors.index.json"])
    assert source.num_bytes <= TOTAL - taken + under_way + read_first


def test_a_fetch_that_is_killed_again_and_again_gets_done(tmp_path: Path) -> None:
    rng = random.Random(0)
    store = Store(tmp_path / "store")
    for _ in range(12):
        process = fetching_process.start(store.root, tmp_path / "log")
        let(process, rng.randrange(10, 40))
        kill(process)
        if store.list():
            assert_complete(store)
    process = fetching_process.start(store.root, tmp_path / "log")
    process.communicate()
    assert process.returncode == 0
    assert_complete(store)
    assert store.list_partial() == ()


def test_a_fetch_that_is_killed_after_its_last_byte_is_complete_or_absent(tmp_path: Path) -> None:
    for number in range(5):
        store = Store(tmp_path / f"store-{number}")
        process = fetching_process.start(store.root, tmp_path / "log")
        let(process, NUM_CHUNKS)
        kill(process)  # somewhere between the digest of the last file and the end
        if store.list():
            assert_complete(store)
        fetch_model(ScriptedSource(MODEL), store)
        assert_complete(store)


def test_two_processes_fetch_a_model_once(tmp_path: Path) -> None:
    store, log = Store(tmp_path / "store"), tmp_path / "log"
    first = fetching_process.start(store.root, log)
    assert let(first, 5) == 5
    second = fetching_process.start(store.root, log)
    assert second.stdout is not None
    assert second.stdout.read(1) == b"w"
    for process in (first, second):
        process.communicate()
        assert process.returncode == 0
    assert_complete(store)
    requests = [line.split() for line in log.read_text().splitlines()]
    assert sum(int(stop) - int(start) for _, start, stop in requests) == TOTAL


def test_a_second_process_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    store, log = Store(tmp_path / "store"), tmp_path / "log"
    first = fetching_process.start(store.root, log)
    assert let(first, NUM_CHUNKS // 2) == NUM_CHUNKS // 2
    second = fetching_process.start(store.root, log)
    assert second.stdout is not None
    assert second.stdout.read(1) == b"w"
    kill(first)
    second.communicate()
    assert second.returncode == 0
    assert_complete(store)
