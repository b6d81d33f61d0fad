"""RayExecutor: runs every worker as an actor of Ray, on the nodes of a cluster, and sends all of them the same calls.

One placement group has a bundle for each worker. Messages are those of `MultiprocExecutor`, as bytes in calls to the
actors. A thread for each worker waits for its answers by one call that stays pending: it fails when the actor's process
or node ends. Workers end with the engine, by our order or, if the engine is killed, by Ray. Design: vLLM's
`RayDistributedExecutor`, whose calls are pickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import msgspec
import ray
from ray import _raylet
from ray import exceptions as ray_exceptions
from ray._private import auto_init_hook, ray_constants, ray_logging
from ray.exceptions import GetTimeoutError, RayError
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.parallel_config import worker_name
from argosy_engine.errors import ConfigError, EngineDead, EngineError
from argosy_engine.executor.multiproc_executor import RemoteExecutor
from argosy_engine.executor.private_ray import PrivateRay
from argosy_engine.executor.ray_worker import (
    RayWorker,
    WorkerPlace,
    order_ranks,
    spanning_groups,
    threads_per_worker,
)
from argosy_engine.executor.worker_protocol import DIED, FAILED, INIT, WorkerEnd, WorkerFailure, death_of
from argosy_engine.messages import OnLoadStep, WorkerInfo, ignore_step
from argosy_engine.sizing.resources import visible_gpus
from argosy_protocol import __version__

BY_NAME = "argosy-classes-are-imported-by-name"
"""A search path, which need not exist, makes Ray import the classes of actors on workers instead of sending them."""


class RayCluster:
    """A connection, which `close` ends, together with a Ray that was started for it.

    It is to the cluster at RAY_ADDRESS or to a private Ray. A process that is connected already, as a program of the
    user's may be, keeps its connection. Engines of one program share a connection to a cluster.

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


logger = logging.getLogger("argosy.core")

PLACEMENT_TIMEOUT_S = 300.0
"""How long to wait for the placement group. A cluster that adds nodes on demand takes minutes."""
PLACEMENT_NOTICE_S = 5.0
"""After this time a line of the log says what the start waits for."""
ACTOR_START_TIMEOUT_S = 600.0
"""How long the actors' processes may take to start, once they are placed: on a busy machine or a slow file system."""
ROOT_CAUSE_S = 0.25
"""How long to wait for the ends of other workers when one has failed."""
LOST_PEER_S = 10.0
"""The same if it has failed in a collective operation, maybe for the end of another that Ray is about to report."""
KILL_TIMEOUT_S = 5.0
"""How long to wait for the ends of actors that were killed. Ray kills them again when the engine disconnects."""

_RAYS_REASON = re.compile(
    r"The actor (?:is dead|died) because.*?(?=\.? (?:Some common|There are some potential)|$)"
)
_MAX_REASON_CHARS = 400


