"""Heartbeats of routers that generate responses in the background, so that others notice when one has died.

Owns: the heartbeats in the storage, and what was seen of them. Must not know: responses.
Invariant: a router counts as gone only if its heartbeat did not change for `GONE_S` by this process's clock, in looks
that all succeeded and were at most `MAX_GAP_S` apart. So the storage has worked meanwhile, and clocks need not agree.

    work/ROUTER_ID.json     changes every `batch_program.BEAT_S` while the router generates; the
                            sweep removes it at the end of the id
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from argosy_batch.storage.blob_store import AlreadyExists, Changed
from argosy_batch.storage.object_store import ObjectStore
from argosy_protocol import object_ids
from argosy_protocol.errors import StorageUnavailable

MAX_GAP_S: Final = 30.0
"""Clients poll more often."""
GONE_S: Final = 60.0
ID_PREFIX: Final = "router-"
TTL_S: Final = 7 * 86400.0
"""Of one id; a router takes another one after a day, and no run takes so long as the rest."""
_MAX_SEEN: Final = 1024


class _Seen(NamedTuple):
    version: str
    since: float
    """When it was seen first."""
    last: float


class RunHeartbeats:
    """The heartbeats that one process writes for routers, and reads. Times are a monotonic clock's."""

    def __init__(self, storage: ObjectStore, now: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._now = now
        self._own: dict[str, tuple[str, float]] = {}
        """Of each heartbeat that this process has written of late, its version and when it was written."""
        self._num_beats = 0
        self._writer = secrets.token_hex(8).encode()
        """Some storages tell versions by their content: no other process may write the same."""
        self._writing = asyncio.Lock()
        self._seen: dict[str, _Seen] = {}
        """Of others; longest ago seen first."""

    async def begin(self) -> str:
        """Return the id of a new heartbeat, which was written just now."""
        async with self._writing:
            runner = self._storage.new_id(ID_PREFIX, TTL_S)
            await self._write(runner)
            return runner

    async def beat(self, runners: Iterable[str]) -> None:
        """Write heartbeats again."""
        async with self._writing:
            for runner in runners:
                if object_ids.is_id(runner) and runner.startswith(ID_PREFIX):
                    await self._write(runner)
            now = self._now()
            self._own = {runner: own for runner, own in self._own.items() if now - own[1] < GONE_S}

    async def _write(self, runner: str) -> None:
        self._num_beats += 1
        data = b'{"beats":%d,"writer":"%b"}' % (self._num_beats, self._writer)
        blobs, key = self._storage.blobs, _key(runner)
        for _ in range(3):  # what was written last may be another process's, which is noticed in two attempts
            try:
                if runner in self._own:
                    version = await blobs.replace(key, data, self._own[runner][0])
                else:
                    version = await blobs.create(key, data)
            except AlreadyExists:  # a write before this one failed, but was made
                found = await blobs.get(key)
                if found is not None:
                    self._own[runner] = found.version, self._now()
            except Changed:
                del self._own[runner]
            else:
                self._own[runner] = version, self._now()
                return
        raise StorageUnavailable

    async def is_gone(self, runner: str) -> bool:
        """Look whether a router is gone. The first look is never enough."""
        own = self._own.get(runner)
        if (own is not None and self._now() - own[1] < GONE_S) or not object_ids.is_id(runner):
            return False
        try:
            blob = await self._storage.blobs.get(_key(runner))
        except StorageUnavailable:
            self._seen.pop(runner, None)
            raise
        now, version = self._now(), "" if blob is None else blob.version
        seen = self._seen.pop(runner, None)
        if seen is None or seen.version != version or now - seen.last > MAX_GAP_S:
            seen = _Seen(version, now, now)
        if len(self._seen) >= _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[runner] = seen._replace(last=now)
        return now - seen.since >= GONE_S


def _key(runner: str) -> str:
    return f"work/{runner}.json"
