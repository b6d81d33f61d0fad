"""Discovery by DNS (`--replica-dns URL`): one replica per address of the URL's host name, such as a headless Service's.

Owns: resolving, and when an address counts as gone. Must not know: requests, health.
Invariants: a failed or empty answer changes nothing; an address is dropped only after `MISSES` consecutive answers
without it, because a DNS server may return a subset. Health checks handle replicas that die in the meantime.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from argosy_router.discovery.model_discovery import ModelDiscovery
from argosy_router.discovery.source import Publish
from argosy_router.fleet.replica import Member
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.pool import split_url
from argosy_router.http.tls import UpstreamTls

log = logging.getLogger(__name__)

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
