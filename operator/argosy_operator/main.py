"""The operator's process: `argosy operator`.

Owns the wiring: kopf as the event source, the controller, the health port, and how they start and stop
together. kopf handlers only hand events over; there are no diff handlers, no daemons and no finalizers, so
removing the operator never blocks the deletion of anything. Invariant: when any of the parts ends, all end,
and the process exits.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import kopf
from aiohttp import web
from msgspec import Struct

from argosy_operator.api import PODS, Kind, KubernetesApi
from argosy_operator.config import ConfigError, OperatorConfig
from argosy_operator.controller import WATCHED, Controller
from argosy_operator.errors import OperatorError
from argosy_operator.health import health_app
from argosy_operator.kopf_storage import NoDiffBase, NoProgress
from argosy_operator.own_keys import ensure_keys, keep_fleet_key
from argosy_operator.routers import http_fetch
from argosy_protocol.listening import explain_listen_errors

logger = logging.getLogger(__name__)

EXIT_CONFIG: Final = 2
EXIT_CLUSTER: Final = 3
EXIT_ADDRESS: Final = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM. Exit code 0: stopped; 1: a part failed; 2: wrong settings; 3: no usable cluster; 4: the
    health port is taken."""
    parser = argparse.ArgumentParser(
        prog="argosy operator",
        description="Reconciles InferenceServices. Settings come from the environment: POD_NAMESPACE, "
        "ARGOSY_FLEET_KEY (or ARGOSY_FLEET_KEY_SECRET, to make it), ARGOSY_ENGINE_IMAGE, and optionally "
        "ARGOSY_ROUTER_KEYS_SECRET, ARGOSY_IMAGE_PULL_POLICY, ARGOSY_IMAGE_PULL_SECRETS, ARGOSY_ROUTER_URL, "
        "ARGOSY_WATCH_NAMESPACES.",
    )
    parser.add_argument(
        "--health-port", type=int, default=8082, help="port of /healthz and /metrics; 0 for none"
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
    try:
        return asyncio.run(run(config, health_port=args.health_port))
    except OperatorError as error:
        print(f"argosy operator: {error}", file=sys.stderr)
        return EXIT_CLUSTER
    except OSError as error:
        print(f"argosy operator: {error}", file=sys.stderr)
        return EXIT_ADDRESS


async def run(config: OperatorConfig, *, health_port: int) -> int:
    """Runs every part until one of them ends.

    Raises:
        OperatorError: there is no cluster, or it could not be read the first time.
    """
    async with await KubernetesApi.connect() as api, aiohttp.ClientSession() as session:
        config = await ensure_keys(api, config)
        fetch = http_fetch(session, config.fleet_key, is_tls=config.router_speaks_tls)
        controller = Controller(api, config, fetch=fetch)
        async with _served(controller, config, health_port):
            await controller.start()  # before kopf, which finds out once which resources are served
            stop = asyncio.Event()
            work = asyncio.create_task(_work(controller, api, config), name="controller")
            ready = [asyncio.Event() for _ in scopes(config)]
            sources = [
                asyncio.create_task(event_source(controller, scope, stop=stop, ready=each), name="kopf")
                for scope, each in zip(scopes(config), ready, strict=True)
            ]
            signals = asyncio.create_task(_stop_signal(ready), name="signals")
            try:
                await asyncio.wait((work, *sources, signals), return_when=asyncio.FIRST_COMPLETED)
            finally:
                # The controller first: kopf would wait for tasks it does not know.
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


async def _work(controller: Controller, api: KubernetesApi, config: OperatorConfig) -> None:
    """What the operator does until it is cancelled."""
    keeping = asyncio.create_task(keep_fleet_key(api, config), name="fleet-key")
    try:
        await controller.run()
    finally:
        keeping.cancel()


async def _stop_signal(ready: Sequence[asyncio.Event]) -> None:
    """Returns at SIGTERM or SIGINT; takes them over from kopf once that runs."""
    for each in ready:
        await each.wait()
    stopped = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


class _served:  # noqa: N801 - used like a function
    """Serves the health port while the context lasts."""

    def __init__(self, controller: Controller, config: OperatorConfig, port: int) -> None:
        self._runner = web.AppRunner(
            health_app(controller, resync_seconds=config.resync_seconds), access_log=None
        )
        self._port = port

    async def __aenter__(self) -> None:
        await self._runner.setup()
        if self._port:
            with explain_listen_errors("", self._port, port_flag="--health-port"):
                await web.TCPSite(self._runner, None, self._port).start()

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


class Scope(Struct, frozen=True, kw_only=True):
    """What one kopf operator watches, and where."""

    namespaces: tuple[str, ...]
    """All if empty."""
    watched: Mapping[Kind, str]


def scopes(config: OperatorConfig) -> tuple[Scope, ...]:
    """Everything in the namespaces that are served, and the routers' pods where the operator lives: it has no
    permission to list anything else there. kopf watches the same kinds in all of its namespaces, so the latter
    takes a kopf operator of its own, unless the operator's namespace is served anyway."""
    served = Scope(namespaces=tuple(sorted({*config.watch_namespaces})), watched=WATCHED)
    if not config.watch_namespaces or config.namespace in config.watch_namespaces:
        return (served,)
    return served, Scope(namespaces=(config.namespace,), watched={PODS: WATCHED[PODS]})


async def event_source(
    controller: Controller, scope: Scope, *, stop: asyncio.Event, ready: asyncio.Event
) -> None:
    """Runs kopf; every event of what is watched goes to the controller."""
    await kopf.operator(
        registry=handlers(controller, scope.watched),
        settings=kopf_settings(scope.watched),
        identity=kopf_identity(),
        standalone=True,
        clusterwide=not scope.namespaces,
        namespaces=scope.namespaces,
        stop_flag=stop,
        ready_flag=ready,
    )


def kopf_identity() -> Any:
    """kopf would ask for the user's name, which a numeric user of a container does not have."""
    os.environ.setdefault("USER", "argosy")
    from kopf._core.engines.peering import Identity

    return Identity(os.environ.get("HOSTNAME", "argosy-operator"))


def kopf_settings(watched: Mapping[Kind, str]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    # What is watched is known: no permission on CRDs and namespaces is needed to find it out.
    settings.scanning.disabled = True
    for kind, labels in watched.items():
        if labels:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = labels
    return settings


def handlers(controller: Controller, watched: Mapping[Kind, str]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        if "KUBECONFIG" in os.environ:
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    for kind in watched:
        _listen(registry, controller, kind)
    return registry


def _listen(registry: kopf.OperatorRegistry, controller: Controller, kind: Kind) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)
    async def on_event(event: Any, **_: Any) -> None:
        controller.handle(kind, event["type"], dict(event["object"]))


if __name__ == "__main__":
    sys.exit(main())
