"""Asks every router for its load report, and merges the reports.

Owns one long poll per router pod while scaling needs the reports, and the merged view. Must not know what follows from
a load. Invariants: without a service that scales nothing is asked; a router whose last report is older than FRESH makes
the view incomplete, and one that is silent for UNREACHABLE does no more than that; a request that begins to be held is
announced as soon as its router answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from argosy_operator.cluster.router_watch import UNREACHABLE, RouterPod
from argosy_operator.observed.service_load import FleetLoad, ServiceLoad
from argosy_protocol.load_report import LoadReport

logger = logging.getLogger(__name__)

WAIT: Final = 5
"""Seconds for which a router may hold its answer back: the age of the figures that scaling is decided by."""
FRESH: Final = 3.0 * WAIT
"""Seconds after which a report is out of date: two answers in a row are missing."""
PAUSE: Final = 0.2
"""Seconds between two polls of one router that answers at once. Bounds the work when services begin to hold requests
one after another, and the time until the operator knows of them."""
RETRY: Final = 1.0
"""Seconds until a router that did not answer is asked again."""
ASK_TIMEOUT: Final = 2.0
"""Seconds for which a removal of replicas waits to learn what their caches are worth."""

ASK_PAUSE: Final = 1.0
"""Seconds for which all removals share an answer. Each is the report of a whole fleet, and who may edit a service can
have replicas removed as often as they like."""

LoadFetch = Callable[[str, "int | None"], Coroutine[Any, Any, LoadReport]]
"""`fetch(pod address, last revision)`: the router's next load report; the present one if no revision is given."""

_FAILURES: Final = (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError)


class _Peer:
    """One router being polled."""

    def __init__(self, pod: RouterPod, now: float) -> None:
        self.pod = pod
        self.report: LoadReport | None = None
        self.reported_at = now
        """When it reported, or began to be asked."""
        self.task: asyncio.Task[None] | None = None


class LoadWatch:
    """Polls routers for their load, and calls `on_held(services)` when services begin to hold requests."""

    def __init__(self, fetch: LoadFetch, on_held: Callable[[frozenset[str]], None]) -> None:
        self._fetch = fetch
        self._on_held = on_held
        self._pods: dict[str, RouterPod] = {}
        self._peers: dict[str, _Peer] = {}
        self._is_needed = False
        self._merged: Mapping[str, ServiceLoad] = {}
        self._merged_of: list[LoadReport] = []
        """The reports that are merged."""
        self._completeness = (True, True)
        self._asked: tuple[float, asyncio.Task[Mapping[str, ServiceLoad]]] | None = None
        """When all routers were asked last by `ask`, and their answers."""

    def set_pods(self, pods: Iterable[RouterPod]) -> None:
        """Set the router pods that run now."""
        self._pods = {pod.uid: pod for pod in pods}
        self._follow()

    def set_needed(self, is_needed: bool) -> None:
        """Set whether some service scales by load."""
        self._is_needed = is_needed
        self._follow()

    def close(self) -> None:
        """Stop polling."""
        self.set_needed(False)

    def view(self) -> Mapping[str, ServiceLoad]:
        """The load of every service that some router has reported of late, by `namespace/name`. Merged once for each
        report."""
        now = asyncio.get_running_loop().time()
        fresh = [
            peer.report
            for peer in self._peers.values()
            if peer.report is not None and peer.reported_at >= now - FRESH
        ]
        silent = sum(peer.reported_at < now - UNREACHABLE for peer in self._peers.values())
        missing = len(self._peers) - len(fresh)
        completeness = (missing == 0, missing == silent)
        is_known = self._completeness == completeness and len(fresh) == len(self._merged_of)
        if not is_known or any(new is not old for new, old in zip(fresh, self._merged_of, strict=True)):
            self._merged = FleetLoad(fresh, is_complete=missing == 0, is_settled=missing == silent)
            self._merged_of, self._completeness = fresh, completeness
        return self._merged

    async def ask(self) -> Mapping[str, ServiceLoad]:
        """Ask every router for its present report, for at most ASK_TIMEOUT; those that do not answer are left out. At
        most once in ASK_PAUSE: a report may be so old."""
        if not self._pods:
            return {}  # not kept: one may come
        now = asyncio.get_running_loop().time()
        if self._asked is None or (self._asked[1].done() and now >= self._asked[0] + ASK_PAUSE):
            self._asked = now, asyncio.create_task(self._ask(), name="loads")
        return await asyncio.shield(self._asked[1])

    async def _ask(self) -> Mapping[str, ServiceLoad]:
        tasks = [asyncio.create_task(self._fetch(pod.address, None)) for pod in self._pods.values()]
        if not tasks:
            return {}
        done, late = await asyncio.wait(tasks, timeout=ASK_TIMEOUT)
        for task in late:
            task.cancel()
        reports = []
        for task in done:
            error = task.exception()
            if error is None:
                reports.append(task.result())
            elif not isinstance(error, _FAILURES):
                raise error
        return FleetLoad(reports, is_complete=len(reports) == len(tasks))

    def _follow(self) -> None:
        """Poll the routers that are to be polled, and no other."""
        wanted = self._pods if self._is_needed else {}
        for uid in [uid for uid, peer in self._peers.items() if wanted.get(uid) != peer.pod]:
            task = self._peers.pop(uid).task
            if task is not None:
                task.cancel()
        for uid, pod in wanted.items():
            if uid not in self._peers:
                peer = self._peers[uid] = _Peer(pod, asyncio.get_running_loop().time())
                peer.task = asyncio.create_task(self._poll(peer), name=f"load of {pod.name}")

    async def _poll(self, peer: _Peer) -> None:
        loop = asyncio.get_running_loop()
        is_failing = False
        while True:
            seen = None if peer.report is None or is_failing else peer.report.revision
            try:
                report = await self._fetch(peer.pod.address, seen)
            except _FAILURES as error:
                if not is_failing:
                    message = error or type(error).__name__
                    logger.warning("router %s does not report its load: %s", peer.pod.name, message)
                is_failing = True
                await asyncio.sleep(RETRY)
                continue
            peer.report, peer.reported_at, is_failing = report, loop.time(), False
            held = frozenset(service.service for service in report.services if service.held)
            if held:
                self._on_held(held)
            await asyncio.sleep(PAUSE)
