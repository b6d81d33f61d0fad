"""The operator's process: `argosy operator`.

Owns the wiring of event source, controller and health port, how they start and stop together, and the keys of an
installation: the fleet key and a key for clients, which are created where they are missing, as the chart cannot (every
upgrade, and every GitOps tool, renders templates without a look at the cluster). Invariants:

    all parts       when one ends, all end, and the process exits
    the keys        a Secret that exists is never changed, nor read; the Secrets belong to no release and no resource,
                    so that they outlive an uninstallation and engines keep running over a reinstallation
    /readyz         ready means that something can be read and all of that was listed, whether this operator leads or
                    waits to; a namespace that is refused while another one is not changes nothing
    /healthz        alive means that the last resync is at most three periods ago, so that a process whose watches or
                    API access died silently is restarted
    /metrics        written out once in METRICS_PAUSE at most, as any pod of the cluster may ask for them, and they take
                    a moment for each service
    the port        of more than MAX_CONNECTIONS connections the oldest of the address that has most are ended, whether
                    a request is under way or never comes, and with it what nobody has read of an answer, so that one
                    pod takes neither the memory nor the probes
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from argosy_operator.cluster import router_watch
from argosy_operator.cluster.api import Api, ApiError, OperatorError
from argosy_operator.cluster.fetch_watch import http_progress
from argosy_operator.cluster.kubernetes_api import KubernetesApi
from argosy_operator.cluster.router_watch import http_fetch
from argosy_operator.config import ConfigError, OperatorConfig
from argosy_operator.event_source import watch
from argosy_operator.names import FIELD_MANAGER, MANAGED_BY_LABEL, NAME_LABEL, UNREADABLE_ANNOTATION
from argosy_operator.reconcile.controller import Controller
from argosy_operator.reconcile.leadership import LeaderElection, Leadership, fenced
from argosy_protocol.fleet_keys import KEY_FIELD, LOOK_EVERY_S, PREVIOUS_FIELD, FleetKeys
from argosy_protocol.program.listen import explain_listen_errors
from argosy_protocol.program.process import ShortCollections, return_freed_memory
from argosy_protocol.reports import LOAD_PATH, REPORT_PATH, LoadReport, RoutableReport
from argosy_resource.engine_command import COMPONENT_LABEL

logger = logging.getLogger(__name__)

EXIT_CONFIG: Final = 2
EXIT_CLUSTER: Final = 3
EXIT_ADDRESS: Final = 4
EXIT_CODES: Final = {
    0: "stopped by a signal",
    1: "a part of it failed",
    EXIT_CONFIG: "invalid settings",
    EXIT_CLUSTER: "no usable cluster",
    EXIT_ADDRESS: "the health port is taken",
}
MAX_CONNECTIONS: Final = 64
"""Kubelet, Prometheus and people have few. Each takes some kilobytes, and with the head of a request that does not end
about a megabyte."""
METRICS_PAUSE: Final = 1.0
"""Seconds for which whoever asks for metrics gets the same."""
_PERIODS: Final = 3
"""Resync periods without a resync after which the process counts as dead."""
ROUTER_KEYS_FIELD: Final = "api-keys"
_KEY_BYTES: Final = 32
"""Random bytes in each key."""
_START_RETRY: Final = 1.0
_START_TIMEOUT: Final = 30.0
"""Seconds. A chart installs permissions and operator together, and the API server takes a moment to honour them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; return one of `EXIT_CODES`."""
    parser = argparse.ArgumentParser(
        prog="argosy operator",
        description="Reconciles InferenceServices. Settings come from the environment: POD_NAMESPACE, "
        "ARGOSY_FLEET_KEY or ARGOSY_FLEET_KEY_DIR (or ARGOSY_FLEET_KEY_SECRET, to make it), ARGOSY_ENGINE_IMAGE, and "
        "optionally "
        "ARGOSY_ROUTER_KEYS_SECRET, ARGOSY_ENGINE_UPGRADE_POLICY, ARGOSY_MAX_CONCURRENT_ROLLOUTS, "
        "ARGOSY_ENGINE_SERVICE_ACCOUNTS, "
        "ARGOSY_RESERVED_SECRETS, ARGOSY_RESERVED_CLAIMS, "
        "ARGOSY_IMAGE_PULL_POLICY, ARGOSY_IMAGE_PULL_SECRETS, ARGOSY_ROUTER_URL, ARGOSY_MODEL_FETCH_ENV, "
        "ARGOSY_NODE_CACHE_PATH, ARGOSY_NODE_CACHE_SELECTOR, ARGOSY_IMAGE_VOLUMES, "
        "ARGOSY_WATCH_NAMESPACES, ARGOSY_MODEL_NAMES, ARGOSY_ARBITRARY_UIDS, ARGOSY_LEASE (with POD_NAME).",
        epilog="Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    )
    parser.add_argument(
        "--health-port", type=int, default=8082, help="port of /healthz, /readyz and /metrics; 0 for none"
    )
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=args.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if args.log_level != "DEBUG":
        logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        config = OperatorConfig.from_env(os.environ)
    except ConfigError as error:
        print(f"argosy operator: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return_freed_memory()
    try:
        with ShortCollections():
            return asyncio.run(run(config, health_port=args.health_port))
    except OperatorError as error:
        print(f"argosy operator: {error}", file=sys.stderr)
        return EXIT_CLUSTER
    except OSError as error:
        print(f"argosy operator: {error}", file=sys.stderr)
        return EXIT_ADDRESS


async def run(config: OperatorConfig, *, health_port: int) -> int:
    """Run every part until one of them ends.

    Raises:
        OperatorError: there is no cluster, or it could not be read the first time.
    """
    async with await KubernetesApi.connect() as api, aiohttp.ClientSession() as session:
        keys = FleetKeys(config.fleet_key, config.fleet_key_dir)
        if keys.given:
            config = config.with_fleet_keys(keys.given)
        config = await ensure_keys(api, config)
        if not config.fleet_key:
            raise OperatorError(f"there is no fleet key: {keys.problem}")
        if not keys.keys:
            keys = FleetKeys(config.fleet_key, config.fleet_key_dir)
        is_tls = config.router_speaks_tls
        fetch = http_fetch(
            session, keys, REPORT_PATH, RoutableReport, wait=router_watch.ROUTABLE_WAIT, is_tls=is_tls
        )
        fetch_load = http_fetch(
            session, keys, LOAD_PATH, LoadReport, wait=router_watch.LOAD_WAIT, is_tls=is_tls
        )
        leadership = Leadership() if config.lease else None
        controller = Controller(
            api, config, fetch=fetch, fetch_load=fetch_load, ask_progress=http_progress, leadership=leadership
        )
        async with _served(controller, config, health_port):
            await controller.start()  # before kopf, which looks only once which resources are served
            stop, signalled = asyncio.Event(), asyncio.Event()
            claim_signals = _on_signals(signalled.set)
            claim_signals()
            work = asyncio.create_task(_work(controller, api, config, keys, leadership), name="controller")
            sources = [
                asyncio.create_task(
                    watch(controller, scope, stop=stop, claim_signals=claim_signals), name="kopf"
                )
                for scope in controller.lister.scopes
            ]
            signals = asyncio.create_task(signalled.wait(), name="signals")
            try:
                await asyncio.wait((work, *sources, signals), return_when=asyncio.FIRST_COMPLETED)
            finally:
                work.cancel()
                signals.cancel()
                await asyncio.gather(work, signals, return_exceptions=True)
                stop.set()
                await asyncio.gather(*sources, return_exceptions=True)
            for task in (work, *sources):
                error = None if task.cancelled() else task.exception()
                if isinstance(error, OperatorError):
                    raise error
                if error is not None:
                    logger.error("stopped by a failure", exc_info=error)
                    return 1
            return 0


async def _work(
    controller: Controller,
    api: KubernetesApi,
    config: OperatorConfig,
    keys: FleetKeys,
    leadership: Leadership | None,
) -> None:
    """Reconcile, and keep the fleet key's Secret, until cancelled; with a lease, while it is held."""
    if leadership is None:
        await _work_alone(controller, api, config, keys)
        return
    election = LeaderElection(
        api,
        leadership,
        namespace=config.namespace,
        name=config.lease,
        identity=config.identity,
        annotations=lambda: {UNREADABLE_ANNOTATION: controller.lister.summary()},
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(election.run(), name="election")
            tasks.create_task(_work_alone(controller, fenced(api, leadership), config, keys), name="work")
    finally:
        await election.release()


async def _work_alone(controller: Controller, api: Api, config: OperatorConfig, keys: FleetKeys) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_fleet_key(api, config, keys), name="fleet-key")
        tasks.create_task(follow_fleet_keys(keys, controller.use_fleet_keys), name="fleet-keys")
        tasks.create_task(controller.run(), name="reconcile")


