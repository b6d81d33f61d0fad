"""Model discovery for replicas without a fleet document: ask each for its models, and group equal models into services.

Owns: polling `/v1/models`, often while a replica does not answer, else rarely. Must not know: where the addresses come
from, requests, health.
Invariants: a replica is published once its model is known, and until its address is dropped; a replica that does not
answer keeps the model it reported last; the reason is logged when it changes; what many replicas tell within
`GATHER_S` is published once, because each time all of them are grouped and compared.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from argosy_protocol.fleet import FleetDocument, FleetService, ModelName, encode_fleet
from argosy_router.backoff import backoff_s
from argosy_router.config import UpstreamLimits
from argosy_router.discovery.source import Publish, revision_of
from argosy_router.fleet.fleet import FleetSnapshot
from argosy_router.fleet.replica import Member
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.fetch import fetch
from argosy_router.http.pool import ConnectionPool
from argosy_router.http.tls import UpstreamTls
from argosy_router.http.upstream_errors import UpstreamError

log = logging.getLogger(__name__)

MIN_RETRY_S = 0.25
MAX_RETRY_S = 1.0
"""Between questions to a replica that does not answer: one that has become reachable is published a second later at
most, and a thousand dead addresses cost some 1300 connects per second."""
RECHECK_S = 10.0
"""An engine may restart at its address with another model, and may load adapters at run time."""
TIMEOUT_S = 5.0
GATHER_S = 0.05
"""Shortest time between two publications of what replicas have told."""
MAX_SPELLINGS = 8192
"""Of a service: each of its names goes with each of its adapters. A replica may list anything, and all names are
resolved in the event loop: ten thousand of both would take all memory."""


class _Card(msgspec.Struct):
    id: ModelName
    parent: ModelName | None = None
    """The model that this one is an adapter of (vLLM's field)."""


class _Models(msgspec.Struct):
    data: list[_Card]


class _Served(NamedTuple):
    """The names that one replica serves."""

    names: tuple[str, ...]
    """Names of its model, the canonical one first."""
    adapters: tuple[str, ...]


class ModelDiscovery:
    """Discovers the models of replicas at a changing set of addresses.

    `namespace` is given to the services; `key` is the replicas' bearer key.
    """

    def __init__(
        self, namespace: str, key: str, wheel: TimerWheel, tls: UpstreamTls, publish: Publish
    ) -> None:
        self._namespace = namespace
        self._key = key
        self._wheel = wheel
        self._tls = tls
        self._publish_snapshot = publish
        self._members: tuple[Member, ...] = ()
        self._num_awaited = 0
        self._served: dict[Member, _Served] = {}
        self._asked: set[Member] = set()
        """Those whose first question has ended, well or not."""
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._overfull: set[str] = set()
        """Models whose replicas have too many names together, as was logged."""
        self._rng = random.Random()  # noqa: S311
        self._published = -math.inf
        """When, by the event loop's clock."""
        self._next: asyncio.TimerHandle | None = None

    def set_members(self, members: Iterable[Member], awaited: int = 0) -> None:
        """Replace the set of replicas to ask.

        Args:
            awaited: sources of more members that have told none yet. Each counts as one that was not asked.
        """
        self._members = tuple(members)
        self._num_awaited = awaited
        for gone in self._tasks.keys() - set(self._members):
            self._tasks.pop(gone).cancel()
            self._served.pop(gone, None)
            self._asked.discard(gone)
        for member in self._members:
            if member not in self._tasks:
                self._tasks[member] = asyncio.create_task(self._ask(member), name=f"models {member.name}")
        self._publish()

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _ask(self, member: Member) -> None:
        pool = ConnectionPool(member.url, UpstreamLimits(), self._wheel, self._tls, member.hostname)
        reported, failures = "", 0
        while True:
            served: _Served | None = None
            try:
                response = await fetch(pool, "/v1/models", self._key, TIMEOUT_S)
                problem = _refusal(response.status)
                if not problem:
                    served = _served(msgspec.json.decode(response.body, type=_Models).data)
                    problem = "its list is empty" if served is None else _excess(served)
                    served = None if problem else served
            except (UpstreamError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                problem = str(error)
            if problem and problem != reported:
                log.warning("the models of replica %s cannot be read: %s", member.url, problem)
            elif reported and served is not None:
                log.info("replica %s serves %s", member.url, served.names[0])
            reported = problem
            failures = failures + 1 if problem else 0
            is_news = member not in self._asked
            self._asked.add(member)
            if served is not None and served != self._served.get(member):
                self._served[member] = served
                is_news = True
            if is_news:
                self._publish_soon()
            await asyncio.sleep(retry_pause_s(failures, self._rng) if problem else RECHECK_S)

    def _publish_soon(self) -> None:
        """Publish now, or with what other replicas tell soon."""
        if self._next is None:
            loop = asyncio.get_running_loop()
            due = self._published + GATHER_S
            if due <= loop.time():
                self._publish()
            else:
                self._next = loop.call_at(due, self._publish)

    def _publish(self) -> None:
        """Publish one service per model, with the aliases and adapters of all its replicas together; each member lists
        its own."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._published = asyncio.get_running_loop().time()
        members: dict[str, list[Member]] = {}
        aliases: dict[str, dict[str, None]] = {}
        adapters: dict[str, dict[str, None]] = {}
        overfull: set[str] = set()
        for member in self._members:
            served = self._served.get(member)
            if served is not None:
                model, *others = served.names
                members.setdefault(model, []).append(
                    member._replace(adapters=served.adapters, aliases=tuple(others))
                )
                known, tuned = aliases.setdefault(model, {}), adapters.setdefault(model, {})
                new = [name for name in others if name not in known]
                new_tuned = [name for name in served.adapters if name not in tuned]
                names = 1 + len(known) + len(new)
                if _num_spellings(names, len(tuned) + len(new_tuned)) <= MAX_SPELLINGS:
                    known.update(dict.fromkeys(new))
                    tuned.update(dict.fromkeys(new_tuned))
                else:
                    overfull.add(model)
        for model in overfull - self._overfull:
            log.error("the replicas of %r have too many names together, of which some are left out", model)
        self._overfull = overfull
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
        by_key = {service.qualified_name: tuple(members[service.model]) for service in document.services}
        unheard = self._num_awaited + sum(member not in self._served for member in self._members)
        revision = revision_of(encode_fleet(document))
        unasked = self._num_awaited + len(self._members) - len(self._asked)
        self._publish_snapshot(FleetSnapshot(document, revision, by_key, unheard=unheard, unasked=unasked))


def retry_pause_s(failures: int, rng: random.Random) -> float:
    """Return the pause after a number of failures in a row, at least one."""
    return backoff_s(failures - 1, MIN_RETRY_S, MAX_RETRY_S, rng)


def _refusal(status: int) -> str:
    """Explain why a response of this status has no list of models; empty if it should have one."""
    if status in (401, 403):
        return f"status {status}; pass the replica's key by --replica-key"
    return "" if status == 200 else f"status {status}"


def _num_spellings(names: int, adapters: int) -> int:
    """How many names a service has whose replicas list so many, and so many adapters."""
    return (1 + names) * (1 + adapters)


def _excess(served: _Served) -> str:
    """Explain why a list is not used; empty if it has no more names than a service may have."""
    if _num_spellings(len(served.names), len(served.adapters)) <= MAX_SPELLINGS:
        return ""
    return f"it has {len(served.names)} models and {len(served.adapters)} adapters, which are too many"


def _served(cards: list[_Card]) -> _Served | None:
    """Split the list into model names and adapters; None if it has no model."""
    names = tuple(card.id for card in cards if card.parent is None)
    return _Served(names, tuple(card.id for card in cards if card.parent is not None)) if names else None
