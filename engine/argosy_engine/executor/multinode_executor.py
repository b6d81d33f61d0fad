"""MultiNodeExecutor: a `MultiprocExecutor` whose last workers are on other machines.

Each machine has the same number of workers: the first ones are this machine's, those of the others are behind a
`NodeGroup`. Answers of all come out of sockets, so that nothing else differs. Its port is open to strangers, who may
take only so many connections (`HandshakeSlots`) and lines of the log (`RefusalLog`). Design: vLLM's `MultiprocExecutor`
with --nnodes, whose messages between machines are pickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.parallel_config import worker_name
from argosy_engine.errors import ConfigError, EngineDead, EngineError
from argosy_engine.executor.broadcast import MessageStream
from argosy_engine.executor.multiproc_executor import MultiprocExecutor
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
    NodeHello,
    NodeStart,
    WorkerExit,
    accept_peer,
    hello,
    mismatch,
    read_keys,
)
from argosy_engine.executor.worker_protocol import INIT, Rendezvous, tcp_url
from argosy_engine.messages import LoadStep, OnLoadStep, WorkerInfo, ignore_step

logger = logging.getLogger("argosy.core")


class HandshakeSlots:
    """The connections to a port whose peers have not proved yet that they belong there.

    There are a few at a time, so that strangers cannot take the process's threads and descriptors. Invariant: whoever
    connects gets a slot in a bounded time, whatever the others do. If all are taken, the oldest connection of the
    address that has most is cut once it has had its share of time; until then a newcomer waits, and others in the
    port's backlog, in their order.

    Args:
        size: number of slots.
        share_s: time that a connection has in any case.
    """

    def __init__(self, size: int, share_s: float) -> None:
        self._size = size
        self._share_s = share_s
        self._changed = threading.Condition()
        self._taken: dict[socket.socket, tuple[str, float]] = {}
        """Address of the peer, and when the slot was taken, in the order of these times."""
        self._is_closed = False

    def take(self, stream: socket.socket, host: str) -> bool:
        """Wait for a slot for a connection, and if need be take another one's. Returns False once closed.

        Args:
            host: address of the peer.
        """
        with self._changed:
            while not self._is_closed:
                if len(self._taken) < self._size:
                    self._taken[stream] = host, time.monotonic()
                    return True
                oldest = self._of_busiest_host()
                left = self._taken[oldest][1] + self._share_s - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                del self._taken[oldest]
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    oldest.shutdown(socket.SHUT_RDWR)
        return False

    def give_back(self, stream: socket.socket) -> None:
        """Free a connection's slot. May be called twice."""
        with self._changed:
            if self._taken.pop(stream, None) is not None:
                self._changed.notify_all()

    def close(self) -> None:
        """End the wait for a slot, for good. Connections that have one keep it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _of_busiest_host(self) -> socket.socket:
        """Return the oldest connection of the address that has most."""
        counts = Counter(host for host, _ in self._taken.values())
        return max(self._taken, key=lambda stream: counts[self._taken[stream][0]])


MAX_REFUSAL_LINES = 10
"""In each interval; further refusals are counted."""
REFUSAL_INTERVAL_S = 60.0


class RefusalLog:
    """Warnings about refused connections, of which strangers can cause any number.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._began_at = clock()
        self._num_lines = self._num_left_out = 0

    def warn(self, peer: str, reason: object) -> None:
        """Say why a peer's connection is refused, unless much has been said lately."""
        with self._lock:
            now = self._clock()
            if now - self._began_at >= REFUSAL_INTERVAL_S:
                if self._num_left_out:
                    self._logger.warning(
                        "refused %d further connections to the port of the nodes", self._num_left_out
                    )
                self._began_at, self._num_lines, self._num_left_out = now, 0, 0
            if self._num_lines >= MAX_REFUSAL_LINES:
                self._num_left_out += 1
                return
            self._num_lines += 1
        self._logger.warning("refused a connection of %s to the port of the nodes: %s", peer, reason)


JOIN_TIMEOUT_S = 600
"""How long the machines wait for each other, unless --distributed-timeout-seconds says otherwise."""
HANDSHAKE_TIMEOUT_S = 10.0
"""How long a peer may take to prove that it has the key and to say what it is."""
MAX_HANDSHAKES = 16
"""Peers that may do so at a time."""
HANDSHAKE_SHARE_S = 1.0
"""How long a peer may take in any case, if others wait to do so."""
CLOSE_TIMEOUT_S = 5.0
"""How long the machines may take to close their connections, before they are cut."""
WAITING_STEP_S = 1.0
"""Seconds between two load steps while nodes are missing: that wait has a deadline of its own."""
_BACKLOG = 128
_MAX_PHASE_CHARS = 64
_MAX_REASON_CHARS = 4096