def _on_signals(stop: Callable[[], None]) -> Callable[[], None]:
    """A function that has SIGTERM and SIGINT call `stop`, whoever has taken them since."""

    def claim() -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop)

    return claim


def _served(
    controller: Controller, config: OperatorConfig, port: int
) -> contextlib.AbstractAsyncContextManager[Any]:
    """Serve the health port while the context lasts; nothing for port 0."""
    app = health_app(controller, resync_seconds=config.resync_seconds)
    return serve_health(app, port) if port else contextlib.nullcontext()


def health_app(
    controller: Controller, *, resync_seconds: float, now: Callable[[], float] = time.monotonic
) -> web.Application:
    """The application; the caller serves it. `now` is a monotonic clock."""

    async def healthz(request: web.Request) -> web.Response:
        age = now() - controller.resynced_at
        alive = age < _PERIODS * resync_seconds
        body = {"alive": alive, "lastResyncSeconds": round(age, 1), "queuedKeys": len(controller.queue)}
        return web.json_response(body, status=200 if alive else 503)

    async def readyz(request: web.Request) -> web.Response:
        reason, unreadable = controller.unready_reason, controller.lister.unreadable
        body: dict[str, Any] = {"ready": not reason, "leading": controller.is_leading}
        body |= ({"reason": reason} if reason else {}) | ({"unreadable": unreadable} if unreadable else {})
        return web.json_response(body, status=503 if reason else 200)

    written: tuple[float, bytes] | None = None

    async def metrics(request: web.Request) -> web.Response:
        nonlocal written
        if written is None or now() - written[0] >= METRICS_PAUSE:
            controller.count_services()
            written = now(), generate_latest(controller.metrics.registry)
        return web.Response(body=written[1], headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.on_response_prepare.append(_end_connection)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    return app


async def _end_connection(_request: web.Request, response: web.StreamResponse) -> None:
    """Answer one request of a connection: any pod may connect, and those that are sent ahead are all answered in one
    turn of the event loop."""
    response.force_close()


@contextlib.asynccontextmanager
async def serve_health(app: web.Application, port: int, host: str = "") -> AsyncIterator[int]:
    """Serve the application while the context lasts; yields the port, which is a free one for 0.

    Args:
        host: all addresses if empty.

    Raises:
        CannotListen: the port is taken.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    http = runner.server

    def accept() -> asyncio.BaseProtocol:
        _make_room(http)
        return http()

    try:
        with explain_listen_errors(host, port, port_flag="--health-port"):
            server = await asyncio.get_running_loop().create_server(accept, host or None, port)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _make_room(http: web.Server) -> None:
    """End connections until there is room for one more. Not by closing them: that waits until the peer has read all
    that was written, which may be never."""
    by_address: dict[str, deque[asyncio.Transport]] = {}
    num_open = 0
    for connection in http.connections:  # the oldest first
        transport = connection.transport
        if isinstance(transport, asyncio.Transport) and not transport.is_closing():
            peer = transport.get_extra_info("peername") or ("",)
            by_address.setdefault(str(peer[0]), deque()).append(transport)
            num_open += 1
    for _ in range(num_open + 1 - MAX_CONNECTIONS):
        max(by_address.values(), key=len).popleft().abort()


async def ensure_keys(api: Api, config: OperatorConfig, timeout: float = _START_TIMEOUT) -> OperatorConfig:
    """Create the Secrets that are missing, and return the settings with the fleet key. Once its Secret exists, the pod
    has it mounted, so nothing has to be read.

    Raises:
        OperatorError: the Secret exists, but this process was started without its key.
        ApiError: the API server refused for `timeout` seconds.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            return await _ensure(api, config)
        except ApiError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            logger.info("waiting for the API server: %s", error)
            await asyncio.sleep(_START_RETRY)


async def follow_fleet_keys(
    keys: FleetKeys, on_change: Callable[[tuple[bytes, ...], tuple[bytes, ...]], None]
) -> None:
    """Look at the mounted fleet key, and pass on its keys, and those that have left it and still count, whenever they
    change, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if keys.look() and keys.given:
            on_change(keys.given, keys.lingering)


async def keep_fleet_key(api: Api, config: OperatorConfig, keys: FleetKeys) -> None:
    """Restore the fleet key's Secret whenever it was deleted, until cancelled. Otherwise the next start of the
    operator would create another key, which no router and no engine has."""
    while True:
        await asyncio.sleep(config.resync_seconds)
        if not config.fleet_key_secret or not keys.given:
            continue
        try:
            data = dict(zip((KEY_FIELD, PREVIOUS_FIELD), keys.given, strict=False))
            await _create_secret(api, config, config.fleet_key_secret, data)
        except ApiError as error:
            logger.warning("cannot restore the Secret %s: %s", config.fleet_key_secret, error)


async def _ensure(api: Api, config: OperatorConfig) -> OperatorConfig:
    if config.router_keys_secret:
        key = f"sk-{secrets.token_hex(_KEY_BYTES)}"
        await _create_secret(api, config, config.router_keys_secret, {ROUTER_KEYS_FIELD: key.encode()})
    if config.fleet_key or not config.fleet_key_secret:
        return config
    made = secrets.token_hex(_KEY_BYTES).encode()
    if not await _create_secret(api, config, config.fleet_key_secret, {KEY_FIELD: made}):
        raise OperatorError(
            f"the Secret {config.fleet_key_secret!r} exists, but this pod was started without its field "
            f"`{KEY_FIELD}`; if a restart does not help, add the field (at least 16 bytes) or delete the Secret"
        )
    return dataclasses.replace(config, fleet_key=made)


async def _create_secret(api: Api, config: OperatorConfig, name: str, data: Mapping[str, bytes]) -> bool:
    """Create the Secret. False if one of this name exists."""
    # No instance label: GitOps tools would take the object for part of the release, and prune it.
    labels = {NAME_LABEL: "argosy", COMPONENT_LABEL: "keys", MANAGED_BY_LABEL: FIELD_MANAGER}
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": config.namespace, "labels": labels},
        "type": "Opaque",
        "data": {field: base64.b64encode(value).decode() for field, value in data.items()},
    }
    try:
        await api.create_only(manifest)
    except ApiError as error:
        if error.status == 409:
            return False
        raise
    logger.info("created the Secret %s/%s", config.namespace, name)
    return True


if __name__ == "__main__":
    sys.exit(main())
