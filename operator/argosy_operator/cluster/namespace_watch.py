"""Watches which namespaces exist, if the operator serves all of them.

Owns one list and watch of Namespaces. Must not know what follows from a name. Invariants: with a list of served
namespaces nothing is asked, as no other namespace can have services; a cluster that refuses the list leaves what was
known, which is then told once, and nothing else fails; memory holds one page of a list, and of each namespace its name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Final

from argosy_operator.cluster.api_server import Api
from argosy_operator.cluster.list_watch import EXPIRED, REFUSALS, REFUSED_RETRY, RETRY, changes_since
from argosy_operator.errors import ApiError
from argosy_operator.kinds import NAMESPACES

logger = logging.getLogger(__name__)

PATIENCE: Final = 3
"""Refusals in a row after which that is so, and failures after which nobody waits for an answer any more: an API server
that starts may refuse what it allows later, and names decided without it would be given to others for a moment."""
PAGE: Final = 100
"""Namespaces of one answer: each may have 1.5 MiB in etcd, nearly all of it annotations."""


class NamespaceWatch:
    """Knows the names of all namespaces."""

    def __init__(self, api: Api, served: Collection[str], *, on_change: Callable[[], None]) -> None:
        """Args:
        served: the namespaces that are served; all if empty.
        on_change: called when a namespace has come or gone.
        """
        self._api = api
        self._is_needed = not served
        self._on_change = on_change
        self.names: frozenset[str] = frozenset(served)
        """The namespaces that exist, or that are served, as far as that is known."""
        self._was_answered = asyncio.Event()
        if served:
            self._was_answered.set()

    async def wait_answered(self) -> None:
        """Return once the API server has answered, or has failed PATIENCE times."""
        await self._was_answered.wait()

    async def run(self) -> None:
        """Follow the namespaces until cancelled."""
        failures, refusals = 0, 0
        is_told = False
        while self._is_needed:
            try:
                version = await self._list()
                events = changes_since(self._api, NAMESPACES, namespace=None, version=version)
                async with aclosing(events):
                    async for event, obj in events:
                        failures, refusals, is_told = 0, 0, False
                        name = obj["metadata"]["name"]
                        self._know(self.names - {name} if event == "DELETED" else self.names | {name})
                failures, refusals, is_told = 0, 0, False
            except ApiError as error:
                failures += 1
                if failures >= PATIENCE:
                    self._was_answered.set()
                if not is_told and error.status != EXPIRED:
                    is_told = True
                    logger.warning(
                        "namespaces cannot be watched: %s; model names that begin with the name of a namespace are "
                        "refused to others only while that has an InferenceService",
                        error,
                    )
                refusals = refusals + 1 if error.status in REFUSALS else 0
                await asyncio.sleep(REFUSED_RETRY if refusals >= PATIENCE else RETRY)

    async def _list(self) -> str:
        """Know the namespaces that there are. Returns the version of the list."""
        names: set[str] = set()
        version = ""
        pages = self._api.list_pages(NAMESPACES, namespace=None, limit=PAGE)
        async with aclosing(pages):
            async for page in pages:
                names.update(obj["metadata"]["name"] for obj in page.items)
                version = page.version
        self._was_answered.set()
        self._know(frozenset(names))
        return version

    def _know(self, names: frozenset[str]) -> None:
        if names != self.names:
            self.names = names
            self._on_change()
