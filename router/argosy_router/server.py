"""The router process: assembly of its parts, start, drain and stop; the rotation of the fleet key; and the OpenAPI
document of its main port.

Owns: the lifecycle of one router in one event loop; when the mounted Secret with the fleet keys is looked at, and when
replicas are asked for the newest. Must not know: command line, environment.
Invariants: every task has an owner here or in the fleet, and `run` returns only when all have ended. A replica is sent
a newer key once it has accepted that one here, and not before; at rest, with every replica on the newest key, no
replica is asked anything.
"""

# Not compiled: runs once, at the start.

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from argosy_protocol import __version__
from argosy_protocol.api_descriptions import (
    GENERATION,
    MODELS,
    ORDER,
    STORED_RESPONSES,
    TEXT,
    Operation,
    Route,
    Schema,
    openapi_document,
)
from argosy_protocol.batch_program import (
    MAX_EXPIRY_S,
    MAX_LISTED_FILES,
    MIN_EXPIRY_S,
    BatchObject,
    CreateBatch,
    DeletedFile,
    FileObject,
    Page,
    batch_keys,
)
from argosy_protocol.batch_program import MAX_LISTED_BATCHES as MAX_BATCHES
from argosy_protocol.fleet_keys import LOOK_EVERY_S, FleetKeys
from argosy_protocol.headers import KeyRing, internal_key
from argosy_protocol.program.listen import BACKLOG, explain_listen_errors, listen
from argosy_protocol.program.process import begun_anew
from argosy_protocol.reports import ADMIN_KEY_UID
from argosy_router import metrics as define
from argosy_router.admin.app import admin_keys, build_admin
from argosy_router.admin.overview import History, LoadReports, Overviews
from argosy_router.admin.server import AdminServer
from argosy_router.auth.api_keys import ApiKeys
from argosy_router.batch import BatchClient, ForwardedRoutes
from argosy_router.config import DEFAULT_ADMIN_PORT, ConfigError, RouterConfig
from argosy_router.discovery.sources import Discovery, DnsDiscovery, FileDiscovery, StaticDiscovery
from argosy_router.fleet.fleet import Fleet, FleetSnapshot
from argosy_router.fleet.replica import Replica
from argosy_router.flow_control import FlowController
from argosy_router.http.deadlines import TICK_S, TimerWheel
from argosy_router.http.messages import CrossOrigin
from argosy_router.http.server_connection import ServerConnection, ServerState
from argosy_router.http.tls import ServerTls, TlsListener
from argosy_router.http.tls import watch as watch_tls
from argosy_router.http.upstream import UpstreamError, UpstreamTls, fetch
from argosy_router.metric_series import Labels
from argosy_router.metrics import Metrics
from argosy_router.native.build import BUILD_KIND
from argosy_router.observability.lines import LineWriter, TraceCapture
from argosy_router.observability.request_log import AccessLog, UsageLedger
from argosy_router.proxy.accounting import RequestAccounting
from argosy_router.proxy.answer import CommentSchedule
from argosy_router.proxy.application import BackgroundLoad, RouterApplication
from argosy_router.proxy.exchange import Dispatcher, Exchange, QueuedCall, RequestHandler, Shared
from argosy_router.proxy.large_bodies import LargeBodies
from argosy_router.proxy.resilience import Hedging, OutlierDetector, RetryBudgets
from argosy_router.responses.background_responses import BackgroundResponses
from argosy_router.responses.response_store import ResponseStore
from argosy_router.responses.stateful_routes import StatefulRoutes

if TYPE_CHECKING:
    from argosy_router.ext_proc import ExtProcServer
    from argosy_router.observability.tracing import Tracer

log = logging.getLogger(__name__)

DISCOVERY = "discovery"
MAX_DESCRIBED = 64
"""Requests that `Router.describe` lists; the rest is only counted."""


