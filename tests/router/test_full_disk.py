"""A storage on a full disk: what clients are told, and that nothing is stored in part."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from openai import InternalServerError

from argosy_batch import directory_store

from .batch_rig import DEADLINE_S, lines, official, results, start_batch, stored
from .fake_engine import FakeEngine
from .harness import until


class Disk:
    """Has room for some bytes, and writes a part of what does not fit, as file systems do."""

    def __init__(self) -> None:
        self.free = 1 << 30
        self.refused = 0

    def write(self, descriptor: int, data: bytes) -> None:
        fitting = data[: self.free]
        os.write(descriptor, fitting)
        self.free -= len(fitting)
        if len(fitting) < len(data):
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(directory_store, "write_to", disk.write)
    return disk


@pytest.mark.parametrize("free", [0, 100, 300_000])
async def test_an_upload_is_refused_whole(tmp_path: Path, disk: Disk, free: int) -> None:
    content = lines("a") + b" " * 1_000_000
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        disk.free = free
        with pytest.raises(InternalServerError) as full:
            await client.files.create(file=("input.jsonl", content), purpose="batch")
        assert full.value.status_code == 507
        assert (full.value.code, full.value.type) == ("storage_full", "service_unavailable")
        assert "is full" in full.value.message
        assert not (await client.files.list()).data
        left = [path for path in (tmp_path / "storage").rglob("*") if path.is_file() and path.stat().st_size]
        assert not left, "neither a part nor a record"
        disk.free = 1 << 30
        file = await client.files.create(file=("input.jsonl", content), purpose="batch")
        assert (await client.files.content(file.id)).content == content


async def test_a_batch_whose_results_do_not_fit_ends_once_there_is_room(tmp_path: Path, disk: Disk) -> None:
    async with stored(tmp_path, [FakeEngine()], {"lease_s": 1.5}) as r, official(r) as client:
        batch = await start_batch(client, lines("a", "b"))
        disk.free = 0
        await until(lambda: disk.refused > 3, DEADLINE_S)
        with pytest.raises(InternalServerError) as full:
            await client.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert full.value.status_code == 507
        assert (await client.batches.retrieve(batch.id)).status in ("validating", "in_progress", "finalizing")
        disk.free = 1 << 30
        async with asyncio.timeout(DEADLINE_S):
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sorted(await results(client, batch.output_file_id)) == ["a", "b"]


async def test_files_can_be_deleted_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        file = await client.files.create(file=("input.jsonl", lines("a")), purpose="batch")
        disk.free = 0
        assert (await client.files.content(file.id)).content == lines("a")
        assert (await client.files.delete(file.id)).deleted
        assert not (await client.files.list()).data
