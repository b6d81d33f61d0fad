"""Polls the pods that fetch their model for their progress, and keeps the last report of each.

Owns one poll per fetching pod, and the view of the last reports. Must not know the pods' conditions. Pods are not
trusted: an answer is bounded in bytes and time, redirects are not followed, and one that is missing, late or wrong
changes nothing. Invariants: a report is kept as long as the container runs that made it; a pod announces at most one
change per CHANGE_INTERVAL, and fewer while its share of the model stays the same; the pods of one service, those that
replace others included, announce BURST changes and then at most one per SERVICE_INTERVAL, since each is a write to a
pod and one to the service; on average all pods together are polled at most MAX_POLLS_PER_SECOND times a second, from
the start of the operator on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from argosy_operator.cluster.store import service_of
from argosy_operator.names import Name
from argosy_operator.pod import fetch_container
from argosy_protocol.program.process import OwnerTurns
from argosy_protocol.reports import MAX_REPORT_BYTES, PROGRESS_PATH, ModelProgress, percent, summary
from argosy_resource.engine_command import PROGRESS_PORT

logger = logging.getLogger(__name__)

POLL_INTERVAL: Final = 2.0
"""Seconds between two polls of one pod while its report stays the same."""
CHANGE_INTERVAL: Final = 5.0
"""Seconds between two changes of one pod's report. Each is a write to the API server."""
SLOW_CHANGE_INTERVAL: Final = 30.0
"""Seconds between two changes of one pod's report in which the share of the model that has arrived is the same."""
SERVICE_INTERVAL: Final = 2.0
"""Seconds between two changes of all pods of one service, once it has had BURST of them."""
BURST: Final = 10
"""Changes that the pods of one service may announce at once."""
MAX_POLLS_PER_SECOND: Final = 50
"""Polls of all pods together. With more than 100 pods each of them is polled less often."""
MAX_POLLS_AT_ONCE: Final = 20
"""Polls of all pods that run at the same time. Bounds what pods that all answer as slowly as they may can occupy."""
MAX_POLLS_OF_NAMESPACE: Final = 5
"""Of these, for the pods of one namespace: those of one tenant that never answer delay others' by that many polls."""
DEADLINE: Final = 2.0
"""Seconds for one poll."""
MAX_ANSWER_BYTES: Final = 2 * MAX_REPORT_BYTES
"""Of an answer, head and body. A longer one is not read."""

UNUSABLE: Final = (
    TimeoutError,
    OSError,
    ValueError,
    msgspec.MsgspecError,
    RecursionError,  # JSON that is nested deeply
)
"""Errors of an answer that is missing, late or wrong."""

AskProgress = Callable[[str], Awaitable[ModelProgress]]
"""`ask(pod address)`: the pod's report."""


class FetchingPod(Struct, frozen=True, kw_only=True):
    """A pod whose init container fetches the model now, and where it answers."""

    uid: str
    name: str
    service: Name
    address: str
    container_id: str
    """New with every attempt."""


def read_fetching_pod(obj: Mapping[str, Any]) -> FetchingPod | None:
    """Read a replica's pod; None if it does not fetch now."""
    metadata, status = obj["metadata"], obj.get("status", {})
    service, container = service_of(obj), fetch_container(status)
    if (
        service is None
        or metadata.get("deletionTimestamp")
        or status.get("phase") != "Pending"  # of an evicted pod, say, the address may be another one's
        or "running" not in container.get("state", {})
        or not status.get("podIP")
    ):
        return None
    return FetchingPod(
        uid=metadata["uid"],
        name=metadata["name"],
        service=service,
        address=status["podIP"],
        container_id=container.get("containerID", ""),
    )


