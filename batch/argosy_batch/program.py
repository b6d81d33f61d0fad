"""The process: its parts, their tasks and their end.

Owns: which parts there are, start and stop. Must not know: command line, environment, what the parts do.
Invariants: a part that fails is begun anew, with a line of the log and a count; the process goes on. Batches are
released for other processes at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import uvicorn

from argosy_batch.app import BatchApp, BatchMetrics
from argosy_batch.batch_run import BatchRun, BatchRunner, RunContext
from argosy_batch.batches import BatchesApi, BatchLeases, BatchRecords
from argosy_batch.config import BatchConfig, ConfigError
from argosy_batch.directory_store import DirectoryStore
from argosy_batch.files_api import FilesApi
from argosy_batch.line_requests import LinePace, LineRequests
from argosy_batch.object_store import BlobStore, ObjectStore, Quota
from argosy_batch.router_client import AnswerMemory, RouterClient, notice_lost_peers
from argosy_batch.stored_responses import StoredResponses
from argosy_http.bounded_protocol import BoundedProtocol, HttpLimits
from argosy_http.server import EmbeddedServer
from argosy_protocol.batch_program import batch_keys
from argosy_protocol.fleet_keys import LOOK_EVERY_S, FleetKeys
from argosy_protocol.headers import KeyRing
from argosy_protocol.program.listen import listen
from argosy_protocol.program.process import begun_anew


def open_blobs(location: str) -> BlobStore:
    """Open a storage. Makes no request to a bucket.

    Raises:
        ConfigError: it cannot be used; the message says what to change.
    """
    if location.startswith(("s3://", "gs://")):
        try:
            from argosy_batch.bucket_store import BucketStore
        except ImportError:
            raise ConfigError(
                "--storage in a bucket needs obstore: `pip install '.[storage]'` in the checkout"
            ) from None
        try:
            return BucketStore(location)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    path = location
    if "://" in location:
        url = urlsplit(location)
        if url.scheme != "file" or url.netloc not in ("", "localhost"):
            raise ConfigError(
                "--storage must be a path, file:///PATH, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
            )
        path = unquote(url.path)
    try:
        return DirectoryStore(Path(path).absolute())
    except OSError as error:
        raise ConfigError(
            f"--storage {location} cannot be used: {error.strerror}; it must be writable, on a file system with hard "
            "links and locks"
        ) from None


log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4096
LIMITS: Final = HttpLimits(
    max_headers=100,
    min_body_rate=0,  # an upload comes as slowly as the router's client sends it
    write_stall_s=600.0,  # a file is read as slowly as that
    max_silent=1024,
    slow_are_kept=True,
)
"""Bounds of the connections of routers."""


class BatchProgram:
    """One process of `argosy batch`. Create it inside the event loop that runs it."""

    def __init__(self, config: BatchConfig) -> None:
        """
        Raises:
            ConfigError: the storage or the fleet key cannot be used.
        """
        config.check()
        self.config = config
        self.metrics = BatchMetrics()
        self._fleet_keys = FleetKeys(config.fleet_key, config.fleet_key_dir)
        if not self._fleet_keys.keys:
            raise ConfigError(f"ARGOSY_FLEET_KEY_DIR: {self._fleet_keys.problem}")
        self._keys = KeyRing(batch_keys(self._fleet_keys.keys))
        self.store = ObjectStore(
            open_blobs(config.storage), Quota(config.storage_max_bytes, config.storage_max_objects)
        )
        self.router = RouterClient(config.router_url, lambda: batch_keys(self._fleet_keys.keys))
        self.pace = LinePace(self.router.room, max_inflight=config.batch_max_inflight)
        self.files = FilesApi(self.store, max_file_bytes=config.max_file_bytes, ttl_s=config.storage_ttl_s)
        records = BatchRecords(self.store)
        self.leases = BatchLeases(self.store.blobs, self.store.quarantine, config.lease_s)
        requests = self.metrics.requests
        context = RunContext(
            store=self.store,
            files=self.files,
            records=records,
            leases=self.leases,
            requests=LineRequests(self.router, self.pace, lambda: requests.labels("retried").inc()),
            answers=AnswerMemory(),
            max_requests=config.batch_max_requests,
            max_pending=config.batch_max_inflight,
            on_done=lambda is_good: requests.labels("completed" if is_good else "failed").inc(),
            on_ended=lambda status: self.metrics.ended.labels(status).inc(),
        )
        self.runner = BatchRunner(
            self.leases, lambda held: BatchRun(held, context), poll_s=self.leases.renew_s
        )
        self._batches = BatchesApi(
            self.store,
            self.files,
            records,
            self.leases,
            ttl_s=config.storage_ttl_s,
            on_created=self.runner.wake,
        )
        self.responses = StoredResponses(self.store)
        self.metrics.follow(
            statuses=self.runner.statuses,
            inflight=lambda: self.pace.inflight,
            stored=lambda: (self.store.total.bytes, self.store.total.objects),
            quarantined=lambda: self.store.quarantine.num_taken,
        )
        self.app = BatchApp(
            self.files,
            self._batches,
            self.responses,
            self._keys,
            self.metrics,
            lambda: not self.stopping.is_set(),
        ).asgi()
        """The HTTP application, which `server` serves."""
        self.server = EmbeddedServer(
            uvicorn.Config(
                self.app,
                http=BoundedProtocol.for_server(limits=LIMITS),
                log_config=None,
                ws="none",
                access_log=False,
                lifespan="off",
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, int(config.shutdown_timeout_s)),
            )
        )
        self.stopping = asyncio.Event()
        """Set this to stop."""
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0
        """Where it listens; valid while it does."""

    @property
    def url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    async def run(self) -> None:
        """Serve until `stopping`; then let the requests in flight end.

        Raises:
            CannotListen: the address is in use or does not belong to this machine.
        """
        async with self.serving():
            log.info("argosy batch on %s, storage %s", self.url, self.config.storage)
            await self.stopping.wait()
            self.pace.close()
            self.runner.stop()
            await self.runner.idle(self.config.shutdown_timeout_s)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[BatchProgram]:
        """Serve and run batches inside the block; at its end, cut everything, and release the batches."""
        sockets = listen(self.config.host, self.config.port)
        for listening in sockets:
            notice_lost_peers(listening)  # a router that is gone must not keep an upload's slot
        self.port = sockets[0].getsockname()[1]
        async with self.router:
            try:
                self._begin("server", lambda: self.server.serve(sockets))
                self._begin("batches", self.runner.run)
                self._begin("sweep", lambda: self.store.sweep_for_ever(self._batches.lease_again))
                self._begin("fleet keys", self._follow_keys)
                await self.server.listening.wait()
                yield self
            finally:
                self.stopping.set()
                self.pace.close()
                await self.runner.close()
                await self.files.close()
                self.server.end()
                for task in self._tasks[1:]:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self.responses.close()
                for listening in sockets:
                    listening.close()

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        running = begun_anew(name, work, self.metrics.restarts.labels(name).inc)
        self._tasks.append(asyncio.create_task(running, name=name))

    async def _follow_keys(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._fleet_keys.look():
                self._keys.replace(batch_keys(self._fleet_keys.keys))