class RayExecutor(RemoteExecutor):
    """Executor with one actor of Ray per worker.

    Args:
        args: arguments of the engine.
        placement_timeout: seconds that the cluster has to place the workers.

    Raises (from the constructor):
        ConfigError: there is no Ray to run them.
    """

    def __init__(
        self,
        args: EngineArgs,
        on_load_step: OnLoadStep = ignore_step,
        *,
        placement_timeout: float = PLACEMENT_TIMEOUT_S,
    ) -> None:
        world_size = args.parallel_config.world_size
        super().__init__(args, world_size, on_load_step)
        self._placement_timeout = placement_timeout
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        """By rank."""
        self._places: list[WorkerPlace] = []
        """By rank."""
        self._num_sent = [0] * world_size
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._received: list[deque[bytes]] = [deque() for _ in range(world_size)]
        """Answers of each rank that are not taken yet; guarded by `_changed`, as the next two."""
        self._failures: dict[int, WorkerFailure] = {}
        """Last words, by rank."""
        self._ends: dict[int, str] = {}
        """What Ray says of workers that have ended without a word, by rank."""
        self._death: EngineError | None = None
        self._cluster = RayCluster(num_cpus=world_size, num_gpus=len(visible_gpus()))

    def start(self) -> WorkerInfo:
        device = self._args.device
        if device == "auto":
            device = "cuda" if self._cluster.has_gpus() else "cpu"
        self._place(device)
        host, port = self._places[0].host.encode(), self._places[0].port
        for rank, actor in enumerate(self._actors):
            thread = threading.Thread(target=self._watch, args=(rank,), daemon=True, name=f"worker {rank}")
            self._threads.append(thread)
            thread.start()
            name = worker_name(self._args.parallel_config, rank).encode()
            actor.start.remote(rank, self._world_size, host, port, name)
        for rank, threads in enumerate(threads_per_worker(self._places)):
            args = msgspec.structs.replace(self._args, device=device, threads=self._args.threads or threads)
            self._put(rank, INIT + self._encode(args))
        return self._worker_info()

    def check_health(self) -> None:
        self._cluster.check_health()
        if self._failures or self._ends:
            raise self._dead()

    def shutdown(self) -> None:
        """End the workers, and Ray if it was started for them. May be called twice."""
        for actor in self._actors:
            ray.kill(actor)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        for thread in self._threads:  # each ends when Ray reports the end of its actor
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._actors, self._threads = [], []
        if self._group is not None:
            if not self._cluster.is_private:  # it ends with its groups, or has ended and cannot answer
                remove_placement_group(self._group)
            self._group = None
        self._cluster.close()

    def _place(self, device: str) -> None:
        """Start the actors and order them by rank.

        Raises:
            ConfigError: the cluster cannot run them.
        """
        resource = "GPU" if device == "cuda" else "CPU"
        self._group = placement_group([{resource: 1}] * self._world_size, strategy="PACK")
        self._await_placement(self._group, resource)
        actor_class: Any = ray.remote(RayWorker)
        actors = [
            actor_class.options(
                num_cpus=int(resource == "CPU"),
                num_gpus=int(resource == "GPU"),
                max_concurrency=4,  # one call waits for answers
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(self._world_size)
        ]
        self._actors = actors  # for `shutdown`, whatever happens next
        try:
            answers = ray.get([actor.place.remote() for actor in actors], timeout=ACTOR_START_TIMEOUT_S)
        except GetTimeoutError:
            raise ConfigError(
                f"the actors of {self._world_size} workers have not started on the Ray cluster within "
                f"{ACTOR_START_TIMEOUT_S:g} s: {self._cluster.describe_nodes()}"
            ) from None
        except RayError as error:
            raise ConfigError(
                f"a worker cannot start on the Ray cluster: {_last_line(error)}; every node needs Argosy "
                f"{__version__} where its Python finds it"
            ) from None
        places = [msgspec.msgpack.decode(answer, type=WorkerPlace) for answer in answers]
        for place in places:
            if place.version != __version__:
                raise ConfigError(
                    f"the node {place.host} has Argosy {place.version}, and this one {__version__}; install the "
                    "same on every node of the Ray cluster"
                )
        tensor = self._args.tensor_parallel_size
        order = order_ranks([place.node_id for place in places], driver=self._cluster.node_id, tensor=tensor)
        self._actors = [actors[index] for index in order]
        self._places = [places[index] for index in order]
        for group in spanning_groups([place.node_id for place in self._places], tensor):
            hosts = dict.fromkeys(self._places[rank].host for rank in group)
            logger.warning(
                "the workers %s share every layer and are on several nodes (%s): each layer waits for the network",
                group,
                ", ".join(hosts),
            )

    def _await_placement(self, group: PlacementGroup, resource: str) -> None:
        asked = f"{self._world_size} workers with 1 {resource} each"
        notice = min(PLACEMENT_NOTICE_S, self._placement_timeout)
        if group.wait(notice):
            return
        logger.info("waiting for Ray to place %s: %s", asked, self._cluster.describe_nodes())
        if not group.wait(self._placement_timeout - notice):
            raise ConfigError(
                f"Ray has not placed {asked} within {self._placement_timeout:g} s: "
                f"{self._cluster.describe_nodes()}; add nodes, end what uses them, or use a smaller "
                "--tensor-parallel-size or --pipeline-parallel-size"
            )

    def _watch(self, rank: int) -> None:
        """Take the answers of a worker until it ends."""
        reason = take_answers(self._actors[rank], lambda message: self._arrived(rank, message))
        with self._changed:
            if rank not in self._failures:
                self._ends[rank] = reason
            self._changed.notify_all()

    def _arrived(self, rank: int, message: bytes) -> None:
        if self._is_progress(message):
            return
        with self._changed:
            if message[:1] == DIED:
                self._failures[rank] = msgspec.msgpack.decode(message[1:], type=WorkerFailure)
                ray.kill(self._actors[rank])  # it waits for that, so that its message is not lost
            else:
                self._received[rank].append(message)
            self._changed.notify_all()

    def _put(self, rank: int, message: bytes) -> None:
        self._actors[rank].put.remote(self._num_sent[rank], message)
        self._num_sent[rank] += 1

    def _send(self, message: bytes) -> None:
        self.check_health()
        for rank in range(self._world_size):
            self._put(rank, message)

    def _answer(self, rank: int, deadline: float | None = None) -> memoryview | WorkerFailure:
        while True:
            timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            with self._changed:
                if not self._changed.wait_for(lambda: self._has_news(rank), timeout):
                    raise TimeoutError
                message = self._received[rank].popleft() if self._received[rank] else None
            if message is None:
                self._cluster.check_health()
                raise self._dead()
            if not self._num_late[rank]:
                break
            self._num_late[rank] -= 1
        if message[:1] == FAILED:
            return msgspec.msgpack.decode(message[1:], type=WorkerFailure)
        return memoryview(message)[1:]

    def _has_news(self, rank: int) -> bool:
        return bool(self._received[rank] or self._failures or self._ends)

    def _dead(self) -> EngineError:
        """Return the error that says why workers have ended: that Ray reports their ends, else why they failed."""
        if self._death is None:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._ends), ROOT_CAUSE_S)
                if all(failure.is_in_collective for failure in self._failures.values()):
                    self._changed.wait_for(
                        lambda: self._ends or len(self._failures) == self._world_size, LOST_PEER_S
                    )
                ends, failures = dict(self._ends), dict(self._failures)
            ranks = sorted(ends.keys() | failures.keys())
            self._death = death_of(
                [WorkerEnd(self._who(rank), ends.get(rank, ""), failures.get(rank)) for rank in ranks]
            )
        return self._death

    def _who(self, rank: int) -> str:
        place = self._places[rank]
        return f"{worker_name(self._args.parallel_config, rank)} (process {place.pid} on {place.host})"


def take_answers(actor: Any, on_answer: Callable[[bytes], None]) -> str:
    """Take the answers of a worker's actor until it ends; return what Ray says of its end."""
    try:
        for reference in actor.answers.options(num_returns="streaming").remote():
            on_answer(ray.get(reference))
    # Most are RayError; a Ray that has ended ends the threads that wait.
    except (Exception, SystemExit) as error:
        return _rays_reason(error)
    return "its answers ended"


def _rays_reason(error: BaseException) -> str:
    """Return what Ray says of the end of an actor, on one line."""
    text = "it has ended" if isinstance(error, SystemExit) else " ".join(str(error).split())
    found = _RAYS_REASON.search(text)
    return f"Ray: {(found[0] if found else text)[:_MAX_REASON_CHARS]}"


def _last_line(error: Exception) -> str:
    lines: Iterable[str] = str(error).strip().splitlines()
    return ([""] + [line for line in lines if line.strip()])[-1].strip()[:_MAX_REASON_CHARS]
