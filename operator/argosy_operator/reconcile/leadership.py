"""Whether this operator may write: the state of its lease, and the fence in front of its writes.

Owns until when the lease counts as held. Must not know how a lease is taken (`process.leader_election`). Invariants: no
write leaves the process after that time, even if the process was stopped in between, because each write looks at the
clock first; a write under way at that time is given up, so that it cannot land after another operator's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from argosy_operator.cluster.api_server import Api, ObjectList
from argosy_operator.errors import ApiError
from argosy_operator.kinds import Kind, Object

_NEVER: Final = float("-inf")


class Leadership:
    """The lease as this process knows it, on the clock of the event loop."""

    def __init__(self) -> None:
        self._until = _NEVER
        self._changed = asyncio.Event()
        self._writes: set[asyncio.Timeout] = set()
        """The deadlines of the writes under way."""

    @property
    def is_held(self) -> bool:
        """Whether writes are allowed now."""
        return asyncio.get_running_loop().time() < self._until

    def extend(self, until: float) -> None:
        """Hold the lease until this time of the event loop's clock."""
        was_held, self._until = self.is_held, until
        self._reschedule(until)
        if not was_held:
            self._changed.set()

    def drop(self) -> None:
        """Stop writing at once; writes under way are given up."""
        self._until = _NEVER
        self._reschedule(asyncio.get_running_loop().time())
        self._changed.set()

    async def wait_until_held(self) -> None:
        """Return once writes are allowed."""
        while not self.is_held:
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_lost(self) -> None:
        """Return once writes are not allowed any more."""
        while self.is_held:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._until):
                    await self._changed.wait()

    @contextlib.asynccontextmanager
    async def write(self, action: str) -> AsyncIterator[None]:
        """Run the body while the lease is held, renewals included.

        Raises:
            ApiError: the lease is not held, or was lost before the body ended, which is then cancelled.
        """
        if not self.is_held:
            raise ApiError(action, 0, "this operator does not hold the lease")
        try:
            async with asyncio.timeout_at(self._until) as deadline:
                self._writes.add(deadline)
                try:
                    yield
                finally:
                    self._writes.discard(deadline)
        except TimeoutError:
            raise ApiError(action, 0, "this operator has lost the lease meanwhile") from None

    def _reschedule(self, until: float) -> None:
        for deadline in self._writes:
            if not deadline.expired():
                deadline.reschedule(until)


class FencedApi:
    """`Api` whose writes raise `ApiError` while the lease is not held, and once it is lost. Reads are free."""

    def __init__(self, api: Api, leadership: Leadership) -> None:
        self._api = api
        self._leadership = leadership

    async def serves(self, kind: Kind) -> bool:
        return await self._api.serves(kind)

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        return await self._api.list(kind, namespace=namespace, labels=labels)

    def list_pages(
        self, kind: Kind, *, namespace: str | None, limit: int
    ) -> AsyncGenerator[ObjectList, None]:
        return self._api.list_pages(kind, namespace=namespace, limit=limit)

    def watch(
        self, kind: Kind, *, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        return self._api.watch(kind, namespace=namespace, version=version)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return await self._api.get(kind, namespace, name)

    async def has_namespace(self, name: str) -> bool | None:
        return await self._api.has_namespace(name)

    async def read_metadata(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return await self._api.read_metadata(kind, namespace, name)

    async def create_only(self, manifest: Object) -> Object:
        async with self._leadership.write(f"create a {manifest['kind']}"):
            return await self._api.create_only(manifest)

    async def replace(self, manifest: Object) -> Object:
        async with self._leadership.write(f"replace a {manifest['kind']}"):
            return await self._api.replace(manifest)

    async def apply(self, manifest: Object) -> Object:
        async with self._leadership.write(f"apply a {manifest['kind']}"):
            return await self._api.apply(manifest)

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, strategic: bool
    ) -> Object:
        async with self._leadership.write(f"patch a {kind.name}"):
            return await self._api.patch_status(kind, namespace, name, patch, strategic=strategic)

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Object) -> Object:
        async with self._leadership.write(f"patch a {kind.name}"):
            return await self._api.patch(kind, namespace, name, patch)

    async def patch_by_steps(self, kind: Kind, namespace: str, name: str, steps: Sequence[Object]) -> Object:
        async with self._leadership.write(f"patch a {kind.name}"):
            return await self._api.patch_by_steps(kind, namespace, name, steps)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        async with self._leadership.write(f"delete a {kind.name}"):
            await self._api.delete(kind, namespace, name, uid=uid)
