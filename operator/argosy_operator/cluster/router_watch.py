"""Polls every router for what it knows of replicas and of load, and merges the reports.

Owns the requests to routers' admin ports, with a key that each accepts, and two long polls per router pod. Must not
know readiness gates, nor what follows from a load.

    RouterWatch  to which replicas each router sends requests. A router counts as alive until it has not answered for
                 GRACE seconds; the view is unknown until a router has answered, or none has for GRACE seconds, and no
                 gate is changed on an unknown view
    LoadWatch    load and figures of canaries. Without a service that scales nothing is asked; a router whose last
                 report is older than FRESH makes the view incomplete, and one that is silent for UNREACHABLE does no
                 more than that; a request that begins to be held is announced as soon as its router answers
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

import aiohttp
import msgspec
from msgspec import Struct, structs

from argosy_operator.names import ROUTER_ADMIN_PORT
from argosy_operator.observation import FleetLoad, Routers, ServiceLoad
from argosy_protocol.fleet_keys import FleetKeys
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID, LoadReport, RoutableReport, with_changes

logger = logging.getLogger(__name__)

GRACE: Final = 10.0
"""Seconds without an answer after which a router counts as dead. Covers a restart of its pod's container."""
UNREACHABLE: Final = 60.0
"""Seconds without an answer after which a router whose pod runs is named, and fewer replicas do not wait for it any
more: a NetworkPolicy, say, keeps the operator from it, and neither comes back by itself."""
UNSENT: Final = 60.0
"""Seconds for which no router sends requests to any replica of a service that routers know, after which that is told.
Covers a restart of the only router, which connects to its replicas anew."""
ROUTABLE_WAIT: Final = 25
"""Seconds for which a router may hold its answer back while nothing changes."""
ROUTABLE_PAUSE: Final = 1.0
"""Seconds between two polls of one router, whether it has answered or not: bounds the work while a fleet starts."""
WHOLE: Final = 300.0
"""Seconds after which a router is asked for a whole report again, as the operator lists everything again."""
LOAD_WAIT: Final = 5
"""Seconds for which a router may hold its answer back: the age of the figures that scaling is decided by."""
FRESH: Final = 3.0 * LOAD_WAIT
"""Seconds after which a report is out of date: two answers in a row are missing."""
LOAD_PAUSE: Final = 0.2
"""Seconds between two polls of one router that answers at once. Bounds the work when services begin to hold requests
one after another, and the time until the operator knows of them."""
RETRY: Final = 1.0
"""Seconds until a router that did not answer is asked again."""
ASK_TIMEOUT: Final = 2.0
"""Seconds for which a removal of replicas waits to learn what their caches are worth."""
ASK_PAUSE: Final = 1.0
"""Seconds for which all removals share an answer. Each is the report of a whole fleet, and who may edit a service can
have replicas removed as often as they like."""
Report = TypeVar("Report")
_FAILURES: Final = (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError)

RoutableFetch = Callable[[str, "int | None", str], Awaitable[RoutableReport]]
"""`fetch(pod address, last revision, its epoch)`: the router's next report; what has changed since that revision, if
the router knows epochs."""
LoadFetch = Callable[[str, "int | None"], Coroutine[Any, Any, LoadReport]]
"""`fetch(pod address, last revision)`: the router's next load report; the present one if no revision is given."""


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


class _Peer(Generic[Report]):
    """One router being polled."""

    def __init__(self, pod: RouterPod, now: float) -> None:
        self.pod = pod
        self.report: Report | None = None
        """The last report, with all changes since."""
        self.reported_at = now
        """When the last whole one came, or it began to be asked."""
        self.failing_since: float | None = now
        """Time of the first poll without an answer; None after an answer."""
        self.task: asyncio.Task[None] | None = None

    def is_unreachable(self, now: float) -> bool:
        return self.failing_since is not None and now >= self.failing_since + UNREACHABLE


