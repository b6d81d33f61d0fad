"""Leader election: of several operators, the one that holds a Lease writes (coordination.k8s.io, KEP-589).

Owns the Lease and its times, until when it counts as held, and the fence in front of writes. Must not know what the
leader does with it. Invariants: two operators never hold the lease at once, because a holder stops RENEW_DEADLINE after
the start of its last renewal, and another one takes the lease over LEASE_DURATION after it last saw a renewal; no
clocks are compared, since each process measures on its own; no write leaves the process after that time, even if the
process was stopped in between, because each write looks at the clock first; a write under way at that time is given up,
so that it cannot land after another operator's; losing the lease ends nothing, because an operator without it goes on
watching and asks for it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, cast

from argosy_operator.cluster.api import Api, ApiError
from argosy_operator.names import FIELD_MANAGER, LEASES, MANAGED_BY_LABEL, NAME_LABEL, Kind, Object

logger = logging.getLogger(__name__)

LEASE_DURATION: Final = 12.0
"""Seconds without a renewal after which another operator takes over. With two retries this stays below 20 s."""
RENEW_DEADLINE: Final = 8.0
"""Seconds after the start of the last renewal for which the holder writes. The rest is for requests under way."""
RETRY: Final = 2.0
"""Seconds between two attempts, of the holder to renew and of the others to take over; up to a fifth more."""
_REQUEST_DEADLINE: Final = 3.0
"""Seconds for one attempt, so that one that hangs leaves time for another."""
_LABELS: Final = {NAME_LABEL: "argosy", MANAGED_BY_LABEL: FIELD_MANAGER}
_NEVER: Final = float("-inf")
_READS: Final = ("serves", "list", "list_pages", "watch", "get", "has_namespace", "read_metadata")
"""Methods of `Api` that change nothing."""


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

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)
        return method if name in _READS else partial(self._write, name, method)

    async def _write(
        self, name: str, method: Callable[..., Awaitable[Any]], *args: Any, **options: Any
    ) -> Any:
        kind = args[0].name if isinstance(args[0], Kind) else args[0]["kind"]
        async with self._leadership.write(f"{name.partition('_')[0]} a {kind}"):
            return await method(*args, **options)


def fenced(api: Api, leadership: Leadership) -> Api:
    """The API server for an operator that writes while it holds the lease (`FencedApi`)."""
    return cast(Api, FencedApi(api, leadership))


class LeaderElection:
    """Takes the Lease `namespace/name`, and renews it, as `identity`. Processes that run at the same time need
    different identities; a process that takes the place of a dead one may use the same, and need not wait."""

    def __init__(
        self,
        api: Api,
        leadership: Leadership,
        *,
        namespace: str,
        name: str,
        identity: str,
        annotations: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`annotations` are written into the Lease with each renewal."""
        self._api = api
        self._leadership = leadership
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._annotations = annotations
        self._seen: Any = None
        """The renewal of another holder that was seen last."""
        self._seen_at = 0.0

    async def run(self) -> None:
        """Take part until cancelled."""
        while True:
            was_held = self._leadership.is_held
            try:
                async with asyncio.timeout(_REQUEST_DEADLINE):
                    await self._attempt()
            except (ApiError, TimeoutError) as error:
                logger.warning("lease %s: %s", self._name, str(error) or "no answer in time")
            if self._leadership.is_held != was_held:
                logger.info("%s the lease %s", "lost" if was_held else "took", self._name)
            await asyncio.sleep(RETRY * random.uniform(1.0, 1.2))  # noqa: S311 - jitter

    async def release(self) -> None:
        """Give the lease up, so that another operator takes it at its next attempt. Call it when nothing writes any
        more, and `run` has ended."""
        if not self._leadership.is_held:
            return
        self._leadership.drop()
        try:
            async with asyncio.timeout(_REQUEST_DEADLINE):
                live = await self._api.get(LEASES, self._namespace, self._name)
                if live is not None and live.get("spec", {}).get("holderIdentity") == self._identity:
                    await self._api.replace(self._manifest("", live))
        except (ApiError, TimeoutError) as error:
            logger.warning("lease %s was not given up: %s", self._name, str(error) or "no answer in time")

    async def _attempt(self) -> None:
        """Take the lease or renew it; drop it if somebody else has it."""
        started = asyncio.get_running_loop().time()
        live = await self._api.get(LEASES, self._namespace, self._name)
        if live is not None and self._is_held_by_another(live, started):
            self._leadership.drop()
            return
        try:
            if live is None:
                await self._api.create_only(self._manifest(self._identity, None))
            else:
                await self._api.replace(self._manifest(self._identity, live))
        except ApiError as error:
            if error.status != 409:
                raise
            return  # somebody else was faster; the next attempt sees who
        self._leadership.extend(started + RENEW_DEADLINE)

    def _is_held_by_another(self, live: Object, now: float) -> bool:
        spec = live.get("spec", {})
        if spec.get("holderIdentity", "") in ("", self._identity):
            return False
        renewal = (spec["holderIdentity"], spec.get("renewTime"), live["metadata"].get("resourceVersion"))
        if renewal != self._seen:
            self._seen, self._seen_at = renewal, now
        return now < self._seen_at + float(spec.get("leaseDurationSeconds") or LEASE_DURATION)

    def _manifest(self, holder: str, live: Object | None) -> Object:
        """The Lease with a new holder, or renewed; with the version of `live`, so that of two writers one fails."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = (live or {}).get("spec", {})
        is_renewal = before.get("holderIdentity") == holder
        metadata = live["metadata"] if live is not None else {"labels": _LABELS}
        if told := self._annotations():
            metadata = {**metadata, "annotations": {**(metadata.get("annotations") or {}), **told}}
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.name,
            "metadata": {**metadata, "name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": int(LEASE_DURATION),
                "acquireTime": before.get("acquireTime", now) if is_renewal else now,
                "renewTime": now,
                "leaseTransitions": before.get("leaseTransitions", 0) + (live is not None and not is_renewal),
            },
        }