class _Node:
    """A machine that has joined."""

    def __init__(self, greeting: NodeHello, channel: NodeChannel) -> None:
        self.rank = greeting.node_rank
        self.channel = channel
        self.name = f"node {self.rank} ({greeting.host_name[:64]}, {channel.peer_host})"
        self.thread = threading.current_thread()
        """Takes its messages."""
        self.progress = ""
        """What it has said last that it is doing."""
        self.is_ready = False
        self.is_lost = False


class NodeGroup:
    """The machines of an engine but for this one.

    It listens for them, admits each rank once, passes the executor's messages on, and feeds their workers' answers into
    sockets, so that the executor reads all workers alike. A machine that joined and is lost is the end of its workers'
    sockets, and so of the engine. The port stays open, so that whoever comes later is told why it may not join.

    Args:
        args: arguments of the engine.
        keys: the engine's; a machine that has one of them may join.
        feeds: by rank, where the answers of workers on other machines go. They are closed when the worker has ended.
        on_load_step: called in any thread when a machine joins, has the model or has come further with it, and
            regularly while one is missing.
        clock: seconds that never go back, for the wait until all have joined.

    Raises (from the constructor):
        ConfigError: this machine cannot listen at --master-addr and --master-port.
    """

    def __init__(
        self,
        args: EngineArgs,
        keys: tuple[bytes, ...],
        feeds: Mapping[int, socket.socket],
        on_load_step: OnLoadStep = ignore_step,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._args = args
        self._clock = clock
        self._on_load_step = on_load_step
        self._config = args.parallel_config
        self._keys = keys
        self._feeds = dict(feeds)
        self._streams = {rank: MessageStream(feed) for rank, feed in feeds.items()}
        self._hello = hello(args)
        self._handshakes = HandshakeSlots(MAX_HANDSHAKES, HANDSHAKE_SHARE_S)
        self._refusals = RefusalLog(logger)
        self._changed = threading.Condition()
        self._nodes: dict[int, _Node] = {}
        """By node rank; guarded by `_changed`, as the next."""
        self._exits: dict[int, str] = {}
        """How workers have ended, by rank."""
        self._is_closed = False
        self._listening = _listen(args)
        self.host: str = self._listening.getsockname()[0]
        """Address of this machine in the network of the others."""
        self._acceptor = threading.Thread(target=self._accept, daemon=True, name="nodes")
        self._acceptor.start()

    def wait_until_ready(self) -> None:
        """Wait until every machine has joined and has the model.

        A machine that has joined may fetch the model for any time: whoever takes the load's steps notices a stall.

        Raises:
            EngineDead: one has not joined in time, or was lost again.
        """
        timeout_s = self._args.distributed_timeout_seconds or JOIN_TIMEOUT_S
        deadline = self._clock() + timeout_s
        ranks = range(1, self._args.nnodes)
        with self._changed:
            while True:
                if lost := [node.name for node in self._nodes.values() if node.is_lost]:
                    raise EngineDead(f"{lost[0]} ended before it was ready")
                missing = [rank for rank in ranks if rank not in self._nodes]
                if not missing and all(node.is_ready for node in self._nodes.values()):
                    return
                left = deadline - self._clock()
                if missing and left <= 0:
                    raise EngineDead(
                        f"of {self._args.nnodes} nodes {', '.join(map(str, missing))} did not join within "
                        f"{timeout_s} s at {_address(self._args)}; start each with --headless, its --node-rank and the "
                        "same --master-addr and --master-port, or raise --distributed-timeout-seconds"
                    )
                if missing:
                    self._note_step(f"waiting for nodes {', '.join(map(str, missing))}")
                self._changed.wait(min(left, WAITING_STEP_S) if missing else None)

    def start_workers(self, port: int) -> None:
        """Let the machines start their workers, once all are ready.

        Args:
            port: where rank 0 serves torch's store.
        """
        self._broadcast(START, msgspec.msgpack.encode(NodeStart(self.host, port)))

    def put(self, message: bytes) -> None:
        """Send a message to every worker of every machine. One that is lost is noticed by its workers' sockets."""
        self._broadcast(MESSAGE, message)

    def describe_exit(self, rank: int) -> str:
        """Describe the end of a worker whose socket is closed."""
        with self._changed:
            return self._exits.get(rank, "unknown")

    def describe_node(self, node_rank: int) -> str:
        with self._changed:
            node = self._nodes.get(node_rank)
        return f"node {node_rank}" if node is None else node.name

    def close(self, reason: str) -> None:
        """Let the machines end their workers. Blocks for a bounded time. May be called twice.

        Args:
            reason: why the engine has died; empty if it was stopped.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            nodes = list(self._nodes.values())
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept` in the other thread
        self._listening.close()
        self._handshakes.close()
        for node in nodes:
            with contextlib.suppress(OSError):
                node.channel.send(STOP, reason[:_MAX_REASON_CHARS].encode())
            node.channel.finish()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self._acceptor.join(CLOSE_TIMEOUT_S)
        for node in nodes:
            node.thread.join(max(deadline - time.monotonic(), 0.0))
            node.channel.close()
        for feed in self._feeds.values():
            feed.close()

    def _broadcast(self, kind: bytes, payload: bytes) -> None:
        for rank in range(1, self._args.nnodes):
            with contextlib.suppress(OSError):  # its thread will find out
                self._nodes[rank].channel.send(kind, payload)

    def _accept(self) -> None:
        while True:
            try:
                stream, address = self._listening.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.warning("a node cannot connect: %s", error)  # no descriptors are left, perhaps
                threading.Event().wait(1.0)
                continue
            peer = str(address[0])
            if not self._handshakes.take(stream, peer):
                stream.close()
                return
            try:
                threading.Thread(target=self._greet, args=(stream, peer), daemon=True, name="node").start()
            except RuntimeError as error:  # the system has no thread for it
                self._handshakes.give_back(stream)
                self._refusals.warn(peer, error)
                stream.close()

    def _greet(self, stream: socket.socket, peer: str) -> None:
        """Admit a peer and take its messages until it is lost, or tell it why it may not join."""
        node = None
        try:
            channel = accept_peer(stream, self._keys, HANDSHAKE_TIMEOUT_S)
            self._handshakes.give_back(stream)  # it has the key
            stream.settimeout(HANDSHAKE_TIMEOUT_S)
            payload = channel.receive(MAX_HELLO_BYTES)
            if payload is None:
                raise ChannelError("it has closed the connection")
            greeting = msgspec.msgpack.decode(payload, type=NodeHello)
            node, admission = self._admit(greeting, channel)
            channel.send(msgspec.msgpack.encode(admission))
            stream.settimeout(None)
        except (ChannelError, msgspec.MsgspecError, OSError) as error:
            if node is not None:
                self._withdraw(node)
            self._refusals.warn(peer, error)
            stream.close()
            return
        finally:
            self._handshakes.give_back(stream)
        if node is None:
            logger.warning("refused node %d of %s: %s", greeting.node_rank, peer, admission.refusal)
            channel.finish()
            channel.close()
        else:
            logger.info("%s has joined", node.name)
            self._note_step(f"node {node.rank}: joined")
            self._serve(node)

    def _admit(self, greeting: NodeHello, channel: NodeChannel) -> tuple[_Node | None, Admission]:
        if not 1 <= greeting.node_rank < self._args.nnodes:
            return None, Admission(
                f"--node-rank {greeting.node_rank} is none of 1 to {self._args.nnodes - 1} of --nnodes "
                f"{self._args.nnodes} on node 0"
            )
        if (reason := mismatch(self._hello, greeting)) is not None:
            return None, Admission(reason)
        with self._changed:
            if (joined := self._nodes.get(greeting.node_rank)) is not None:
                return None, Admission(
                    f"{joined.name} has joined already with this --node-rank", can_retry=True
                )
            if self._is_closed:
                return None, Admission("the engine is ending", can_retry=True)
            node = self._nodes[greeting.node_rank] = _Node(greeting, channel)
            self._changed.notify_all()
        return node, Admission()

    def _withdraw(self, node: _Node) -> None:
        """Free the rank of a machine that was lost before it was told that it may join, so that it can try again.

        Nothing has been sent to it, since the workers of no machine start before it has the model.
        """
        with self._changed:
            del self._nodes[node.rank]
            self._changed.notify_all()

    def _serve(self, node: _Node) -> None:
        reason = f"{node.name} has ended or cannot be reached"
        try:
            while (message := node.channel.receive()) is not None:
                self._take(node, message)
        except (ChannelError, msgspec.MsgspecError, ValueError) as error:
            reason = f"{node.name} sent what it may not: {error}"
        except OSError:  # the executor has closed its end
            pass
        with self._changed:
            node.is_lost = True
            for rank in self._config.ranks_of(node.rank):
                self._exits.setdefault(rank, reason)
            self._changed.notify_all()
        for rank in self._config.ranks_of(node.rank):
            self._feeds[rank].close()
        node.channel.close()

    def _take(self, node: _Node, message: bytes) -> None:
        kind, payload = message[:1], message[1:]
        if kind == ANSWER:
            rank = self._rank(node, int.from_bytes(payload[:RANK_BYTES], "little"))
            self._streams[rank].send(payload[RANK_BYTES:])
        elif kind == PROGRESS:
            text = payload.decode(errors="replace")[:MAX_PROGRESS_CHARS]
            text = "".join(each if each.isprintable() else " " for each in text)
            logger.info("%s: %s", node.name, text)
            if text != node.progress:
                node.progress = text
                self._note_step(f"node {node.rank}: {text}")
        elif kind == READY:
            self._note_step(f"node {node.rank}: has the model")
            with self._changed:
                node.is_ready = True
                self._changed.notify_all()
        elif kind == ENDED:
            end = msgspec.msgpack.decode(payload, type=WorkerExit)
            rank = self._rank(node, end.rank)
            with self._changed:
                self._exits.setdefault(rank, end.how[:_MAX_REASON_CHARS])
            self._feeds[rank].close()
        else:
            raise ValueError(f"a message of kind {kind!r}")

    def _note_step(self, phase: str) -> None:
        self._on_load_step(LoadStep(phase[:_MAX_PHASE_CHARS]))

    def _rank(self, node: _Node, rank: int) -> int:
        if rank not in self._config.ranks_of(node.rank):
            raise ValueError(f"a message of worker {rank}, which is on another node")
        return rank


def _address(args: EngineArgs) -> str:
    return f"{args.master_addr}:{args.master_port}"


def _listen(args: EngineArgs) -> socket.socket:
    try:
        found = socket.getaddrinfo(args.master_addr, args.master_port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen at {_address(args)} (--master-addr, --master-port): {error.strerror or error}; "
            "the address must be one of its own and the port free"
        ) from None


def node_args(args: EngineArgs) -> EngineArgs:
    """Return the arguments of the workers on this machine, which share its cores."""
    threads = args.threads or max(len(os.sched_getaffinity(0)) // args.parallel_config.local_workers, 1)
    return msgspec.structs.replace(args, threads=threads)


class MultiNodeExecutor(MultiprocExecutor):
    """Executor of machine 0.

    Args:
        args: arguments of the engine.
        on_load_step: see `make_executor`.

    Raises (from the constructor):
        ConfigError: there is no key, or this machine cannot listen for the others.
    """

    def __init__(self, args: EngineArgs, on_load_step: OnLoadStep = ignore_step) -> None:
        config = args.parallel_config
        keys = read_keys(args)
        far = range(config.local_workers, config.world_size)
        pairs = [socket.socketpair() for _ in far]
        super().__init__(
            args, config.world_size, elsewhere=[ours for ours, _ in pairs], on_load_step=on_load_step
        )
        self._pairs = pairs
        feeds = dict(zip(far, (theirs for _, theirs in pairs), strict=True))
        self._nodes = NodeGroup(args, keys, feeds, on_load_step)

    def start(self) -> WorkerInfo:
        config = self._args.parallel_config
        if config.tensor > config.local_workers:
            logger.warning(
                "--tensor-parallel-size %d spans several nodes: each layer waits for the network",
                config.tensor,
            )
        logger.info("waiting for %d nodes at %s", config.nodes - 1, self._nodes.host)
        try:
            self._nodes.wait_until_ready()
        except EngineDead as error:
            self._nodes.close(str(error))
            raise
        family = socket.AF_INET6 if ":" in self._nodes.host else socket.AF_INET
        with socket.create_server((self._nodes.host, 0), family=family) as store:
            port = store.getsockname()[1]
            url = tcp_url(self._nodes.host, port)
            self._workers.start(Rendezvous(url, own_host=self._nodes.host, store=store.fileno()))
        self._nodes.start_workers(port)
        super()._send(INIT + self._encode(node_args(self._args)))  # the others have their own arguments
        try:
            return self._worker_info()
        except EngineError as error:
            self._nodes.close(str(error))
            raise

    def shutdown(self) -> None:
        self._nodes.close("" if self._death is None else str(self._death))
        super().shutdown()
        for ours, _ in self._pairs:
            ours.close()

    def _send(self, message: bytes) -> None:
        self._nodes.put(message)  # first, since it has the longer way
        super()._send(message)

    def _who(self, rank: int) -> str:
        if rank < self._args.parallel_config.local_workers:
            return super()._who(rank)
        node = rank // self._args.parallel_config.local_workers
        return f"{worker_name(self._args.parallel_config, rank)} ({self._nodes.describe_node(node)})"

    def _describe_exit(self, rank: int) -> str:
        if rank < self._args.parallel_config.local_workers:
            return super()._describe_exit(rank)
        return self._nodes.describe_exit(rank)
