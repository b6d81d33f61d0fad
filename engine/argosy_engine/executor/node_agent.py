"""NodeAgent: runs the workers of a machine that is not an engine's first, on behalf of the executor on machine 0.

It joins machine 0, tells what it is doing while the model is fetched, starts the workers when it is told to, and passes
messages both ways. It ends when machine 0 goes away, and tells it when a worker has ended; its workers end with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import socket
import threading
import time
from types import FrameType
from typing import NamedTuple

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.parallel_config import worker_name
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.executor.broadcast import MessageStream
from argosy_engine.executor.multinode_executor import HANDSHAKE_TIMEOUT_S, JOIN_TIMEOUT_S, node_args
from argosy_engine.executor.multiproc_executor import LocalWorkers
from argosy_engine.executor.node_channel import (
    ANSWER,
    ENDED,
    MAX_HELLO_BYTES,
    MAX_PROGRESS_CHARS,
    MESSAGE,
    PROGRESS,
    RANK_BYTES,
    READY,
    START,
    STOP,
    Admission,
    ChannelError,
    NodeChannel,
    NodeStart,
    WorkerExit,
    WrongKey,
    connect_to_peer,
    hello,
)
from argosy_engine.executor.worker_protocol import INIT, Rendezvous, tcp_url

logger = logging.getLogger("argosy.node")

CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.5
"""Between attempts to reach machine 0, which may start later and whose name may be known later."""
LAST_WORD_S = 5.0
"""How long machine 0 may take to say why the engine dies, once a worker of this machine has ended."""


class JoiningNode:
    """Joins machine 0, in a thread of the caller's, while the model is fetched.

    Args:
        args: arguments of the engine, as they were given.
        keys: the engine's, the newest first. Machine 0 may have any of them.
    """

    def __init__(self, args: EngineArgs, keys: tuple[bytes, ...]) -> None:
        self._args = args
        self._keys = keys
        self._timeout_s = args.distributed_timeout_seconds or JOIN_TIMEOUT_S
        self._deadline: float | None = None
        self._cancelled = threading.Event()
        self._channel: NodeChannel | None = None
        self.address = f"{args.master_addr}:{args.master_port}"

    def join(self) -> NodeChannel:
        """Connect until machine 0 answers.

        Raises:
            ConfigError: it refuses this machine, for its key or its flags.
            EngineDead: it has not answered in time, or this rank is taken.
        """
        logger.info("node %d: waiting for node 0 at %s", self._args.node_rank, self.address)
        reason = "not tried"
        while not self._cancelled.is_set():
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise EngineDead(
                    f"node 0 did not answer at {self.address} within {self._timeout_s} s (last: {reason}); start it, "
                    "give --master-addr and --master-port its address, or raise --distributed-timeout-seconds"
                )
            try:
                channel = self._connect()
            except WrongKey:
                raise ConfigError(
                    f"node 0 at {self.address} has another key; give all nodes the same --node-key-file or "
                    "ARGOSY_NODE_KEY"
                ) from None
            except ChannelError as error:
                reason = str(error)
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                logger.info("node %d: joined node 0 at %s", self._args.node_rank, self.address)
                self._channel = channel
                return channel
            self._cancelled.wait(RETRY_S)
        raise EngineDead("joining was cancelled")

    def begin_deadline(self) -> None:
        """Begin to count the time: the model is here, and only machine 0 is missing."""
        self._deadline = time.monotonic() + self._timeout_s

    def report(self, text: str) -> None:
        """Tell machine 0 what this one is doing, if it has been joined."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(PROGRESS, text[:MAX_PROGRESS_CHARS].encode())

    def cancel(self) -> None:
        self._cancelled.set()

    def _connect(self) -> NodeChannel:
        *others, oldest = self._keys
        for key in others:
            with contextlib.suppress(WrongKey):
                return self._connect_with(key)
        return self._connect_with(oldest)

    def _connect_with(self, key: bytes) -> NodeChannel:
        stream = socket.create_connection(
            (self._args.master_addr, self._args.master_port), timeout=CONNECT_TIMEOUT_S
        )
        try:
            channel = connect_to_peer(stream, key, HANDSHAKE_TIMEOUT_S)
            stream.settimeout(HANDSHAKE_TIMEOUT_S)
            channel.send(msgspec.msgpack.encode(hello(self._args)))
            payload = channel.receive(MAX_HELLO_BYTES)
            if payload is None:
                raise ChannelError("it has closed the connection")
            admission = msgspec.msgpack.decode(payload, type=Admission)
            if admission.refusal:
                error = EngineDead if admission.can_retry else ConfigError
                raise error(f"node 0 at {self.address} refuses this node: {admission.refusal}")
            stream.settimeout(None)
        except msgspec.MsgspecError:
            stream.close()
            raise ChannelError("it is not part of an Argosy engine") from None
        except BaseException:
            stream.close()
            raise
        return channel


class Outcome(NamedTuple):
    """How the agent ends."""

    code: int
    reason: str


