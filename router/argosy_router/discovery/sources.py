"""The interface between a source of replicas and the fleet, and the sources that need no Kubernetes: a fleet document
on disk, fixed addresses (`--replica URL`), and the addresses of host names (`--replica-dns URL`).

Owns: noticing changes of the file, resolving names, and asking replicas without a fleet document for their models.
Must not know: who writes the file, requests, health.
Invariants: a replica is published once its model is known, and until its address is dropped; a replica that does not
answer keeps the model it reported last; the reason is logged when it changes; what many replicas tell within
`GATHER_S` is published once, because each time all of them are grouped and compared. A fixed address never leaves,
since the command line says that it exists. A failed or empty answer of DNS changes nothing; an address is dropped only
after `MISSES` consecutive answers without it, because a DNS server may return a subset. Health checks handle replicas
that die in the meantime.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
import xxhash

from argosy_protocol.fleet import FleetDocument, FleetService, ModelName, decode_fleet, encode_fleet
from argosy_router.config import UpstreamLimits
from argosy_router.fleet.fleet import FleetSnapshot
from argosy_router.fleet.replica import Member
from argosy_router.http.deadlines import TimerWheel, backoff_s
from argosy_router.http.upstream import ConnectionPool, UpstreamError, UpstreamTls, fetch, split_url

Publish = Callable[[FleetSnapshot], None]


class Discovery(Protocol):
    """A source of replicas."""

    async def run(self, publish: Publish) -> None:
        """Publish a snapshot whenever something has changed, until cancelled."""
        ...


def snapshot_of(document: FleetDocument, data: bytes) -> FleetSnapshot:
    """Build the snapshot of a document that lists its replicas itself; `data` is the document as read."""
    members = {
        service.qualified_name: tuple(
            Member(
                endpoint.name,
                "",
                endpoint.url,
                endpoint.draining,
                adapters=service.adapters,
                aliases=service.aliases,
                revision=endpoint.revision,
            )
            for endpoint in service.endpoints
        )
        for service in document.services
    }
    return FleetSnapshot(document, revision_of(data), members)


def revision_of(data: bytes) -> str:
    """The revision by which routers and the operator identify one state of the fleet document."""
    return xxhash.xxh3_64_hexdigest(data)


log = logging.getLogger(__name__)

POLL_S = 0.25

Stamp = tuple[int, int, int]


class FileDiscovery:
    """Follows one fleet document on disk, which its writer replaces atomically (local fleet).

    It polls the file with `stat` a few times a second instead of using inotify: a `stat` costs a microsecond, works on
    every file system, and follows renames, which is how the writer replaces the file.
    """

    def __init__(self, path: Path, poll_s: float = POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s

    async def run(self, publish: Publish) -> None:
        """Publish changes until cancelled. A missing or broken file leaves the last good document in force."""
        seen: Stamp | None = None
        while True:
            stamp = self._stamp()
            if stamp is not None and stamp != seen:
                seen = stamp
                self._read(publish)
            await asyncio.sleep(self._poll_s)

    def _stamp(self) -> Stamp | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self, publish: Publish) -> None:
        try:
            data = self._path.read_bytes()
            document = decode_fleet(data)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("fleet file %s is not usable, keeping the last one: %s", self._path, error)
        else:
            publish(snapshot_of(document, data))


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
            if served is None:
                continue
            model, *others = served.names
            own = member._replace(adapters=served.adapters, aliases=tuple(others))
            members.setdefault(model, []).append(own)
            known, tuned = aliases.setdefault(model, {}), adapters.setdefault(model, {})
            new = [name for name in others if name not in known]
            new_tuned = [name for name in served.adapters if name not in tuned]
            if _num_spellings(1 + len(known) + len(new), len(tuned) + len(new_tuned)) <= MAX_SPELLINGS:
                known.update(dict.fromkeys(new))
                tuned.update(dict.fromkeys(new_tuned))
            else:
                overfull.add(model)
        for model in overfull - self._overfull:
            log.error("the replicas of %r have too many names together, of which some are left out", model)
        self._overfull = overfull
        services = (
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
        document = FleetDocument(services=tuple(services))
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


class StaticDiscovery:
    """Replicas at fixed addresses.

    Raises:
        ValueError: a URL is not `http://HOST:PORT` or `https://HOST:PORT`.
    """

    def __init__(self, urls: Sequence[str], key: str, wheel: TimerWheel, tls: UpstreamTls) -> None:
        for url in urls:
            split_url(url)
        kept = dict.fromkeys(url.rstrip("/") for url in urls)
        self._members = [Member(urlsplit(url).netloc, "", url) for url in kept]
        self._key = key
        self._wheel = wheel
        self._tls = tls

    async def run(self, publish: Publish) -> None:
        """Discover the replicas' models and publish them until cancelled."""
        discovery = ModelDiscovery("static", self._key, self._wheel, self._tls, publish)
        discovery.set_members(self._members)
        try:
            await asyncio.Event().wait()
        finally:
            await discovery.close()


