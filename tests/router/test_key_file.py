"""The API key file: reread when it changes, and closed while it holds no key."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from argosy_router.auth.key_file import ApiKeys

from .harness import until


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
