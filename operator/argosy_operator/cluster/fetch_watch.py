"""Polls the pods that fetch their model for their progress, and keeps the last report of each.

Owns one poll per fetching pod, and the view of the last reports. Must not know the pods' conditions. Pods are not
trusted: an answer is bounded in bytes and time, redirects are not followed, and one that is missing, late or wrong
changes nothing. Invariants: a report is kept as long as the container runs that made it; a pod announces at most one
change per CHANGE_INTERVAL; on average all pods together are polled at most MAX_POLLS_PER_SECOND times a second, from
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
from argosy_operator.kinds import Name
from argosy_operator.observed.model_fetch import fetch_container
from argosy_protocol.model_progress import MAX_REPORT_BYTES, PROGRESS_PATH, ModelProgress, summary
from argosy_resource.engine_address import PROGRESS_PORT

logger = logging.getLogger(__name__)

POLL_INTERVAL: Final = 2.0
"""Seconds between two polls of one pod while its report stays the same."""
CHANGE_INTERVAL: Final = 5.0
"""Seconds between two changes of one pod's report. Each is a write to the API server."""
MAX_POLLS_PER_SECOND: Final = 50
"""Polls of all pods together. With more than 100 pods each of them is polled less often."""
MAX_POLLS_AT_ONCE: Final = 20
"""Polls of all pods that run at the same time. Bounds what pods that all answer as slowly as they may can occupy."""
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
        self._reports: dict[str, ModelProgress] = {}
        self._running = asyncio.Semaphore(MAX_POLLS_AT_ONCE)

    @property
    def view(self) -> Mapping[str, ModelProgress]:
        """The last report of each pod that fetches, by the pod's UID."""
        return self._reports

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
        self._polled[pod.uid] = pod, asyncio.create_task(self._poll(pod), name=f"fetch of {pod.name}")

    def forget(self, uid: str) -> None:
        """Stop polling a pod, and drop its report."""
        _, task = self._polled.pop(uid, (None, None))
        if task is not None:
            task.cancel()
        self._reports.pop(uid, None)

    def close(self) -> None:
        """Stop polling."""
        for uid in list(self._polled):
            self.forget(uid)

    async def _poll(self, pod: FetchingPod) -> None:
        # An operator that starts finds all fetching pods at once.
        await asyncio.sleep(len(self._polled) / MAX_POLLS_PER_SECOND * random.random())  # noqa: S311 - as below
        while True:
            has_changed = await self._refresh(pod)
            interval = CHANGE_INTERVAL if has_changed else POLL_INTERVAL
            interval = max(interval, len(self._polled) / MAX_POLLS_PER_SECOND)
            await asyncio.sleep(interval * random.uniform(1.0, 1.2))  # noqa: S311 - spreads the pods over time

    async def _refresh(self, pod: FetchingPod) -> bool:
        """Poll a pod once. Whether its report changed in a way that is shown."""
        try:
            async with self._running, asyncio.timeout(DEADLINE):
                report = await self._ask(pod.address)
        except UNUSABLE as error:
            logger.debug("pod %s does not report its fetch: %s", pod.name, error or type(error).__name__)
            return False
        before = self._reports.get(pod.uid)
        if before is not None and summary(before) == summary(report):
            return False
        self._reports[pod.uid] = report
        self._on_change(pod.service)
        return True


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
        answer = await _read(reader)
    finally:
        writer.transport.abort()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0].split(b" ")
    if status[0] not in (b"HTTP/1.0", b"HTTP/1.1") or status[1:2] != [b"200"]:
        raise ValueError("no answer of status 200")
    if len(body) > MAX_REPORT_BYTES:
        raise ValueError(f"more than {MAX_REPORT_BYTES} bytes")
    return msgspec.json.decode(body, type=ModelProgress)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The whole answer, head and body.

    Raises:
        ValueError: it is longer than MAX_ANSWER_BYTES.
    """
    answer = b""
    while chunk := await reader.read(MAX_ANSWER_BYTES):
        answer += chunk
        if len(answer) > MAX_ANSWER_BYTES:
            raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
    return answer
