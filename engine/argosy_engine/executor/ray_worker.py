"""RayWorker: the actor that runs a worker in a process of Ray's.

Its calls take and return `bytes` and whole numbers only, which Ray does not pickle. A call is executed in any order, so
messages carry numbers. One call, `answers`, stays pending as long as the process lives: by it the engine gets every
answer, and Ray's notice of the process's end.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator

import msgspec

from argosy_engine.distributed.process_name import is_first, name_process
from argosy_engine.executor.ray_placement import WorkerPlace
from argosy_engine.executor.rendezvous import join_network
from argosy_engine.executor.worker_death import failure_of
from argosy_engine.executor.worker_messages import DIED
from argosy_engine.osproc.debug_signal import describe_on_signal
from argosy_protocol import __version__
from argosy_protocol.program.log_format import configure_logging

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
            name: the process's, see `distributed.process_name`.
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