class Router:
    """One router. Create it inside the event loop that runs it."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        discovery: Discovery | None = None,
        tick_s: float = TICK_S,
        clock: Callable[[], float] | None = None,
        stderr: LineWriter | None = None,
    ) -> None:
        """
        Args:
            clock: clock of deadlines and requests, in seconds; by default the event loop's and `time.monotonic`.
            stderr: the writer for the access log, if something else writes to standard error, too.
        """
        config.check()
        self.config = config
        self._loop = asyncio.get_running_loop()
        self.wheel = TimerWheel(self._loop, tick_s, clock)
        now = clock or time.monotonic
        self._tls = _server_tls(config)
        self._admin_tls = _admin_tls(config)
        self._replica_tls = _replica_tls(config)
        self._fleet_keys = FleetKeys(config.fleet_key, config.fleet_key_dir)
        if config.fleet_key_dir is not None and not self._fleet_keys.keys:
            raise ConfigError(f"ARGOSY_FLEET_KEY_DIR: {self._fleet_keys.problem}")
        self._admin_keys = KeyRing(admin_keys(self._fleet_keys.keys))
        self.fleet = Fleet(
            self.wheel,
            config.upstream,
            tls=self._replica_tls,
            fleet_keys=self._fleet_keys,
            index_memory=config.index_memory,
            policy=config.policy or "",
        )
        self._batch_keys = KeyRing(batch_keys(self._fleet_keys.keys))
        self.key_rotation = KeyRotation(self._fleet_keys, self.fleet, self._admin_keys, self._batch_keys)
        self.metrics = Metrics(self.fleet)
        self._restarts = define.TASK_RESTARTS.counter()
        self._stderr = stderr or LineWriter(2)
        self._access_log = AccessLog(
            self._stderr, is_enabled=config.access_log, line_format=config.access_log_format
        )
        self._ledger = UsageLedger(config.usage_log, socket.gethostname())
        self.flow_control = FlowController(
            self.fleet, self.wheel, config.flow_control, lambda: self.server.connection_limit.free, now
        )
        self.metrics.add(
            define.ACCESS_LOG_DROPPED_LINES.value(lambda: self._access_log.dropped),
            *self._ledger.series(),
            *self.flow_control.series(),
        )
        self._capture = _trace_capture(config)
        self._tracer = _tracer(config)
        self.accounting = RequestAccounting(
            self.metrics, self._access_log, self._ledger, capture=self._capture, policy=config.policy or ""
        )
        dispatcher = Dispatcher(
            self.fleet,
            self.metrics,
            self.flow_control,
            Hedging(self.fleet, self.wheel, config.hedge_after),
            first_byte_timeout_s=config.first_byte_timeout_s,
            request_timeout_s=config.request_timeout_s,
        )
        outliers = OutlierDetector(self.fleet, self.metrics)
        self.requests = RequestHandler(
            self.flow_control,
            RetryBudgets(self.fleet),
            CommentSchedule(config.flow_control.keep_alive_s, config.flow_control.keep_alive_after_s),
            Shared(dispatcher, outliers, self.accounting, self.wheel, now),
        )
        self._keys = ApiKeys(
            config.api_keys,
            config.api_keys_file,
            routers=config.routers or (config.expected_routers if config.kubernetes else 1),
        )
        self._routers_are_counted = False
        self.large_bodies = LargeBodies()
        """Reads large bodies in another process."""
        background = BackgroundLoad(self.flow_control, config.batch.batch_share, now)
        self.application = RouterApplication(
            self.fleet,
            self.requests,
            self.accounting,
            self._keys.table,
            cross_origin=CrossOrigin(config.allowed_origins),
            large_bodies=self.large_bodies,
            batch_keys=self._batch_keys,
            background=background,
            tracer=self._tracer,
            # Only the documented default may be disclosed; another port may have been chosen to stay unknown.
            admin_port=config.admin_port if config.admin_port == DEFAULT_ADMIN_PORT else None,
        )
        self.metrics.add(*self.large_bodies.series())
        self._discovery = discovery or self._configured_discovery()
        self.server = ServerState(self.application, config.server, self.wheel)
        self.gateway = self._gateway_server()
        """The port for gateways; None without one."""
        self._batch_client = self._open_batch_client()
        """`argosy batch`; None without one."""
        self.responses = None if self._batch_client is None else self._stateful_routes(self._batch_client)
        """Stored responses."""
        self.forwarded = None if self._batch_client is None else self._forwarded_routes(self._batch_client)
        """Files and batches."""
        # Made before there are requests that would wait for it.
        document = encoded_document(
            tuple(self.application.endpoints), has_storage=self._batch_client is not None
        )
        self.application.document = lambda: document
        self.metrics.add(
            define.CLIENT_CONNECTIONS.value(lambda: len(self.server.connections)),
            define.REFUSED_CONNECTIONS.value(lambda: self.server.connection_limit.refused),
            define.UNREAD_RESPONSES_CUT.value(lambda: self.server.unread_cut),
            define.STREAM_PAUSES.value(lambda: self.server.read_coalescer.pauses),
            define.INFLIGHT_BODY_BYTES.value(lambda: self.server.body_memory.held),
            define.LIMITING_ROUTERS.reading(self._routers),
            define.BATCH_REQUESTS_INFLIGHT.value(lambda: background.inflight),
            self._restarts,
        )
        self._listener: asyncio.Server | TlsListener | None = None
        self.admin: AdminServer | None = None
        """The admin server; None before it listens, or without an admin port."""
        self._tasks: list[asyncio.Task[None]] = []
        self.stopping = asyncio.Event()
        """Set this to drain and stop."""
        self.hurry = asyncio.Event()
        """Set this to end a drain at once."""

    def _open_batch_client(self) -> BatchClient | None:
        url = self.config.batch.batch_url
        if not url:
            return None
        client = BatchClient(url, lambda: batch_keys(self._fleet_keys.keys))
        self.metrics.add(define.BATCH_UNAVAILABLE.value(lambda: client.has_failed))
        return client

    def _stateful_routes(self, program: BatchClient) -> StatefulRoutes:
        stored = ResponseStore(program, self.config.batch.response_ttl_s, read=self.large_bodies.read_record)
        self.metrics.add(*stored.series())
        routes = StatefulRoutes(
            stored,
            BackgroundResponses(stored, find=self.large_bodies.find_response),
            self.application.create_response,
            self.application.refuse,
            self.config.server.max_body_bytes,
            self.server.body_memory,
            self.large_bodies.find_response,
        )
        self.application.responses = routes
        return routes

    def _forwarded_routes(self, program: BatchClient) -> ForwardedRoutes:
        routes = ForwardedRoutes(program, self.accounting.count_rejection)
        self.application.stored = routes
        return routes

    def _gateway_server(self) -> ExtProcServer | None:
        config = self.config
        if config.ext_proc_port < 0:
            return None
        try:
            from argosy_router.ext_proc import ExtProcServer
            from argosy_router.gateway import Intake
        except ImportError as error:
            raise ConfigError(
                f"--ext-proc-port needs gRPC ({error.name} is missing): `pip install '.[gateway]'` in the checkout"
            ) from None
        intake = Intake(self.application, self.requests, config.server, self.server.body_memory)
        return ExtProcServer(config, intake)

    def _configured_discovery(self) -> Discovery:
        config = self.config
        if config.fleet_file is not None:
            return FileDiscovery(config.fleet_file)
        if config.kubernetes:
            from argosy_router.discovery.kubernetes import KubernetesDiscovery

            return KubernetesDiscovery(config.fleet_namespace, config.fleet_configmap)
        if config.replica_dns:
            return DnsDiscovery(config.replica_dns, config.replica_key, self.wheel, self._replica_tls)
        return StaticDiscovery(config.replicas, config.replica_key, self.wheel, self._replica_tls)

    # addresses

    @property
    def address(self) -> tuple[str, int]:
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    @property
    def url(self) -> str:
        return "{}://{}:{}".format("https" if self._tls else "http", *self.address)

    @property
    def admin_url(self) -> str:
        assert self.admin is not None
        return "{}://{}:{}".format("https" if self._admin_tls else "http", *self.admin.address)

    def describe(self) -> str:
        """Describe for people what the router is doing: the requests of its clients, oldest first."""
        now = self.requests.now()
        attached = [connection.listener for connection in self.server.connections]
        exchanges = [each.exchange if isinstance(each, QueuedCall) else each for each in attached]
        requests = [each for each in exchanges if isinstance(each, Exchange)]
        requests.sort(key=lambda request: request.outcome.started)
        lines = [
            f"state of the router: connections={len(attached)} requests={self.requests.inflight} "
            f"replicas={sum(1 for _ in self.fleet.replicas())} draining={self.application.is_draining}"
        ]
        lines += [f"    {request.describe(now)}" for request in requests[:MAX_DESCRIBED]]
        if len(requests) > MAX_DESCRIBED:
            lines.append(f"    and {len(requests) - MAX_DESCRIBED} more")
        return "\n".join(lines)

    # lifecycle

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stopping`, then drain. A second signal ends the drain at once.

        Raises:
            CannotListen: an address is in use or does not belong to this machine.
        """
        async with self.serving():
            with self._signals():
                log.info("router on %s (argosy %s, %s build)", self.url, __version__, BUILD_KIND)
                await self.stopping.wait()
                await self.drain()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Router]:
        """Listen and follow the fleet inside the block; at its end, close everything without draining."""
        try:
            await self._start()
            yield self
        finally:
            await self.stop()

    async def _start(self) -> None:
        config = self.config
        tls = self._tls
        with explain_listen_errors(config.host, config.port):
            self._listener = (
                await self._loop.create_server(
                    lambda: ServerConnection(self.server), config.host, config.port, backlog=BACKLOG
                )
                if tls is None
                else TlsListener(self.server, lambda: tls.context, config.host, config.port, BACKLOG)
            )
        admin_sockets = self._listen_for_admin() if config.admin_port >= 0 else []
        if self.gateway is not None:
            await self.gateway.start()
        for files in (self._tls, self._admin_tls, self._replica_tls):
            if files is not None:
                self.own(partial(watch_tls, files), "TLS files")
        self.own(lambda: self._discovery.run(self._apply), DISCOVERY)
        self.own(self.fleet.maintain, "maintenance")
        self.own(self._keys.watch, "keys")
        if config.fleet_key_dir is not None:
            self.own(self.key_rotation.run, "fleet keys")
        if config.usage_log is not None:
            self.own(self._ledger.run, "usage ledger")
        if self._capture is not None:
            self.own(self._capture.run, "trace capture")
        if admin_sockets:
            await self._start_admin(admin_sockets)

    def _listen_for_admin(self) -> list[socket.socket]:
        config = self.config
        host, flag = (config.admin_host, "--admin-host") if config.admin_host else (config.host, "--host")
        return listen(host, config.admin_port, host_flag=flag, port_flag="--admin-port")

    def _apply(self, snapshot: FleetSnapshot) -> None:
        if snapshot.routers and not self.config.routers:
            self._keys.table.divide(snapshot.routers, self.requests.now())
            self._routers_are_counted = True
        self.fleet.apply(snapshot)

    def _routers(self) -> Iterator[tuple[Labels, float]]:
        """Yield how many routers divide the limits of keys, by how that is known."""
        is_assumed = self.config.kubernetes and not self.config.routers
        source = "counted" if self._routers_are_counted else "assumed" if is_assumed else "configured"
        yield (source,), self._keys.table.routers

    async def _start_admin(self, sockets: list[socket.socket]) -> None:
        config = self.config
        history = History(self.metrics)
        app = build_admin(
            self.fleet,
            self.metrics,
            self.accounting.attempt_log,
            self.accounting.refusal_log,
            self._admin_keys,
            frozenset((config.host, config.admin_host, socket.gethostname(), *config.admin_names)),
            self.application,
            Overviews(
                self.fleet, self.metrics, history, socket.gethostname(), lambda: len(self.server.connections)
            ),
            LoadReports(self.fleet, self.flow_control),
            socket.gethostname(),
        )
        self.own(history.run, "history")
        tls = self._admin_tls.context if self._admin_tls is not None else None
        self.admin = AdminServer(app, config.admin_host or config.host, config.admin_port, tls)
        self.own(partial(self.admin.serve, sockets), "admin")
        await self.admin.listening.wait()

    def own(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Do work until the router stops. What fails is begun anew, except the discovery, without which the router
        would go on with replicas that are gone."""
        running = work() if name == DISCOVERY else begun_anew(name, work, lambda: self._restarts.add((name,)))
        task = asyncio.create_task(running, name=name)
        task.add_done_callback(self._on_task_done)
        self._tasks.append(task)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("%s failed", task.get_name(), exc_info=error)
            self.stopping.set()

    @contextlib.contextmanager
    def _signals(self) -> Any:
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            self._loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in signals:
                self._loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.stopping.is_set():
            self.hurry.set()
        self.stopping.set()

    async def drain(self) -> None:
        """Drop readiness, close the listener and then idle connections, and wait for the other requests to end,
        including those still being received."""
        self.application.is_draining = self.server.is_draining = True
        self.fleet.changed()
        await _wait(self.hurry, self.config.drain_settle_s)
        assert self._listener is not None
        self._listener.close()
        for connection in list(self.server.connections):
            connection.drain()
        log.info("draining %d requests", self.server.busy)
        waits = [asyncio.ensure_future(wait) for wait in (self._ended(), self.hurry.wait())]
        await asyncio.wait(waits, timeout=self.config.shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.server.busy:
            log.warning("cutting %d requests", self.server.busy)

    async def _ended(self) -> None:
        """Wait until every request has ended, on the main port and in the admin page's playground."""
        await self.server.emptied()
        await self.large_bodies.idle()
        await self.requests.idle.wait()

    async def stop(self) -> None:
        """Close the listener, cut the requests that still run, and end all tasks."""
        if self._listener is not None:
            self._listener.close()
        if isinstance(self._listener, TlsListener):
            await self._listener.cut()
        if self.gateway is not None:
            await self.gateway.stop()
        for connection in list(self.server.connections):
            if connection.is_busy:
                connection.cut()
            else:
                connection.drain()
        await self.large_bodies.close()
        if self.forwarded is not None:
            await self.forwarded.close()
        if self.responses is not None:
            await self.responses.close()
        if self._batch_client is not None:
            await self._batch_client.close()
        if self.admin is not None:
            self.admin.end()
        for task in self._tasks:
            if task.get_name() != "admin":
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.close()
        self.wheel.close()
        self._access_log.flush()
        await asyncio.to_thread(self._stderr.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def _trace_capture(config: RouterConfig) -> TraceCapture | None:
    if config.record is None:
        return None
    try:
        return TraceCapture(config.record, config.record_max_bytes)
    except OSError as error:
        raise ConfigError(f"--record {config.record} cannot be written: {error.strerror}") from None


def _tracer(config: RouterConfig) -> Tracer | None:
    if not config.otlp_traces_endpoint:
        return None
    try:
        from argosy_router.observability.tracing import Tracer
    except ImportError:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: `pip install '.[otlp]'` in the checkout"
        ) from None
    return Tracer(config.otlp_traces_endpoint, socket.gethostname())


def _server_tls(config: RouterConfig) -> ServerTls | None:
    """TLS of the OpenAI endpoint; None for plain HTTP.

    Raises:
        ConfigError: a file cannot be used.
    """
    if config.ssl_certfile is None:
        return None
    try:
        return ServerTls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile or --ssl-ca-certs: {error}") from None


def _admin_tls(config: RouterConfig) -> ServerTls | None:
    """TLS of the admin port, with the endpoint's certificate. It asks for no client certificates, since kubelets and
    the operator have none; the port has a key.

    Raises:
        ConfigError: a file cannot be used.
    """
    return _server_tls(replace(config, ssl_ca_certs=None))


def _replica_tls(config: RouterConfig) -> UpstreamTls:
    """TLS towards https replicas.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        return UpstreamTls(config.replica_ca_certs, verifies=not config.replica_insecure)
    except OSError as error:
        raise ConfigError(f"--replica-ca-certs: {error}") from None


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


KEY_PROBE_PATH = "/v1/models"
"""Every engine that has a key asks for it here, and answers without a computation."""
KEY_PROBE_TIMEOUT_S = 5.0
KEY_PROBES_AT_ONCE = 16
"""Replicas that are asked at the same time."""
EAGER_KEY_ROUNDS = 600
"""Rounds after a change in which each replica is asked; the new key comes with the next sync of its kubelet."""
SLOW_KEY_ROUNDS = 30
"""After these, replicas are asked once in so many rounds: vLLM and SGLang keep their key until they are replaced."""


class KeyRotation:
    """Follows the fleet keys of one router: new keys reach services and admin port, and each replica is moved to the
    newest. At rest, with every replica on the newest key, no replica is asked anything."""

    def __init__(
        self,
        keys: FleetKeys,
        fleet: Fleet,
        admin: KeyRing,
        batch: KeyRing,
        *,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`admin` are the keys of the admin port, `batch` those of `argosy batch`."""
        self._keys = keys
        self._fleet = fleet
        self._admin = admin
        self._batch = batch
        self._look_every_s = look_every_s
        self._round = 0

    async def run(self) -> None:
        """Follow the keys until cancelled. A replica that hangs delays no look at the keys."""
        probe: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._look_every_s)
                if self._look() and (probe is None or probe.done()):
                    probe = tasks.create_task(self._probe())

    async def step(self) -> None:
        """Look at the files once, and ask the replicas that do not get the newest key yet."""
        if self._look():
            await self._probe()

    def _look(self) -> bool:
        """Look at the files, and return whether replicas are to be asked in this round."""
        self._round += 1
        if self._keys.look():
            self._round = 0
            self._fleet.fleet_keys_changed()
            self._admin.replace(internal_key(key, ADMIN_KEY_UID) for key in self._keys.keys)
            self._batch.replace(batch_keys(self._keys.keys))
        return self._round < EAGER_KEY_ROUNDS or self._round % SLOW_KEY_ROUNDS == 0

    async def _probe(self) -> None:
        gate = asyncio.Semaphore(KEY_PROBES_AT_ONCE)

        async def ask(replica: Replica) -> None:
            async with gate:
                await _try_newest(replica)

        behind = [
            replica
            for replica in self._fleet.replicas()
            if not replica.key.is_newest and replica.link != "connecting"
        ]
        if behind:
            await asyncio.gather(*(ask(replica) for replica in behind))


