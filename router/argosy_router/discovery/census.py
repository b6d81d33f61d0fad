"""Addresses without a fleet document: each replica is asked which model it serves; equal models form one service.

Owns: asking replicas for their model until they answer. Must not know: where the addresses come from, requests, health.
Invariant: a replica appears once its model is known, and leaves when it is no longer kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from argosy_engine.protocol.fleet import FleetDocument, FleetService, encode_fleet
from argosy_router.discovery.base import Publish, revision_of
from argosy_router.fleet import FleetSnapshot
from argosy_router.http.client import ClientLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.errors import UpstreamError
from argosy_router.http.fetch import fetch
from argosy_router.http.pool import ConnectionPool
from argosy_router.http.tls import ClientTls
from argosy_router.replica import Member

log = logging.getLogger(__name__)

RETRY_S = 0.5
TIMEOUT_S = 5.0


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


class Census:
    """The replicas at a changing set of addresses. `namespace` is the services'; `key` the replicas' bearer key."""

    def __init__(self, namespace: str, key: str, wheel: TimerWheel, tls: ClientTls, publish: Publish) -> None:
        self._namespace = namespace
        self._key = key
        self._wheel = wheel
        self._tls = tls
        self._publish_snapshot = publish
        self._members: tuple[Member, ...] = ()
        self._models: dict[Member, tuple[str, ...]] = {}
        self._tasks: dict[Member, asyncio.Task[None]] = {}

    def keep(self, members: Iterable[Member]) -> None:
        """From now on these and no others."""
        self._members = tuple(members)
        for gone in self._tasks.keys() - set(self._members):
            self._tasks.pop(gone).cancel()
            self._models.pop(gone, None)
        for member in self._members:
            if member not in self._tasks:
                self._tasks[member] = asyncio.create_task(self._ask(member), name=f"models {member.name}")
        self._publish()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _ask(self, member: Member) -> None:
        pool = ConnectionPool(member.url, ClientLimits(), self._wheel, self._tls, member.hostname)
        while True:
            try:
                response = await fetch(pool, "/v1/models", self._key, TIMEOUT_S)
                names = tuple(card.id for card in msgspec.json.decode(response.body, type=_Models).data)
            except (UpstreamError, msgspec.MsgspecError) as error:
                log.debug("replica %s does not tell its models yet: %s", member.url, error)
                names = ()
            if names:
                self._models[member] = names
                self._publish()
                return
            await asyncio.sleep(RETRY_S)

    def _publish(self) -> None:
        """The first name a replica lists is its canonical one, the others are aliases."""
        services: dict[str, list[Member]] = {}
        aliases: dict[str, dict[str, None]] = {}
        for member in self._members:
            if member in self._models:
                model, *others = self._models[member]
                services.setdefault(model, []).append(member)
                aliases.setdefault(model, {}).update(dict.fromkeys(others))
        document = FleetDocument(
            services=tuple(
                FleetService(
                    namespace=self._namespace,
                    name=model,
                    uid=self._namespace,
                    model=model,
                    aliases=tuple(aliases[model]),
                    internal_key=self._key,
                )
                for model in services
            )
        )
        members = {service.key: tuple(services[service.model]) for service in document.services}
        self._publish_snapshot(FleetSnapshot(document, revision_of(encode_fleet(document)), members))