class _Polls(ABC, Generic[Report]):
    """One task for each router that is polled."""

    polled = ""
    """Name of these tasks."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer[Report]] = {}

    def _follow(self, pods: Mapping[str, RouterPod]) -> None:
        """Poll these routers, by their UIDs, and no other."""
        for uid in [uid for uid, peer in self._peers.items() if pods.get(uid) != peer.pod]:
            task = self._peers.pop(uid).task
            if task is not None:
                task.cancel()
        for uid, pod in pods.items():
            if uid not in self._peers:
                peer = self._peers[uid] = _Peer(pod, asyncio.get_running_loop().time())
                peer.task = asyncio.create_task(self._poll(peer), name=f"{self.polled} {pod.name}")

    @abstractmethod
    async def _poll(self, peer: _Peer[Report]) -> None:
        """Ask for reports until cancelled."""


class RouterWatch(_Polls[RoutableReport]):
    """Polls routers, and calls `on_change(keys of affected services, None for all)` when the merged view changes."""

    polled = "router"

    def __init__(self, fetch: RoutableFetch, on_change: Callable[[frozenset[str] | None], None]) -> None:
        super().__init__()
        self._fetch = fetch
        self._on_change = on_change
        self._silent: set[str] = set()
        """Routers that have not answered for longer than GRACE."""
        self._alone_since: float | None = None
        """Time since which no router is alive; None while one is, and before pods were listed."""
        self._unsent_since: dict[str, float] = {}
        """Since when no router sends requests to any replica of a service, of those that some router knows."""
        self.view = Routers()
        """The merged reports of all routers that are alive."""
        self._timer: asyncio.TimerHandle | None = None

    def set_pods(self, pods: Iterable[RouterPod]) -> None:
        """Set the router pods that run now: start polling new ones, stop polling the others."""
        wanted = {pod.uid: pod for pod in pods}
        self._silent -= {uid for uid, peer in self._peers.items() if wanted.get(uid) != peer.pod}
        self._follow(wanted)
        self._refresh(None)

    def close(self) -> None:
        self._follow({})
        if self._timer is not None:
            self._timer.cancel()

    async def _poll(self, peer: _Peer[RoutableReport]) -> None:
        loop = asyncio.get_running_loop()
        is_lost = False
        while True:
            held = peer.report if peer.failing_since is None and not is_lost else None
            seen = None if held is None else held.revision
            epoch = held.epoch if held is not None and loop.time() < peer.reported_at + WHOLE else ""
            try:
                answer = await self._fetch(peer.pod.address, seen, epoch)
            except _FAILURES as error:
                if peer.failing_since is None:
                    peer.failing_since = loop.time()
                    logger.warning(
                        "router %s does not answer: %s", peer.pod.name, error or type(error).__name__
                    )
                self._refresh(None)
                await asyncio.sleep(ROUTABLE_PAUSE)
                continue
            if answer.base is None:
                peer.reported_at = loop.time()
            report = with_changes(held, answer)
            is_lost = report is None  # changes of a revision that is not held: all is asked for
            if report is not None:
                before, peer.report, peer.failing_since = peer.report, report, None
                self._silent.discard(peer.pod.uid)
                self._refresh(_affected(before, report))
            await asyncio.sleep(ROUTABLE_PAUSE)

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
        if view == self.view:
            return
        dimmed = view.unsent ^ self.view.unsent
        if affected is not None:
            affected |= dimmed
        elif structs.replace(view, unsent=self.view.unsent) == self.view:
            affected = dimmed
        turned = view.known != self.view.known or (view.alive == 0) != (self.view.alive == 0)
        turned = turned or view.unreachable != self.view.unreachable
        self.view = view
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
    alive: Iterable[_Peer[RoutableReport]],
    *,
    known: bool,
    unreachable: tuple[str, ...],
    unsent: frozenset[str],
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


class LoadWatch(_Polls[LoadReport]):
    """Polls routers for their load, and calls `on_held(services)` when services begin to hold requests."""

    polled = "load of"

    def __init__(self, fetch: LoadFetch, on_held: Callable[[frozenset[str]], None]) -> None:
        super().__init__()
        self._fetch = fetch
        self._on_held = on_held
        self._pods: dict[str, RouterPod] = {}
        self._is_needed = False
        self._merged: Mapping[str, ServiceLoad] = {}
        self._merged_of: list[LoadReport] = []
        """The reports that are merged."""
        self._completeness = (True, True)
        self._asked: tuple[float, asyncio.Task[Mapping[str, ServiceLoad]]] | None = None
        """When all routers were asked last by `ask`, and their answers."""

    def set_pods(self, pods: Iterable[RouterPod]) -> None:
        self._pods = {pod.uid: pod for pod in pods}
        self.set_needed(self._is_needed)

    def set_needed(self, is_needed: bool) -> None:
        """Set whether some service scales by load."""
        self._is_needed = is_needed
        self._follow(self._pods if is_needed else {})

    def close(self) -> None:
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

    async def _poll(self, peer: _Peer[LoadReport]) -> None:
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
            await asyncio.sleep(LOAD_PAUSE)


async def _get_as_admin(
    session: aiohttp.ClientSession, url: str, keys: FleetKeys, timeout: aiohttp.ClientTimeout
) -> bytes:
    """GET `url` with the newest key, or with the next one where the router does not have that yet: while the fleet key
    is rotated, either of the two may have it first.

    With TLS the certificate is not verified, because it is for the name that clients use, not for a pod's address:
    traffic is encrypted, and a pod is trusted because the API server lists it, as without TLS.

    Raises:
        aiohttp.ClientError: no answer, or none that is good; with status 401 if the router refuses every key.
        TimeoutError: no answer in time.
    """
    *newer, oldest = keys.keys
    for fleet_key in (*newer, oldest):
        headers = {"Authorization": f"Bearer {internal_key(fleet_key, ADMIN_KEY_UID)}"}
        async with session.get(url, headers=headers, timeout=timeout, ssl=False) as response:
            if response.status == 401 and fleet_key != oldest:
                continue
            response.raise_for_status()
            return await response.read()
    raise AssertionError("the last key's answer was returned or raised")


def http_fetch(
    session: aiohttp.ClientSession,
    keys: FleetKeys,
    path: str,
    report: type[Report],
    *,
    wait: int,
    is_tls: bool,
) -> Callable[..., Coroutine[Any, Any, Report]]:
    """A function `fetch(pod address, last revision, its epoch)` that returns the next report at `path` of the router's
    admin port, for which the router may hold its answer back for `wait` seconds; the present one if no revision is
    given. With an epoch a router that knows it answers with the changes since that revision. It raises
    aiohttp.ClientError, TimeoutError, OSError, or msgspec.MsgspecError for an answer that is no such report.
    """
    scheme = "https" if is_tls else "http"

    async def fetch(address: str, seen: int | None, epoch: str = "") -> Report:
        host = f"[{address}]" if ":" in address else address
        query = "" if seen is None else f"?after={seen}&wait={wait}" + (f"&epoch={epoch}" if epoch else "")
        timeout = aiohttp.ClientTimeout(total=5 if seen is None else wait + 5, connect=2)
        url = f"{scheme}://{host}:{ROUTER_ADMIN_PORT}{path}{query}"
        return msgspec.json.decode(await _get_as_admin(session, url, keys, timeout), type=report)

    return fetch
