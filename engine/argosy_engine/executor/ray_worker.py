"""RayWorker: the actor that runs a worker in a process of Ray's, and where workers are placed on a cluster's nodes.

Its calls take and return `bytes` and whole numbers only, which Ray does not pickle. A call is executed in any order, so
messages carry numbers. One call, `answers`, stays pending as long as the process lives: by it the engine gets every
answer, and Ray's notice of the process's end. The choice of places is pure: it knows no Ray.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from argosy_engine.distributed.parallel_config import is_first, name_process
from argosy_engine.executor.worker_protocol import DIED, failure_of, join_network
from argosy_engine.osproc import describe_on_signal
from argosy_protocol import __version__
from argosy_protocol.program.process import configure_logging


class WorkerPlace(Struct, frozen=True, array_like=True):
    """What an actor tells about itself."""

    node_id: str
    host: str
    """Address of its node."""
    port: int
    """Where it listens, for torch.distributed if it becomes rank 0."""
    pid: int
    num_cores: int
    """Cores that its process may use."""
    version: str
    """Argosy's."""


def order_ranks(nodes: Sequence[str], *, driver: str, tensor: int) -> list[int]:
    """Return the index of the worker that becomes each rank, so that few tensor-parallel groups span several nodes.

    Each node is divided into as many whole groups as it has workers for, the driver's node first; what remains forms
    the last groups.

    Args:
        nodes: node of each worker.
        driver: node of the engine core.
        tensor: ranks of a tensor-parallel group.
    """
    workers: dict[str, list[int]] = {driver: []}
    for index, node in enumerate(nodes):
        workers.setdefault(node, []).append(index)
    whole: list[int] = []
    rest: list[int] = []
    for indices in workers.values():
        count = len(indices) // tensor * tensor
        whole += indices[:count]
        rest += indices[count:]
    return whole + rest


def spanning_groups(nodes: Sequence[str], tensor: int) -> list[list[int]]:
    """Return the ranks of the tensor-parallel groups that span several nodes.

    Args:
        nodes: node of each rank.
    """
    groups = [list(range(first, first + tensor)) for first in range(0, len(nodes), tensor)]
    return [group for group in groups if len({nodes[rank] for rank in group}) > 1]


def threads_per_worker(places: Sequence[WorkerPlace]) -> list[int]:
    """Return the number of CPU threads of each worker: workers on one machine share its cores."""
    hosts = [place.host for place in places]
    return [max(place.num_cores // hosts.count(place.host), 1) for place in places]


LAST_MESSAGE_S = 30.0
"""How long a process that has failed waits to be killed by the engine, which does so once it has read the reason."""


class OrderedMessages:
    """`MessageReader` of messages that arrive in any order, with their numbers."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._messages: dict[int, bytes] = {}
        self._next = 0

    def put(self, number: int, message: bytes) -> None:
        with self._arrived:
            self._messages[number] = message
            self._arrived.notify()

    def get(self) -> bytes:
        with self._arrived:
            self._arrived.wait_for(lambda: self._next in self._messages)
            message = self._messages.pop(self._next)
            self._next += 1
            return message


class Answers:
    """`MessageWriter` whose messages `RayWorker.answers` passes on."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send(self, message: bytes) -> None:
        self.messages.put(message)
        if message[:1] == DIED:  # the process ends when this returns, and the message with it
            threading.Event().wait(LAST_MESSAGE_S)


class RayWorker:
    """Actor of one worker. Call `place`, `answers` and `start` once each."""

    def __init__(self) -> None:
        self._role = "no rank yet"
        describe_on_signal("argosy engine worker", lambda: f"{self._role}; its stacks are above")
        self._calls = OrderedMessages()
        self._answers = Answers()
        self._listener: socket.socket | None = None
        self._store: object = None

    def place(self) -> bytes:
        """Return the worker's `WorkerPlace`, as msgpack."""
        import ray

        context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0))
        return msgspec.msgpack.encode(
            WorkerPlace(
                node_id=context.get_node_id(),
                host=host,
                port=self._listener.getsockname()[1],
                pid=os.getpid(),
                num_cores=len(os.sched_getaffinity(0)),
                version=__version__,
            )
        )

    def answers(self) -> Iterator[bytes]:
        """Generate the worker's answers, as long as the process lives."""
        while True:
            yield self._answers.messages.get()

    def start(self, rank: int, world_size: int, host: bytes, port: int, name: bytes) -> int:
        """Begin to serve messages, the first of which is `INIT`.

        Args:
            host, port: where rank 0 listens for the others.
            name: the process's, see `distributed.parallel_config`.
        """
        text = name.decode()
        name_process(text)
        configure_logging("INFO" if is_first(text) else "WARNING", process=text)
        self._role = f"{text}, rank {rank} of {world_size}"
        arguments = (rank, world_size, host.decode(), port)
        threading.Thread(target=self._serve, args=arguments, daemon=True, name="worker").start()
        return rank

    def put(self, number: int, message: bytes) -> int:
        """Take a message.

        Args:
            number: counts the messages from 0.
        """
        self._calls.put(number, message)
        return number

    def _serve(self, rank: int, world_size: int, host: str, port: int) -> None:
        try:
            store = self._rendezvous(rank, host, port)
            from argosy_engine.executor.worker_process import WorkerProcess

            # A process sees its own GPU only.
            process = WorkerProcess(
                rank, world_size, self._calls, self._answers, f"tcp://{host}:{port}", local_rank=0
            )
        except Exception as error:
            self._answers.send(DIED + msgspec.msgpack.encode(failure_of(error)))
            os._exit(1)
        self._store = store  # lives as long as the process
        process.serve()

    def _rendezvous(self, rank: int, host: str, port: int) -> object:
        """Prepare torch.distributed, and as rank 0 serve its store on the socket that listens already."""
        assert self._listener is not None
        own_host = self._listener.getsockname()[0]
        if rank != 0:
            self._listener.close()
            return join_network(host, port, own_host)
        return join_network(host, port, own_host, self._listener.detach())
