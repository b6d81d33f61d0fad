"""A router with one key."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from .fake_engine import FakeEngine
from .harness import Rig, rig
from .queueing import is_settled


@contextlib.asynccontextmanager
async def keyed(
    tmp_path: Path, line: str, engines: list[FakeEngine] | None = None, **config: Any
) -> AsyncIterator[Rig]:
    """A router with one key, which the client sends."""
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-client").hexdigest()
    path.write_text(f"sha256:{digest} name=client {line}\n")
    async with rig(engines or [FakeEngine()], api_keys_file=path, **config) as r:
        r.http.headers["authorization"] = "Bearer sk-client"
        yield r
        await r.until(lambda: is_settled(r))


def stop_clock(r: Rig) -> None:
    """Nothing is refilled from now on."""
    now = r.router.requests.now()
    r.router.requests.shared.now = lambda: now