RESOLVE_S = 2.0
"""Seconds between lookups, and thus until a new replica is known. Caches of name servers may add their own: a headless
Service's records have a TTL of 5 s, and CoreDNS remembers for up to 30 s that a name does not exist."""
MISSES = 7
MAX_ADDRESSES = 1024
"""Per name."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and port to IPv4 or IPv6 addresses; raises OSError. It must time out by itself, as the C library does
after the timeouts of resolv.conf."""


class DnsDiscovery:
    """Follows the addresses of some host names, whose replicas share one bearer key.

    Raises:
        ValueError: a URL is not `http://HOST:PORT` or `https://HOST:PORT`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        key: str,
        wheel: TimerWheel,
        tls: UpstreamTls,
        *,
        resolve: Resolve | None = None,
        resolve_s: float = RESOLVE_S,
    ) -> None:
        self._names = [
            ResolvedName(*split_url(url)) for url in dict.fromkeys(url.rstrip("/") for url in urls)
        ]
        self._key = key
        self._wheel = wheel
        self._tls = tls
        self._resolve = resolve or system_resolver
        self._resolve_s = resolve_s

    async def run(self, publish: Publish) -> None:
        """Resolve and publish until cancelled. Nothing is published before some name has resolved."""
        discovery = ModelDiscovery("dns", self._key, self._wheel, self._tls, publish)
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._names:
                    group.create_task(self._follow(name, discovery))
        finally:
            await discovery.close()

    async def _follow(self, name: ResolvedName, discovery: ModelDiscovery) -> None:
        while True:
            before, is_first = name.members(), not name.was_looked_up
            try:
                name.answered(await self._resolve(name.host, name.port))
            except OSError as error:
                name.failed(str(error))
            members = [member for each in self._names for member in each.members()]
            if name.members() != before or (is_first and members):
                discovery.set_members(members, sum(not each.was_looked_up for each in self._names))
            await asyncio.sleep(self._resolve_s)


class ResolvedName:
    """One host name and its last known addresses."""

    def __init__(self, is_tls: bool, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._scheme = "https" if is_tls else "http"
        self._misses: dict[str, int] = {}
        """address -> answers without it since it was last seen"""
        self._is_failing = False
        self.was_looked_up = False
        """Whether a lookup has ended, well or not."""

    def answered(self, addresses: Sequence[str]) -> None:
        self.was_looked_up = True
        found = list(dict.fromkeys(addresses))
        if not found:
            self.failed("no addresses")
            return
        if len(found) > MAX_ADDRESSES:
            log.error("%s has %d addresses, using %d", self.host, len(found), MAX_ADDRESSES)
        self._is_failing = False
        kept = dict.fromkeys(found[:MAX_ADDRESSES], 0)
        for address, misses in self._misses.items():
            if address not in kept and misses + 1 < MISSES and len(kept) < MAX_ADDRESSES:
                kept[address] = misses + 1
        self._misses = kept

    def failed(self, reason: str) -> None:
        self.was_looked_up = True
        if not self._is_failing:
            log.warning(
                "%s does not resolve (%s), keeping %d addresses", self.host, reason, len(self._misses)
            )
        self._is_failing = True

    def members(self) -> list[Member]:
        """The name's replicas, ordered by address."""
        authorities = sorted(f"[{a}]:{self.port}" if ":" in a else f"{a}:{self.port}" for a in self._misses)
        return [Member(at, "", f"{self._scheme}://{at}", hostname=self.host) for at in authorities]


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """Resolve as the system does, with hosts file and search domains.

    Only addresses of the preferred family are returned, so that a replica with IPv4 and IPv6 does not count twice.

    Raises:
        OSError: the name does not resolve.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for family, _, _, _, address in found if family == found[0][0]]