class NodeAgent:
    """Runs this machine's workers. Make it in the main thread.

    Args:
        args: arguments of the engine, whose model is on this machine.
        channel: to machine 0, which has admitted this machine.
        stop_timeout_s: how long to go on after SIGTERM, so that machine 0 can finish running requests.
    """

    def __init__(self, args: EngineArgs, channel: NodeChannel, stop_timeout_s: float) -> None:
        config = args.parallel_config
        self._args = args
        self._channel = channel
        self._stop_timeout_s = stop_timeout_s
        self._ranks = config.ranks_of(args.node_rank)
        self._workers = LocalWorkers(config, self._ranks, config.world_size)
        self._starts: queue.SimpleQueue[NodeStart] = queue.SimpleQueue()
        self._started = threading.Event()
        self._outcome: Outcome | None = None
        self._failure: str | None = None
        """The first end of a worker."""
        self._deadline: float | None = None
        self._num_signals = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def run(self) -> int:
        """Serve until machine 0 goes away, a worker ends or a signal says so; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        with contextlib.suppress(OSError):  # the thread finds out
            self._channel.send(READY)
        threading.Thread(target=self._receive, daemon=True, name="node 0").start()
        try:
            outcome = self._serve()
        finally:
            self._channel.finish()
            self._workers.shutdown()
            self._channel.close()
        logger.log(logging.ERROR if outcome.code else logging.INFO, "%s", outcome.reason)
        return outcome.code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            os.write(self._wake_write, b"x")

    def _receive(self) -> None:
        """Take the messages of machine 0 until it goes away."""
        outcome = Outcome(1, "node 0 has ended or cannot be reached")
        try:
            while (message := self._channel.receive()) is not None:
                kind, payload = message[:1], message[1:]
                if kind == START:
                    self._starts.put(msgspec.msgpack.decode(payload, type=NodeStart))
                    self._wake()
                    self._started.wait()
                elif kind == MESSAGE and self._started.is_set():
                    with contextlib.suppress(EngineDead):  # the main thread finds out
                        self._workers.put(payload)
                elif kind == STOP:
                    reason = payload.decode(errors="replace")
                    outcome = (
                        Outcome(1, f"the engine died: {reason}")
                        if reason
                        else Outcome(0, "node 0 has stopped")
                    )
                else:
                    raise ChannelError(f"a message of kind {kind!r}")
        except (ChannelError, msgspec.MsgspecError) as error:
            outcome = Outcome(1, f"node 0 sent what it may not: {error}")
        except OSError:  # the agent ends
            pass
        self._outcome = outcome
        self._wake()

    def _serve(self) -> Outcome:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        ranks = {
            stream.fileno(): rank for rank, stream in zip(self._ranks, self._workers.sockets, strict=True)
        }
        streams = {
            rank: MessageStream(each) for rank, each in zip(self._ranks, self._workers.sockets, strict=True)
        }
        num_signals = 0
        while True:
            events = poller.poll(
                None if self._deadline is None else max(self._deadline - time.monotonic(), 0) * 1000
            )
            if not events:
                return Outcome(1, self._failure) if self._failure else Outcome(0, "stopped by a signal")
            for fd, _ in events:
                if fd != self._wake_read:
                    if not self._pass_on(ranks[fd], streams[ranks[fd]]):
                        poller.unregister(fd)
                    continue
                os.read(fd, 4096)
                if not self._starts.empty() and not self._started.is_set():
                    self._start(self._starts.get())
                    for each in ranks:
                        poller.register(each, select.POLLIN)
            if self._outcome is not None:
                return self._final(self._outcome)
            if self._num_signals > num_signals:
                num_signals = self._num_signals
                if num_signals > 1 or not self._stop_timeout_s:
                    return Outcome(0, "stopped by a signal")
                logger.info(
                    "stopping: waiting up to %g s for node 0 to end; another signal ends this node at once",
                    self._stop_timeout_s,
                )
                self._deadline = time.monotonic() + self._stop_timeout_s

    def _final(self, outcome: Outcome) -> Outcome:
        if self._failure is not None:
            return Outcome(1, self._failure)
        return Outcome(0, outcome.reason) if self._num_signals else outcome

    def _start(self, start: NodeStart) -> None:
        logger.info(
            "node %d: starting workers %d to %d", self._args.node_rank, self._ranks[0], self._ranks[-1]
        )
        with contextlib.suppress(OSError):  # the other thread finds out
            self._channel.send(PROGRESS, b"starting the workers and loading the model")
        self._workers.start(Rendezvous(tcp_url(start.host, start.port), own_host=self._channel.own_host))
        with contextlib.suppress(EngineDead):  # found out by its socket
            self._workers.put(INIT + msgspec.msgpack.encode(node_args(self._args)))
        self._started.set()

    def _pass_on(self, rank: int, stream: MessageStream) -> bool:
        """Pass on the next message of a worker; return whether more may come."""
        message = stream.receive()
        with contextlib.suppress(OSError):  # the other thread finds out
            if message is not None:
                self._channel.send(ANSWER, rank.to_bytes(RANK_BYTES, "little"), message)
                return True
            how = self._workers.describe_exit(rank)
            self._channel.send(ENDED, msgspec.msgpack.encode(WorkerExit(rank, how)))
        if message is None and self._failure is None:
            name = worker_name(self._args.parallel_config, rank)
            self._failure = (
                f"{name} (process {self._workers.pid(rank)}) ended: {self._workers.describe_exit(rank)}"
            )
            self._deadline = time.monotonic() + LAST_WORD_S
        return message is not None
