"""Posts Kubernetes Events about services, as `kubectl describe` and `kubectl events` show them.

Owns the rate of events and the counting of equal ones. Must not know what is worth an event (`status.events`).
Invariants: an event never fails or delays a reconcile by more than one request; equal events are one object that
counts; a service that flaps posts at most EVENT_BURST events, and one per EVENT_REFILL_SECONDS after that (as
client-go's spam filter does); what is normal, such as scaling with a load that comes and goes, leaves EVENT_RESERVE of
them to warnings.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import xxhash
from msgspec import Struct

from argosy_operator.cluster.api_server import Api
from argosy_operator.errors import ApiError
from argosy_operator.names import FIELD_MANAGER
from argosy_operator.reconcile.allowance import Allowance
from argosy_operator.reconcile.concurrent_steps import run_together
from argosy_operator.status.events import Event
from argosy_resource.types import API_VERSION, KIND, ObjectMeta

logger = logging.getLogger(__name__)

EVENT_BURST: Final = 25
"""Events that a service may post at once."""
EVENT_RESERVE: Final = 5
EVENT_REFILL_SECONDS: Final = 300.0
"""Seconds until a service may post one more."""
MAX_REMEMBERED: Final = 4096
"""Number of events whose count is kept, and of services whose rate is; the least recent are forgotten."""
MAX_MESSAGE: Final = 1024
"""Characters that the API server accepts."""


class _Posted(Struct):
    count: int
    first: str


class EventRecorder:
    """Posts events about objects of one kind, services unless another one is named."""

    def __init__(
        self, api: Api, *, now: Callable[[], str], api_version: str = API_VERSION, kind: str = KIND
    ) -> None:
        self._api = api
        self._now = now
        self._api_version = api_version
        self._kind = kind
        self._posted: OrderedDict[str, _Posted] = OrderedDict()
        self._allowances: OrderedDict[str, Allowance] = OrderedDict()

    async def post(self, service: ObjectMeta, events: Iterable[Event]) -> None:
        """Post the events that the service's rate allows; an event that cannot be posted is logged and dropped."""
        allowed = []
        for event in events:
            if self._is_allowed(service.uid, reserve=0 if event.type == "Warning" else EVENT_RESERVE):
                allowed.append(event)
            else:
                logger.info("%s: too many events; dropped: %s", service.key, event.reason)
        await run_together(partial(self._post, service, event) for event in allowed)

    async def _post(self, service: ObjectMeta, event: Event) -> None:
        try:
            await self._api.apply(self._manifest(service, event))
        except ApiError as error:
            level = logging.INFO if error.is_namespace_ending else logging.WARNING
            logger.log(level, "%s: event %s was not posted: %s", service.key, event.reason, error)

    def _is_allowed(self, uid: str, reserve: int) -> bool:
        now = asyncio.get_running_loop().time()
        allowance = self._allowances.setdefault(uid, Allowance(EVENT_BURST, EVENT_REFILL_SECONDS, now))
        _keep_newest(self._allowances, uid)
        if allowance.wait(now, reserve) > 0:
            return False
        allowance.take()
        return True

    def _manifest(self, metadata: ObjectMeta, event: Event) -> dict[str, Any]:
        now = self._now()
        identity = "\0".join((metadata.uid, event.type, event.reason, event.message))
        name = f"{metadata.name}.{xxhash.xxh3_64_hexdigest(identity.encode())}"
        posted = self._posted.setdefault(f"{metadata.namespace}/{name}", _Posted(0, now))
        _keep_newest(self._posted, f"{metadata.namespace}/{name}")
        posted.count += 1
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata.namespace},
            "involvedObject": {
                "apiVersion": self._api_version,
                "kind": self._kind,
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:MAX_MESSAGE],
            "count": posted.count,
            "firstTimestamp": posted.first,
            "lastTimestamp": now,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
        }


def _keep_newest(held: OrderedDict[str, Any], key: str) -> None:
    held.move_to_end(key)
    while len(held) > MAX_REMEMBERED:
        held.popitem(last=False)
