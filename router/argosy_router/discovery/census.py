"""Addresses without a fleet document: each replica is asked which model it serves; equal models form one service.

Owns: asking replicas for their model, until they answer and now and then. Must not know: where the addresses come from,
requests, health.
Invariants: a replica appears once its model is known, and leaves when it is no longer kept; one that does not answer
keeps the model it told last; why it does not is logged when the reason changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from argosy_protocol.fleet import FleetDocument, FleetService, ModelName, encode_fleet
from argosy_router.config import ClientLimits
from argosy_router.discovery.base import Publish, revision_of
from argosy_router.fleet.fleet import FleetSnapshot
from argosy_router.fleet.replica import Member
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.errors import UpstreamError
from argosy_router.http.fetch import fetch
from argosy_router.http.pool import ConnectionPool
from argosy_router.http.tls import ClientTls

log = logging.getLogger(__name__)

RETRY_S = 0.5
RECHECK_S = 10.0
"""An engine may come back at its address with another model, and loads adapters as it runs."""
TIMEOUT_S = 5.0


class _Card(msgspec.Struct):
    id: ModelName
    parent: ModelName | None = None
    """vLLM's: the model this one is an adapter of."""


class _Models(msgspec.Struct):
    data: list[_Card]


class _Served(NamedTuple):
    """What one replica serves."""

    names: tuple[str, ...]
    """Of its model; the first is the canonical one."""
    adapters: tuple[str, ...]


class Census:
    """The replicas at a changing set of addresses. `namespace` is the services'; `key` the replicas' bearer key."""

    def __init__(self, namespace: str, key: str, wheel: TimerWheel, tls: ClientTls, publish: Publish) -> None:
        self._namespace = namespace
        self._key = key
        self._wheel = wheel
        self._tls = tls
        self._publish_snapshot = publish
        self._members: tuple[Member, ...] = ()
        self._served: dict[Member, _Served] = {}
        self._tasks: dict[Member, asyncio.Task[None]] = {}

    def keep(self, members: Iterable[Member]) -> None:
        """From now on these and no others."""
        self._members = tuple(members)
        for gone in self._tasks.keys() - set(self._members):
            self._tasks.pop(gone).cancel()
            self._served.pop(gone, None)
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
        was_told = ""
        while True:
            served: _Served | None = None
            try:
                response = await fetch(pool, "/v1/models", self._key, TIMEOUT_S)
                problem = _refusal(response.status)
                if not problem:
                    served = _served(msgspec.json.decode(response.body, type=_Models).data)
                    problem = "" if served is not None else "its list is empty"
            except (UpstreamError, msgspec.MsgspecError, RecursionError) as error:
                problem = str(error)
            if problem and problem != was_told:
                log.warning("replica %s does not tell its models: %s", member.url, problem)
            elif was_told and served is not None:
                log.info("replica %s serves %s", member.url, served.names[0])
            was_told = problem
            if served is not None and served != self._served.get(member):
                self._served[member] = served
                self._publish()
            await asyncio.sleep(RECHECK_S if member in self._served else RETRY_S)

    def _publish(self) -> None:
        """One service per model, with the names and adapters of all its replicas, each of which says what it has."""
        members: dict[str, list[Member]] = {}
        aliases: dict[str, dict[str, None]] = {}
        adapters: dict[str, dict[str, None]] = {}
        for member in self._members:
            served = self._served.get(member)
            if served is not None:
                model, *others = served.names
                members.setdefault(model, []).append(
                    member._replace(adapters=served.adapters, aliases=tuple(others))
                )
                aliases.setdefault(model, {}).update(dict.fromkeys(others))
                adapters.setdefault(model, {}).update(dict.fromkeys(served.adapters))
        document = FleetDocument(
            services=tuple(
                FleetService(
                    namespace=self._namespace,
                    name=model,
                    uid=self._namespace,
                    model=model,
                    aliases=tuple(aliases[model]),
                    adapters=tuple(adapters[model]),
                    internal_key=self._key,
                )
                for model in members
            )
        )
        by_key = {service.key: tuple(members[service.model]) for service in document.services}
        self._publish_snapshot(FleetSnapshot(document, revision_of(encode_fleet(document)), by_key))


def _refusal(status: int) -> str:
    """Why an answer of this status has no list of models; empty if it should have one."""
    if status in (401, 403):
        return f"status {status}; pass the replica's key by --replica-key"
    return "" if status == 200 else f"status {status}"


def _served(cards: list[_Card]) -> _Served | None:
    """None for a list without a model."""
    names = tuple(card.id for card in cards if card.parent is None)
    return _Served(names, tuple(card.id for card in cards if card.parent is not None)) if names else None
