"""Leader election: of several operators, the one that holds a Lease writes (coordination.k8s.io, KEP-589).

Owns the Lease and its times. Must not know what the leader does with it. Invariants: two operators never hold the lease
at once, because a holder stops RENEW_DEADLINE after the start of its last renewal, and another one takes the lease over
LEASE_DURATION after it last saw a renewal; no clocks are compared, since each process measures on its own; losing the
lease ends nothing, because an operator without it goes on watching and asks for it again.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

from argosy_operator.cluster.api_server import Api
from argosy_operator.errors import ApiError
from argosy_operator.kinds import LEASES, Object
from argosy_operator.names import FIELD_MANAGER, MANAGED_BY_LABEL, NAME_LABEL
from argosy_operator.reconcile.leadership import Leadership

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
