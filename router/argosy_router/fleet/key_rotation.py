"""Rotation of the fleet key: new keys reach services and admin port, and each replica is moved to the newest.

Owns: when the mounted Secret is looked at, and when replicas are asked. Must not know: requests, telemetry.
Invariants: a replica is sent a newer key once it has accepted that one here, and not before; at rest, with every
replica on the newest key, no replica is asked anything.
"""

# Not compiled: runs once a second.

from __future__ import annotations

import asyncio
import logging

from argosy_protocol.batch_program import batch_keys
from argosy_protocol.bearer_keys import KeyRing, internal_key
from argosy_protocol.fleet_keys import LOOK_EVERY_S, FleetKeys
from argosy_protocol.routable_report import ADMIN_KEY_UID
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.http.fetch import fetch
from argosy_router.http.upstream_errors import UpstreamError

log = logging.getLogger(__name__)

PROBE_PATH = "/v1/models"
"""Every engine that has a key asks for it here, and answers without a computation."""
TIMEOUT_S = 5.0
AT_ONCE = 16
"""Replicas that are asked at the same time."""
EAGER_ROUNDS = 600
"""Rounds after a change in which each replica is asked; the new key comes with the next sync of its kubelet."""
SLOW_ROUNDS = 30
"""After these, replicas are asked once in so many rounds: vLLM and SGLang keep their key until they are replaced."""


class KeyRotation:
    """Follows the fleet keys of one router."""

    def __init__(
        self,
        keys: FleetKeys,
        fleet: Fleet,
        admin: KeyRing,
        batch: KeyRing,
        *,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`admin` are the keys of the admin port, `batch` those of `argosy batch`."""
        self._keys = keys
        self._fleet = fleet
        self._admin = admin
        self._batch = batch
        self._look_every_s = look_every_s
        self._round = 0

    async def run(self) -> None:
        """Follow the keys until cancelled. A replica that hangs delays no look at the keys."""
        probe: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._look_every_s)
                if self._look() and (probe is None or probe.done()):
                    probe = tasks.create_task(self._probe())

    async def step(self) -> None:
        """Look at the files once, and ask the replicas that do not get the newest key yet."""
        if self._look():
            await self._probe()

    def _look(self) -> bool:
        """Look at the files, and return whether replicas are to be asked in this round."""
        self._round += 1
        if self._keys.look():
            self._round = 0
            self._fleet.fleet_keys_changed()
            self._admin.replace(internal_key(key, ADMIN_KEY_UID) for key in self._keys.keys)
            self._batch.replace(batch_keys(self._keys.keys))
        return self._round < EAGER_ROUNDS or self._round % SLOW_ROUNDS == 0

    async def _probe(self) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def ask(replica: Replica) -> None:
            async with gate:
                await _try_newest(replica)

        behind = [
            replica
            for replica in self._fleet.replicas()
            if not replica.key.is_newest and replica.link != "connecting"
        ]
        if behind:
            await asyncio.gather(*(ask(replica) for replica in behind))


async def _try_newest(replica: Replica) -> None:
    """Have the replica sent the newest key from now on, if it accepts that."""
    newest = replica.key.newest
    if not newest:
        return
    try:
        response = await fetch(replica.pool, PROBE_PATH, newest, TIMEOUT_S)
    except UpstreamError:
        return
    if response.status == 200 and replica.key.newest == newest:
        replica.key.current = newest
        log.info("replica %s accepts the new key", replica.name)
