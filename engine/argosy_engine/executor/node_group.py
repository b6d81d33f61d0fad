"""NodeGroup: the other machines of an engine, as machine 0 sees them.

It listens for them, admits each rank once, passes the executor's messages on, and feeds their workers' answers into
sockets, so that the executor reads all workers alike. A machine that joined and is lost is the end of its workers'
sockets, and so of the engine. The port stays open, so that whoever comes later is told why it may not join.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.executor.broadcast import MessageStream
from argosy_engine.executor.handshake_slots import HandshakeSlots
from argosy_engine.executor.node_channel import ChannelError, NodeChannel, accept_peer
from argosy_engine.executor.node_greeting import hello, mismatch
from argosy_engine.executor.node_messages import (
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
    NodeHello,
    NodeStart,
    WorkerExit,
)
from argosy_engine.executor.refusal_log import RefusalLog
from argosy_engine.messages.load_step import LoadStep, OnLoadStep, ignore_step

logger = logging.getLogger("argosy.core")

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
