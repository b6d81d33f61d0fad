"""RayCluster: this process's connection to Ray, either to the cluster at RAY_ADDRESS or to a private one.

A process that is connected already, as a program of the user's may be, keeps its connection. Engines of one program
share a connection to a cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import ray
from ray import _raylet
from ray import exceptions as ray_exceptions
from ray._private import auto_init_hook, ray_constants, ray_logging
from ray.job_config import JobConfig

from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.executor.private_ray import PrivateRay

BY_NAME = "argosy-classes-are-imported-by-name"
"""A search path, which need not exist, makes Ray import the classes of actors on workers instead of sending them."""


class RayCluster:
    """A connection, which `close` ends, together with a Ray that was started for it.

    Args:
        num_cpus, num_gpus: resources of a private Ray.

    Raises (from the constructor):
        ConfigError: RAY_ADDRESS is no cluster that this process can join, no private Ray starts, or this process has
            one for another engine.
    """

    _open: ClassVar[list[RayCluster]] = []
    """Of this process, those that use a connection which one of them has made."""

    def __init__(self, num_cpus: int, num_gpus: int) -> None:
        self._private: PrivateRay | None = None
        self._environment = contextlib.ExitStack()
        if any(each.is_private for each in self._open):
            raise ConfigError(
                "another engine of this program has a private Ray, which has room for that engine only; close it "
                "first, use --distributed-executor-backend mp, or start a cluster for both with `ray start --head` "
                "and set RAY_ADDRESS"
            )
        if ray.is_initialized():
            if self._open:
                self._open.append(self)
            return
        self._open.append(self)
        try:
            if address := cluster_address():
                self._connect(address)
            else:
                self._private = PrivateRay(num_cpus, num_gpus)
                self._environment.enter_context(_authenticated(self._private.environment))
                with _loopback_allowed():
                    self._connect(self._private.address)
        except BaseException:
            self.close()
            raise

    @property
    def is_private(self) -> bool:
        return self._private is not None

    def check_health(self) -> None:
        """
        Raises:
            EngineDead: the private Ray has ended.
        """
        if self._private is not None and self._private.has_ended():
            raise EngineDead("the engine's private Ray ended; if not killed, it has told why in the log")

    @property
    def node_id(self) -> str:
        """The node that this process is on."""
        return str(ray.get_runtime_context().get_node_id())

    def describe_nodes(self) -> str:
        """Tell what the nodes of the cluster have, for people."""
        nodes = [
            f"{node['NodeManagerAddress']} has {node['Resources'].get('GPU', 0):g} GPUs and "
            f"{node['Resources'].get('CPU', 0):g} CPUs"
            for node in ray.nodes()
            if node["Alive"]
        ]
        free = ray.available_resources()
        return (
            f"{'; '.join(nodes) or 'no node is alive'}; {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs "
            "of these are free"
        )

    def has_gpus(self) -> bool:
        return any(node["Resources"].get("GPU") for node in ray.nodes() if node["Alive"])

    def close(self) -> None:
        """Disconnect. May be called twice."""
        if self in self._open:
            self._open.remove(self)
            if not self._open and ray.is_initialized():
                ray.shutdown()
        if self._private is not None:
            self._private.stop()
        self._environment.close()

    def _connect(self, address: str) -> None:
        _read_authentication()  # it may have changed since Ray was imported
        # Workers' lines come without colors, which a file shows as escape sequences, and also if another has the same.
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        ray_logging.RAY_DEDUP_LOGS = False  # type: ignore[attr-defined]
        # A thread that still reads a worker's answers when the connection ends must not start a Ray by its next call.
        auto_init_hook.enable_auto_connect = False
        try:
            with _kept_sigterm():
                ray.init(
                    address=address, configure_logging=False, job_config=JobConfig(code_search_path=[BY_NAME])
                )
        except (OSError, RuntimeError, ValueError, ray_exceptions.RayError) as error:
            raise ConfigError(
                f"cannot join the Ray cluster at {address}: {error}; this machine has to be one of its nodes, with "
                "the cluster's versions of Python and Ray. Unset RAY_ADDRESS for a private Ray on this machine"
            ) from None


def cluster_address() -> str:
    """Return RAY_ADDRESS, or an empty string if a private Ray is to be started.

    Raises:
        ConfigError: it is an address of Ray Client.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address} is for Ray Client, which passes every call on by pickle and by a proxy; run the "
            "engine on a node of the cluster with RAY_ADDRESS=auto or HOST:PORT"
        )
    return "" if address == "local" else address


@contextlib.contextmanager
def _authenticated(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables by which Ray's libraries authenticate, which read them once and keep them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _read_authentication()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _read_authentication()


def _read_authentication() -> None:
    libraries: Any = _raylet  # compiled, without types
    libraries.Config.initialize("")
    libraries.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _loopback_allowed() -> Iterator[None]:
    """Let Ray connect to 127.0.0.1, as `LOOPBACK_ONLY` does where Ray is not imported yet."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
