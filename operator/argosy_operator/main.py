"""The operator's process: `argosy operator`.

Owns the wiring: event source, controller and health port, and how they start and stop together. Invariant: when any of
the parts ends, all end, and the process exits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp

from argosy_operator.cluster import load_watch, router_watch
from argosy_operator.cluster.api_server import Api
from argosy_operator.cluster.fetch_watch import http_progress
from argosy_operator.cluster.kubernetes_api import KubernetesApi
from argosy_operator.cluster.router_reports import http_fetch
from argosy_operator.config import ConfigError, OperatorConfig
from argosy_operator.errors import OperatorError
from argosy_operator.names import UNREADABLE_ANNOTATION
from argosy_operator.process.event_source import watch
from argosy_operator.process.health import health_app, serve_health
from argosy_operator.process.installation_keys import ensure_keys, follow_fleet_keys, keep_fleet_key
from argosy_operator.process.leader_election import LeaderElection
from argosy_operator.reconcile.controller import Controller
from argosy_operator.reconcile.leadership import FencedApi, Leadership
from argosy_protocol.fleet_keys import FleetKeys
from argosy_protocol.load_report import LOAD_PATH, LoadReport
from argosy_protocol.program.freed_memory import return_freed_memory
from argosy_protocol.program.short_collections import ShortCollections
from argosy_protocol.routable_report import REPORT_PATH, RoutableReport

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
    ShortCollections().install()
    try:
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
        fetch = http_fetch(session, keys, REPORT_PATH, RoutableReport, wait=router_watch.WAIT, is_tls=is_tls)
        fetch_load = http_fetch(session, keys, LOAD_PATH, LoadReport, wait=load_watch.WAIT, is_tls=is_tls)
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
            tasks.create_task(_work_alone(controller, FencedApi(api, leadership), config, keys), name="work")
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


if __name__ == "__main__":
    sys.exit(main())
