"""Polls every router for the replicas that it sends requests to, and merges the reports.

Owns one long poll per router pod, and the merged view `Routers`. Must not know readiness gates. Invariants: a router
counts as alive until it has not answered for GRACE seconds; the view is unknown until a router has answered, or none
has for GRACE seconds, and no gate is changed on an unknown view.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import aiohttp
import msgspec
from msgspec import Struct, structs

from argosy_operator.observed.observation import Routers
from argosy_protocol.routable_report import RoutableReport, with_changes

logger = logging.getLogger(__name__)

WAIT: Final = 25
"""Seconds for which a router may hold its answer back while nothing changes."""
GRACE: Final = 10.0
"""Seconds without an answer after which a router counts as dead. Covers a restart of its pod's container."""
UNREACHABLE: Final = 60.0
"""Seconds without an answer after which a router whose pod runs is named, and fewer replicas do not wait for it any
more: a NetworkPolicy, say, keeps the operator from it, and neither comes back by itself."""
UNSENT: Final = 60.0
"""Seconds for which no router sends requests to any replica of a service that routers know, after which that is told.
Covers a restart of the only router, which connects to its replicas anew."""
PAUSE: Final = 1.0
"""Seconds between two polls of one router, whether it has answered or not: bounds the work while a fleet starts."""

WHOLE: Final = 300.0
"""Seconds after which a router is asked for a whole report again, as the operator lists everything again."""

Fetch = Callable[[str, "int | None", str], Awaitable[RoutableReport]]
"""`fetch(pod address, last revision, its epoch)`: the router's next report; what has changed since that revision, if
the router knows epochs."""


class RouterPod(Struct, frozen=True, kw_only=True):
    """A router's pod, and where it answers."""

    uid: str
    name: str
    address: str


def read_router_pod(obj: Mapping[str, Any]) -> RouterPod | None:
    """Read a router's pod; None if it cannot answer now."""
    status = obj.get("status", {})
    if (
        obj["metadata"].get("deletionTimestamp")
        or status.get("phase") != "Running"
        or not status.get("podIP")
    ):
        return None
    return RouterPod(uid=obj["metadata"]["uid"], name=obj["metadata"]["name"], address=status["podIP"])


class _Peer:
    """One router being polled."""

    def __init__(self, pod: RouterPod, now: float) -> None:
        self.pod = pod
        self.report: RoutableReport | None = None
        """The last report, with all changes since."""
        self.whole_at = 0.0
        """When the last whole one came."""
        self.failing_since: float | None = now
        """Time of the first poll without an answer; None after an answer."""
        self.task: asyncio.Task[None] | None = None

    def is_unreachable(self, now: float) -> bool:
        return self.failing_since is not None and now >= self.failing_since + UNREACHABLE


