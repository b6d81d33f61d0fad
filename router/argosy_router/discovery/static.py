"""Replicas from `--replica URL`: each tells which model it serves; equal models form one service.

Owns: asking replicas for their model until they answer. Must not know: requests, health.
Invariant: a replica appears once its model is known, and never leaves: the command line said it exists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from argosy_engine.protocol.fleet import Endpoint, FleetDocument, FleetService, encode_fleet
from argosy_router.discovery.base import Publish, snapshot_of
from argosy_router.http.client import ClientLimits
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.errors import UpstreamError
from argosy_router.http.fetch import fetch
from argosy_router.http.pool import ConnectionPool, split_url

log = logging.getLogger(__name__)

RETRY_S = 0.5
TIMEOUT_S = 5.0


class _Card(msgspec.Struct):
    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class StaticDiscovery:
    """Fixed addresses.

    Raises:
        ValueError: a URL is not `http://HOST:PORT`.
    """

    def __init__(self, urls: Sequence[str], key: str, wheel: TimerWheel) -> None:
        for url in urls:
            split_url(url)
        self._urls = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._key = key
        self._wheel = wheel
        self._models: dict[str, tuple[str, ...]] = {}

    async def run(self, publish: Publish) -> None:
        """Until every replica has told its model, then until cancelled."""
        self._publish(publish)
        async with asyncio.TaskGroup() as group:
            for url in self._urls:
                group.create_task(self._learn(url, publish))
        await asyncio.Event().wait()

    async def _learn(self, url: str, publish: Publish) -> None:
        pool = ConnectionPool(url, ClientLimits(), self._wheel)
        while True:
            try:
                response = await fetch(pool, "/v1/models", self._key, TIMEOUT_S)
                names = tuple(card.id for card in msgspec.json.decode(response.body, type=_Models).data)
            except (UpstreamError, msgspec.MsgspecError) as error:
                log.debug("replica %s does not tell its models yet: %s", url, error)
                names = ()
            if names:
                self._models[url] = names
                self._publish(publish)
                return
            await asyncio.sleep(RETRY_S)

    def _publish(self, publish: Publish) -> None:
        """The first name a replica lists is its canonical one, the others are aliases."""
        services: dict[str, list[str]] = {}
        aliases: dict[str, dict[str, None]] = {}
        for url in self._urls:
            if url in self._models:
                model, *others = self._models[url]
                services.setdefault(model, []).append(url)
                aliases.setdefault(model, {}).update(dict.fromkeys(others))
        document = FleetDocument(
            services=tuple(
                FleetService(
                    namespace="static",
                    name=model,
                    uid="static",
                    model=model,
                    aliases=tuple(aliases[model]),
                    endpoints=tuple(Endpoint(name=urlsplit(url).netloc, url=url) for url in urls),
                    internal_key=self._key,
                )
                for model, urls in services.items()
            )
        )
        publish(snapshot_of(document, encode_fleet(document)))