async def _try_newest(replica: Replica) -> None:
    """Have the replica sent the newest key from now on, if it accepts that."""
    newest = replica.key.newest
    if not newest:
        return
    try:
        response = await fetch(replica.pool, KEY_PROBE_PATH, newest, KEY_PROBE_TIMEOUT_S)
    except UpstreamError:
        return
    if response.status == 200 and replica.key.newest == newest:
        replica.key.current = newest
        log.info("replica %s accepts the new key", replica.name)


_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    },
    "additionalProperties": False,
}
_BINARY: Mapping[str, Schema] = {"application/octet-stream": {}}
_FILES_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED_FILES},
    "order": ORDER,
    "after": TEXT,
    "purpose": TEXT,
}
_BATCHES_QUERY = {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_BATCHES}, "after": TEXT}
_STATE = (
    *(Route("GET", path, Operation()) for path in ("/health", "/ping", "/ready", "/version", "/load")),
    Route("POST", "/ping", Operation()),
    Route("GET", "/metrics", Operation(answer={"text/plain": TEXT})),
    Route("GET", "/openapi.json", Operation()),
    Route("GET", "/docs", Operation(answer={"text/html": TEXT})),
)
_STORED = (
    *STORED_RESPONSES,
    Route("GET", "/v1/files", Operation((), Page[FileObject], query=_FILES_QUERY)),
    Route("POST", "/v1/files", Operation((), FileObject, body={"multipart/form-data": _FORM})),
    Route("GET", "/v1/files/{name}", Operation((), FileObject)),
    Route("DELETE", "/v1/files/{name}", Operation((), DeletedFile)),
    Route("GET", "/v1/files/{name}/content", Operation(answer=_BINARY)),
    Route("GET", "/v1/batches", Operation((), Page[BatchObject], query=_BATCHES_QUERY)),
    Route("POST", "/v1/batches", Operation([CreateBatch], BatchObject)),
    Route("GET", "/v1/batches/{name}", Operation((), BatchObject)),
    Route("POST", "/v1/batches/{name}/cancel", Operation((), BatchObject)),
)


def documented_routes(endpoints: Iterable[str], *, has_storage: bool) -> Iterator[Route]:
    """Yield the routes of the main port; `endpoints`: paths of the requests that the router sends to replicas."""
    for path in endpoints:
        yield Route("POST", path, GENERATION[path])
    yield from MODELS
    if has_storage:
        yield from _STORED
    yield from _STATE


@cache
def encoded_document(endpoints: tuple[str, ...], *, has_storage: bool) -> bytes:
    """Return the document as JSON. The first time takes a tenth of a second."""
    return msgspec.json.encode(
        openapi_document("Argosy router", documented_routes(endpoints, has_storage=has_storage))
    )