class FetchWatch:
    """Polls fetching pods, and calls `on_change(service)` when the report of one of its pods changes."""

    def __init__(self, ask: AskProgress, on_change: Callable[[Name], None]) -> None:
        self._ask = ask
        self._on_change = on_change
        self._polled: dict[str, tuple[FetchingPod, asyncio.Task[None]]] = {}
        self.view: dict[str, ModelProgress] = {}
        """The last report of each pod that fetches, by the pod's UID."""
        self.unpolled: set[str] = set()
        """UIDs of the pods that fetch and were not asked yet."""
        self._announced_at: dict[str, float] = {}
        self._services: dict[Name, _ServiceFetches] = {}
        self._emptied_at: dict[Name, float] = {}
        """When the last pod of a service left, of those that have none, the oldest first."""
        self._running = OwnerTurns(MAX_POLLS_AT_ONCE, MAX_POLLS_OF_NAMESPACE)

    def set_pods(self, pods: Iterable[FetchingPod]) -> None:
        """Set the pods that fetch now: start polling new ones, stop polling the others."""
        wanted = {pod.uid: pod for pod in pods}
        for uid in self._polled.keys() - wanted.keys():
            self.forget(uid)
        for pod in wanted.values():
            self.follow(pod)

    def follow(self, pod: FetchingPod) -> None:
        """Poll a pod from now on, if it is not polled yet."""
        if pod.uid in self._polled and self._polled[pod.uid][0] == pod:
            return
        self.forget(pod.uid)
        self._drop_empty_services()
        self._emptied_at.pop(pod.service, None)
        self._services.setdefault(pod.service, _ServiceFetches()).add(pod.uid)
        self.unpolled.add(pod.uid)
        self._polled[pod.uid] = pod, asyncio.create_task(self._poll(pod), name=f"fetch of {pod.name}")

    def forget(self, uid: str) -> None:
        """Stop polling a pod, and drop its report."""
        pod, task = self._polled.pop(uid, (None, None))
        if pod is None or task is None:
            return
        task.cancel()
        self.view.pop(uid, None)
        self._announced_at.pop(uid, None)
        self.unpolled.discard(uid)
        fetches = self._services[pod.service]
        fetches.discard(uid)
        if not fetches.pods:
            self._emptied_at[pod.service] = asyncio.get_running_loop().time()

    def close(self) -> None:
        for uid in list(self._polled):
            self.forget(uid)

    def _drop_empty_services(self) -> None:
        """Drop services whose last pod left so long ago that their buckets are full: new ones are no different."""
        now = asyncio.get_running_loop().time()
        for service, left_at in list(self._emptied_at.items()):  # in the order of their times
            if now - left_at < BURST * SERVICE_INTERVAL:
                break
            del self._emptied_at[service], self._services[service]

    async def _poll(self, pod: FetchingPod) -> None:
        # An operator that starts finds all fetching pods at once.
        await asyncio.sleep(len(self._polled) / MAX_POLLS_PER_SECOND * random.random())  # noqa: S311 - as below
        while True:
            has_changed = await self._refresh(pod)
            self._note_polled(pod, has_changed)
            interval = CHANGE_INTERVAL if has_changed else POLL_INTERVAL
            interval = max(interval, len(self._polled) / MAX_POLLS_PER_SECOND)
            await asyncio.sleep(interval * random.uniform(1.0, 1.2))  # noqa: S311 - spreads the pods over time

    async def _refresh(self, pod: FetchingPod) -> bool:
        """Poll a pod once. Whether its report changed in a way that is shown."""
        try:
            async with self._running.turn(pod.service[0]), asyncio.timeout(DEADLINE):
                report = await self._ask(pod.address)
        except UNUSABLE as error:
            logger.debug("pod %s does not report its fetch: %s", pod.name, error or type(error).__name__)
            return False
        before, now = self.view.get(pod.uid), asyncio.get_running_loop().time()
        if before is not None:
            if summary(before) == summary(report):
                return False
            is_slow = _step(before) == _step(report)
            if is_slow and now - self._announced_at[pod.uid] < SLOW_CHANGE_INTERVAL:
                return False
        if not self._services[pod.service].may_change(now):
            return False
        self.view[pod.uid], self._announced_at[pod.uid] = report, now
        self._on_change(pod.service)
        return True

    def _note_polled(self, pod: FetchingPod, has_changed: bool) -> None:
        """Note a poll of a pod. Whether a service stands still is known when all of its pods were asked, which is
        announced with the first change after that, or alone."""
        fetches = self._services[pod.service]
        if pod.uid in self.unpolled:
            self.unpolled.discard(pod.uid)
            fetches.unpolled.discard(pod.uid)
            fetches.is_due = not fetches.unpolled
        if has_changed:
            fetches.is_due = False
        elif fetches.is_due and fetches.may_change(asyncio.get_running_loop().time()):
            fetches.is_due = False
            self._on_change(pod.service)


class _ServiceFetches:
    """The pods of one service that fetch, by UID, and a token bucket of the changes that they may announce."""

    def __init__(self) -> None:
        self.pods: set[str] = set()
        self.unpolled: set[str] = set()
        self.is_due = False
        """Whether it is to be announced that all were asked."""
        self._tokens = float(BURST)
        self._at = 0.0

    def add(self, uid: str) -> None:
        self.pods.add(uid)
        self.unpolled.add(uid)

    def discard(self, uid: str) -> None:
        self.pods.discard(uid)
        self.unpolled.discard(uid)

    def may_change(self, now: float) -> bool:
        """Whether a change may be announced now; if so, it counts."""
        self._tokens = min(float(BURST), self._tokens + (now - self._at) / SERVICE_INTERVAL)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


def _step(report: ModelProgress) -> tuple[object, ...]:
    """What of a report is shown without delay: all but the bytes and the time that is left."""
    shown = summary(report)
    share = percent(shown)
    note = "" if report.eta_seconds is not None else report.note
    return report.phase, share, note


async def http_progress(address: str) -> ModelProgress:
    """Ask a pod over HTTP on PROGRESS_PORT. A plain connection, because an HTTP client skips interim responses (1xx)
    without limit, and those would keep it from its deadline.

    Raises:
        ValueError: not an answer of status 200 with one report, within MAX_ANSWER_BYTES and MAX_REPORT_BYTES.
    """
    reader, writer = await asyncio.open_connection(address, PROGRESS_PORT, limit=MAX_ANSWER_BYTES)
    try:
        host = f"[{address}]" if ":" in address else address
        # HTTP/1.0: the answer is not chunked, and ends with the connection.
        writer.write(f"GET {PROGRESS_PATH} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        try:
            await reader.readexactly(MAX_ANSWER_BYTES + 1)
        except asyncio.IncompleteReadError as end:
            answer = end.partial
        else:
            raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
    finally:
        writer.transport.abort()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0].split(b" ")
    if status[0] not in (b"HTTP/1.0", b"HTTP/1.1") or status[1:2] != [b"200"]:
        raise ValueError("no answer of status 200")
    if len(body) > MAX_REPORT_BYTES:
        raise ValueError(f"more than {MAX_REPORT_BYTES} bytes")
    return msgspec.json.decode(body, type=ModelProgress)