class RouterWatch:
    """Polls routers, and calls `on_change(keys of affected services, None for all)` when the merged view changes."""

    def __init__(self, fetch: Fetch, on_change: Callable[[frozenset[str] | None], None]) -> None:
        self._fetch = fetch
        self._on_change = on_change
        self._peers: dict[str, _Peer] = {}
        self._silent: set[str] = set()
        """Routers that have not answered for longer than GRACE."""
        self._alone_since: float | None = None
        """Time since which no router is alive; None while one is, and before pods were listed."""
        self._unsent_since: dict[str, float] = {}
        """Since when no router sends requests to any replica of a service, of those that some router knows."""
        self._view = Routers()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def view(self) -> Routers:
        """The merged reports of all routers that are alive."""
        return self._view

    def set_pods(self, pods: Iterable[RouterPod]) -> None:
        """Set the router pods that run now: start polling new ones, stop polling the others."""
        now = asyncio.get_running_loop().time()
        wanted = {pod.uid: pod for pod in pods}
        for uid in self._peers.keys() - wanted.keys():
            self._forget(uid)
        for uid, pod in wanted.items():
            if uid in self._peers and self._peers[uid].pod == pod:
                continue
            if uid in self._peers:
                self._forget(uid)
            peer = self._peers[uid] = _Peer(pod, now)
            peer.task = asyncio.create_task(self._poll(peer), name=f"router {pod.name}")
        self._refresh(None)

    def close(self) -> None:
        """Stop polling."""
        for uid in list(self._peers):
            self._forget(uid)
        if self._timer is not None:
            self._timer.cancel()

    def _forget(self, uid: str) -> None:
        peer = self._peers.pop(uid)
        self._silent.discard(uid)
        if peer.task is not None:
            peer.task.cancel()

    async def _poll(self, peer: _Peer) -> None:
        loop = asyncio.get_running_loop()
        is_lost = False
        while True:
            held = peer.report if peer.failing_since is None and not is_lost else None
            seen = None if held is None else held.revision
            epoch = held.epoch if held is not None and loop.time() < peer.whole_at + WHOLE else ""
            try:
                answer = await self._fetch(peer.pod.address, seen, epoch)
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
                if peer.failing_since is None:
                    peer.failing_since = loop.time()
                    logger.warning(
                        "router %s does not answer: %s", peer.pod.name, error or type(error).__name__
                    )
                self._refresh(None)
                await asyncio.sleep(PAUSE)
                continue
            if answer.base is None:
                peer.whole_at = loop.time()
            report = with_changes(held, answer)
            is_lost = report is None  # changes of a revision that is not held: all is asked for
            if report is not None:
                before, peer.report, peer.failing_since = peer.report, report, None
                self._silent.discard(peer.pod.uid)
                self._refresh(_affected(before, report))
            await asyncio.sleep(PAUSE)

    def _refresh(self, affected: frozenset[str] | None) -> None:
        """Merge the reports again, announce a change, and set a timer for the next end of a grace period."""
        now = asyncio.get_running_loop().time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends, unreachable = [], []
        for uid, peer in self._peers.items():
            if peer.failing_since is None:
                continue
            if now >= peer.failing_since + GRACE:
                self._silent.add(uid)
            if peer.is_unreachable(now):
                unreachable.append(peer.pod.name)
            else:
                ends += [peer.failing_since + wait for wait in (GRACE, UNREACHABLE)]
        alive = [
            peer for uid, peer in self._peers.items() if peer.report is not None and uid not in self._silent
        ]
        if alive:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        if self._alone_since is not None and now < self._alone_since + GRACE:
            ends.append(self._alone_since + GRACE)
        unsent, waits = self._unsent(now)
        ends += waits
        if ends:
            next_end = min((end for end in ends if end > now), default=now)
            self._timer = asyncio.get_running_loop().call_at(next_end, self._refresh, None)
        is_alone = self._alone_since is not None and now >= self._alone_since + GRACE
        view = _combined(
            alive, known=bool(alive) or is_alone, unreachable=tuple(sorted(unreachable)), unsent=unsent
        )
        if view == self._view:
            return
        dimmed = view.unsent ^ self._view.unsent
        if affected is not None:
            affected |= dimmed
        elif structs.replace(view, unsent=self._view.unsent) == self._view:
            affected = dimmed
        turned = view.known != self._view.known or (view.alive == 0) != (self._view.alive == 0)
        turned = turned or view.unreachable != self._view.unreachable
        self._view = view
        self._on_change(None if turned else affected)

    def _unsent(self, now: float) -> tuple[frozenset[str], list[float]]:
        """The services that get no requests, and when others will have got none for UNSENT seconds.

        A router that has fallen silent to the operator may serve all the same while its pod runs: where it sent
        requests to last, it still does. While one runs that has not answered yet, nothing is known of any service,
        until that one counts as unreachable.
        """
        known: set[str] = set()
        sent: set[str] = set()
        for uid, peer in self._peers.items():
            for replica in peer.report.replicas if peer.report is not None else ():
                if uid not in self._silent:
                    known.add(replica.service)
                if replica.routable:
                    sent.add(replica.service)
        self._unsent_since = {each: self._unsent_since.get(each, now) for each in known - sent}
        if any(peer.report is None and not peer.is_unreachable(now) for peer in self._peers.values()):
            return frozenset(), []
        ends = {each: since + UNSENT for each, since in self._unsent_since.items()}
        return (
            frozenset(each for each, end in ends.items() if end <= now),
            [end for end in ends.values() if end > now],
        )


def _combined(
    alive: Iterable[_Peer], *, known: bool, unreachable: tuple[str, ...], unsent: frozenset[str]
) -> Routers:
    reports = [peer.report for peer in alive if peer.report is not None]
    replicas = [replica for report in reports for replica in report.replicas if replica.uid]
    routable = frozenset(replica.uid for replica in replicas if replica.routable)
    draining = frozenset(replica.uid for replica in replicas if replica.state == "draining")
    return Routers(
        known=known,
        alive=len(reports),
        routable=routable,
        draining=draining - routable,
        unreachable=unreachable,
        unsent=unsent,
    )


def _affected(before: RoutableReport | None, after: RoutableReport) -> frozenset[str] | None:
    """Keys of the services whose replicas differ between two reports of one router; None if there is no earlier one."""
    if before is None:
        return None
    changed = set(before.replicas) ^ set(after.replicas)
    return frozenset(replica.service for replica in changed)
