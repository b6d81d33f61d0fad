"""A router in front of fake engines, inside the test's loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client import generate_latest

from argosy_batch.config import BatchConfig
from argosy_batch.program import BatchProgram
from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService, encode_fleet
from argosy_protocol.reports import ReplicaState
from argosy_router.config import BatchLimits, RouterConfig
from argosy_router.discovery.sources import Publish, snapshot_of
from argosy_router.fleet.replica import Replica
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.observability.lines import LineWriter
from argosy_router.server import Router

from .fake_engine import MODEL, FakeEngine

DEADLINE_S = 60.0
"""For a machine that has other work; nothing waits this long when all is well."""
TICK_S = 0.01
FLEET_KEY = b"a fleet key of tests"
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""An empty one: loading the system's certificates costs every test a tenth of a second."""


class StoppedClock:
    """A clock for a router's deadlines and requests that a test moves by hand, so that no deadline passes because this
    process, which runs the router and all that it talks to, was paused."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def __call__(self) -> float:
        return self._now

    async def advance(self, wheel: TimerWheel, seconds: float) -> None:
        """Let time pass; returns when the deadlines of the wheel that are due by then have fired."""
        passed = asyncio.Event()
        Deadline(wheel, passed.set).set(seconds)
        self._now += seconds + 2 * TICK_S  # the bucket that it is in has passed
        await passed.wait()


class UnpausedClock:
    """The time, but for pauses of this process, which runs the router and all that it talks to: a deadline must not
    pass because another process had the processor."""

    LONGEST_STEP_S = 0.25

    def __init__(self) -> None:
        self._now = self._seen = time.monotonic()

    def __call__(self) -> float:
        seen = time.monotonic()
        self._now += min(seen - self._seen, self.LONGEST_STEP_S)
        self._seen = seen
        return self._now


class ManualDiscovery:
    """Publishes what a test hands it."""

    def __init__(self, document: FleetDocument) -> None:
        self._document = document
        self._publish: Publish | None = None

    async def run(self, publish: Publish) -> None:
        self._publish = publish
        self.set(self._document)
        await asyncio.Event().wait()

    def set(self, document: FleetDocument) -> None:
        assert self._publish is not None
        self._publish(snapshot_of(document, encode_fleet(document)))


def service(engines: Sequence[FakeEngine], **fields: Any) -> FleetService:
    """A service of these engines, named r0, r1, ..."""
    endpoints = tuple(Endpoint(name=f"r{number}", url=engine.url) for number, engine in enumerate(engines))
    given = {"namespace": "default", "name": "svc", "uid": "uid-1", "model": MODEL, "endpoints": endpoints}
    return FleetService(**{**given, **fields})


@dataclass
class Rig:
    """A running router and what tests ask of it."""

    router: Router
    discovery: ManualDiscovery
    http: httpx.AsyncClient
    engines: Sequence[FakeEngine] = field(default_factory=list)
    clock: StoppedClock | None = None
    jobs: BatchProgram | None = None
    """`argosy batch`, with a storage."""

    def replica(self, number: int) -> Replica:
        return next(r for r in self.router.fleet.replicas() if r.name == f"r{number}")

    async def pass_time(self, seconds: float) -> None:
        """Let time pass on the router's stopped clock; returns when the deadlines that are due by then have fired."""
        assert self.clock is not None
        await self.clock.advance(self.router.wheel, seconds)

    async def until_answering(self, number: int, attempts: int = 1) -> None:
        """Returns when so many responses of this replica have begun."""
        inflight = self.replica(number).inflight_attempts
        await self.until(lambda: sum(attempt.is_answering for attempt in inflight) == attempts)

    async def until_state(self, number: int, *states: ReplicaState) -> None:
        await self.until(lambda: self.replica(number).state in states)

    async def until(self, is_true: Callable[[], bool]) -> None:
        await until(is_true)

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=chat(content, **fields))

    def metric(self, text: str) -> float:
        """Value of the sample whose line starts with `text`."""
        for line in self.router.metrics.render().decode().splitlines():
            if line.startswith("argosy_router_" + text):
                return float(line.rpartition(" ")[2])
        return 0.0

    def jobs_metric(self, text: str) -> float:
        """The same of `argosy batch`."""
        assert self.jobs is not None
        for line in generate_latest(self.jobs.metrics.registry).decode().splitlines():
            if line.startswith("argosy_batch_" + text):
                return float(line.rpartition(" ")[2])
        return 0.0


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


async def until(is_true: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Yields to the loop until `is_true`. Fails after the deadline."""
    async with asyncio.timeout(deadline_s):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def rig(
    engines: Sequence[FakeEngine] = (),
    *,
    document: FleetDocument | None = None,
    wait: bool = True,
    fields: dict[str, Any] | None = None,
    stderr: LineWriter | None = None,
    clock: StoppedClock | None = None,
    storage: BatchConfig | None = None,
    prepare: Callable[[BatchProgram], None] = lambda _: None,
    batch_share: float = 0.5,
    **config: Any,
) -> AsyncIterator[Rig]:
    """Starts the engines that are not running and a router over them; waits until all are routable.

    Args:
        storage: of `argosy batch`, which is started as well.
        prepare: called with that before it starts.
        clock: what the router's deadlines go by, instead of an `UnpausedClock`.
    """
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            if not engine.port:
                await stack.enter_async_context(engine)
        discovery = ManualDiscovery(document or FleetDocument(services=(service(engines, **(fields or {})),)))
        given: dict[str, Any] = {
            "port": 0,
            "admin_port": -1,
            "access_log": False,
            "replicas": ("http://unused:1",),
        }
        jobs = None
        if storage is not None and storage.storage:
            jobs = BatchProgram(dataclasses.replace(storage, port=0, fleet_key=FLEET_KEY))
            prepare(jobs)
            await stack.enter_async_context(jobs.serving())
            given |= {
                "fleet_key": FLEET_KEY,
                "batch": BatchLimits(batch_url=jobs.url, batch_share=batch_share),
            }
        router = Router(
            RouterConfig(**{**given, **config}),
            discovery=discovery,
            tick_s=TICK_S,
            clock=clock or UnpausedClock(),
            stderr=stderr,
        )
        await stack.enter_async_context(router.serving())
        if jobs is not None:
            jobs.router.url = router.url
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=router.url, timeout=DEADLINE_S, verify=_NO_TLS, trust_env=False)
        )
        await until(lambda: router.fleet.is_loaded)
        if wait:
            await until(lambda: all(replica.is_routable for replica in router.fleet.replicas()))
        yield Rig(router, discovery, http, engines, clock, jobs)


@contextlib.asynccontextmanager
async def raw(router: Router) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain TCP connection to the router."""
    reader, writer = await asyncio.open_connection(*router.address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Everything until the router closes."""
    async with asyncio.timeout(DEADLINE_S):
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                data += piece
        return data


async def read_until(reader: asyncio.StreamReader, is_enough: Callable[[bytes], bool]) -> bytes:
    """Everything up to the piece with which it is enough."""
    async with asyncio.timeout(DEADLINE_S):
        data = b""
        while not is_enough(data):
            piece = await reader.read(65536)
            assert piece, f"the router has closed after {len(data)} bytes"
            data += piece
        return data


def is_settled(r: Rig) -> bool:
    """Whether no request is in flight and no replica is charged for one."""
    loads = [replica.load for replica in r.router.fleet.replicas()]
    return r.router.requests.inflight == 0 and all(
        (load.inflight, load.inflight_tokens, load.queued_tokens, load.requests, load.wait_s)
        == (0, 0, 0, 0, 0)
        for load in loads
    )
