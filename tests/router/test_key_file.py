"""The API key file: reread when it changes, and closed while it holds no key."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from argosy_router.auth.api_keys import KEYS_PER_STEP, ApiKeys, KeyTable

from .fake_engine import FakeEngine
from .harness import DEADLINE_S, Rig, rig, until


async def test_key_files_are_reread_and_never_open_the_router(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# clients\nfirst\n\n")
    keys = ApiKeys((), path, poll_s=0.005)
    watch = asyncio.create_task(keys.watch())
    assert keys.table.account_of(b"Bearer first")
    path.write_text("second\n")
    await until(lambda: keys.table.account_of(b"Bearer second") is not None)
    assert not keys.table.account_of(b"Bearer first")
    path.unlink()
    await until(lambda: keys.table.account_of(b"Bearer second") is None)
    assert not keys.table.is_open, "no keys must not mean that no key is needed"
    assert keys.table.account_of(b"Bearer ") is None
    watch.cancel()


async def test_a_router_is_not_ready_before_it_has_read_its_key_file(tmp_path: Path) -> None:
    """It was, and refused its share of all clients beside routers that had the file."""
    path = tmp_path / "keys"
    key = {"authorization": "Bearer k"}
    async with rig([FakeEngine()], api_keys_file=path) as r:

        async def answers() -> tuple[int, int]:
            ready, models = await r.http.get("/ready"), await r.http.get("/v1/models", headers=key)
            return ready.status_code, models.status_code

        await r.until(lambda: r.router.fleet.is_initialized)
        assert await answers() == (503, 401)
        path.write_text("k\n")
        await r.until(lambda: r.router.application.is_ready)
        assert await answers() == (200, 200)
        path.unlink()
        await until_refused(r, key)
        assert await answers() == (200, 401), "the others have lost it as well, perhaps"


async def until_refused(r: Rig, key: dict[str, str]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await r.http.get("/v1/models", headers=key)).status_code != 401:
            pass


def test_a_line_that_is_no_utf8_denies_its_own_key_and_no_comment_has_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(
        b"\xef\xbb\xbffirst\r\n# Schl\xfcssel\nbad-\xfc name=bad\n# old\xe2\x80\xa8note\x0cpage\nsecond name=s\rthird\n"
    )
    keys = ApiKeys((), path)
    for key in (b"first", b"second", b"third"):
        assert keys.table.account_of(b"Bearer " + key), key
    for key in (b"bad-\xfc", b"note", b"page", b"note\x0cpage"):
        assert keys.table.account_of(b"Bearer " + key) is None, key
    assert ApiKeys((), None).problems_of(path) == ["line 3: the line is not in UTF-8"]


async def test_a_key_file_without_keys_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0
    real_open = Path.open

    def counted(path: Path, *arguments: Any, **named: Any) -> Any:
        nonlocal opened
        opened += 1
        return real_open(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", counted)
    path = tmp_path / "keys"
    keys = ApiKeys((), path, poll_s=0.001)
    watch = asyncio.create_task(keys.watch())
    await until(lambda: opened > 3)
    assert ["No such file" in message for message in caplog.messages] == [True]
    os.close(os.open(path, os.O_CREAT))
    seen = opened
    await until(lambda: opened > seen + 3)
    assert ["is empty" in message for message in caplog.messages] == [False, True]
    watch.cancel()


class CountedFile:
    """A file whose reads are counted."""

    num_reads = 0

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        number: int = self._file.fileno()
        return number

    def read(self, size: int) -> bytes:
        CountedFile.num_reads += 1
        data: bytes = self._file.read(size)
        return data


async def test_a_file_that_has_not_changed_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("first")
    os.utime(path, (1.0, 1.0))
    keys = ApiKeys((), path, poll_s=0.0)
    num_opens = 0
    real_open = Path.open

    def counted(path: Path, *arguments: Any, **named: Any) -> Any:
        nonlocal num_opens
        file = real_open(path, *arguments, **named)
        if arguments != ("rb",):
            return file
        num_opens += 1
        return CountedFile(file)

    monkeypatch.setattr(Path, "open", counted)
    watch = asyncio.create_task(keys.watch())
    await until(lambda: num_opens > 5)
    assert CountedFile.num_reads == 0
    path.write_text("other")  # of the same length, and perhaps within one tick of the file system's clock
    await until(lambda: keys.table.account_of(b"Bearer other") is not None)
    path.write_text("third")
    await until(lambda: keys.table.account_of(b"Bearer third") is not None)
    watch.cancel()


def test_many_keys_are_taken_in_steps_and_the_ones_before_are_accepted_until_the_last() -> None:
    table = KeyTable(is_closed=True)
    assert table.load("old", 0.0) == []
    num_keys = 20 * KEYS_PER_STEP
    problems: list[str] = []
    num_steps = 0
    for _ in table.load_in_steps("".join(f"sk-{number}\n" for number in range(num_keys)), 0.0, problems):
        num_steps += 1
        assert table.account_of(b"Bearer old") is not None
        assert table.account_of(b"Bearer sk-1") is None
        table.divide(3, 0.0)
    assert num_steps >= 2 * 20
    assert table.account_of(b"Bearer old") is None
    assert table.account_of(b"Bearer sk-1") is not None
    assert problems == []


def test_keys_are_awaited_until_the_last_of_them_is_accepted() -> None:
    """A router whose key file came late was ready while it read it, and answered everybody with 401."""
    table = KeyTable(is_closed=True)
    steps = table.load_in_steps("\n".join(f"sk-{number}" for number in range(1000)), 0.0, [])
    next(steps)
    assert table.is_awaited
    assert table.account_of(b"Bearer sk-0") is None
    for _ in steps:
        pass
    assert not table.is_awaited
    assert table.account_of(b"Bearer sk-0") is not None
