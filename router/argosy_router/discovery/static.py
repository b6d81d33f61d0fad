"""Discovery of fixed addresses (`--replica URL`).

Must not know: requests, health.
Invariant: a replica never leaves, since the command line says that it exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

from argosy_router.discovery.model_discovery import ModelDiscovery
from argosy_router.discovery.source import Publish
from argosy_router.fleet.replica import Member
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.pool import split_url
from argosy_router.http.tls import UpstreamTls


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
