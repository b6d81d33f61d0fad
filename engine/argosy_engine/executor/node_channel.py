"""NodeChannel: messages between the machines of an engine, over one TCP connection for each machine but the first.

A listening port that moves work is worth attacking (CVE-2025-32444, CVE-2025-30165), so both ends first prove that they
have the engine's key: each sends 32 random bytes and the HMAC-SHA256 of both under the key. Nothing else is read from a
peer that has not proved it. From these bytes come two session keys, one for each direction; every later message carries
a MAC over its number and its content, so that none can be changed, repeated or left out. Content is typed msgpack and
never pickle. It is not encrypted: neither are the tensors that workers exchange.

While a key is replaced, a machine may have the one before as well: two machines need one key in common. So a machine
that starts with the new key joins one that started before.

After the handshake the machine that joins sends `NodeHello` and gets `Admission`. From then on the first byte of a
message is its kind.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.metadata
import os
import secrets
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.executor.broadcast import MAX_MESSAGE_BYTES
from argosy_engine.sizing.resources import visible_gpus
from argosy_protocol import __version__

PROTOCOL = 1
"""Version of the handshake and of the messages."""
MAX_GREETING_BYTES = 1024
"""Bound of each message before the peer is authenticated."""
SILENCE_S = 30
"""After so long without an answer of its kernel, a machine counts as gone, and so does one that takes no data."""

_NONCE_BYTES = 32
_MAC_BYTES = 32
_LABEL = b"argosy node channel 1\0"
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5

_Bytes32 = Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
_T = TypeVar("_T")


class ChannelError(Exception):
    """The peer does not follow the protocol, or did not in time."""


class WrongKey(ChannelError):
    """One end has another key than the other."""


class _Challenge(Struct, array_like=True, forbid_unknown_fields=True):
    """From the end that listens."""

    protocol: Annotated[int, Meta(ge=0, le=1 << 32)]
    nonce: _Bytes32


class _Proof(Struct, array_like=True, forbid_unknown_fields=True):
    """From the end that connects."""

    nonce: _Bytes32
    mac: _Bytes32


class _Verdict(Struct, array_like=True, forbid_unknown_fields=True):
    """From the end that listens."""

    mac: _Bytes32 | None
    """None: the proof was wrong."""


class NodeChannel:
    """Authenticated messages over a connected socket. One thread may receive, any may send.

    Args:
        stream: blocking.
        sending, receiving: session keys of the two directions.
    """

    def __init__(self, stream: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._stream = stream
        self._sending, self._receiving = sending, receiving
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()
        self.own_host: str = stream.getsockname()[0]
        """Address of this machine in the network of the peer."""
        self.peer_host: str = stream.getpeername()[0]
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
            ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
            ("TCP_KEEPCNT", (SILENCE_S - _KEEPALIVE_IDLE_S) // _KEEPALIVE_INTERVAL_S),
            ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
        ):
            if hasattr(socket, option):  # Linux
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, *parts: bytes) -> None:
        """Send a message, given in parts.

        Raises:
            OSError: the peer has ended or no longer answers.
            ValueError: the message is longer than `MAX_MESSAGE_BYTES`.
        """
        message = b"".join(parts)
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")
        with self._lock:
            mac = _mac(self._sending, _NUMBER.pack(self._num_sent), message)
            self._num_sent += 1
            self._stream.sendall(_LENGTH.pack(len(message)) + mac + message)

    def receive(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """Wait for the next message. Returns None if the peer has closed the connection or no longer answers.

        Raises:
            ChannelError: the message is longer than `max_bytes`, or was not sent by the peer in this place.
        """
        try:
            head = _exactly(self._stream, _LENGTH.size + _MAC_BYTES)
            if head is None:
                return None
            size = _LENGTH.unpack_from(head)[0]
            if size > max_bytes:
                raise ChannelError(f"a message of {size} bytes exceeds {max_bytes}")
            message = _exactly(self._stream, size)
        except OSError:
            return None
        if message is None:
            return None
        mac = _mac(self._receiving, _NUMBER.pack(self._num_received), message)
        if not hmac.compare_digest(mac, head[_LENGTH.size :]):
            raise ChannelError("a message is not authentic")
        self._num_received += 1
        return message

    def finish(self) -> None:
        """Tell the peer that nothing more comes. It still gets what was sent."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the connection, also for a thread that receives. May be called twice."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def accept_peer(stream: socket.socket, keys: tuple[bytes, ...], timeout_s: float) -> NodeChannel:
    """Authenticate a peer that has connected and has one of the keys, as the end that listens.

    Raises:
        WrongKey: the peer has another key. It has been told.
        ChannelError: it does not follow the protocol, or took longer than `timeout_s`.
        OSError: it has ended.
    """
    deadline = time.monotonic() + timeout_s
    ours = secrets.token_bytes(_NONCE_BYTES)
    _send(stream, _Challenge(PROTOCOL, ours), deadline)
    proof = _receive(stream, _Proof, deadline)
    nonces = ours + proof.nonce
    key = None
    for each in keys:
        if hmac.compare_digest(proof.mac, _mac(each, _LABEL, b"connects", nonces)):
            key = each
    if key is None:
        _send(stream, _Verdict(None), deadline)
        raise WrongKey("its key is not this engine's")
    _send(stream, _Verdict(_mac(key, _LABEL, b"listens", nonces)), deadline)
    to_peer, from_peer = _session_keys(key, nonces)
    return _channel(stream, to_peer, from_peer)


def connect_to_peer(stream: socket.socket, key: bytes, timeout_s: float) -> NodeChannel:
    """Authenticate the peer that listens, as the end that has connected.

    Raises:
        WrongKey: either end has another key than the other.
        ChannelError: the peer does not follow the protocol, or took longer than `timeout_s`.
        OSError: it has ended.
    """
    deadline = time.monotonic() + timeout_s
    challenge = _receive(stream, _Challenge, deadline)
    if challenge.protocol != PROTOCOL:
        raise ChannelError(
            f"its protocol has version {challenge.protocol}, and this program's {PROTOCOL}: install the same "
            "version of Argosy everywhere"
        )
    ours = secrets.token_bytes(_NONCE_BYTES)
    nonces = challenge.nonce + ours
    _send(stream, _Proof(ours, _mac(key, _LABEL, b"connects", nonces)), deadline)
    verdict = _receive(stream, _Verdict, deadline)
    expected = _mac(key, _LABEL, b"listens", nonces)
    if verdict.mac is None or not hmac.compare_digest(verdict.mac, expected):
        raise WrongKey("its key is not this machine's")
    from_peer, to_peer = _session_keys(key, nonces)
    return _channel(stream, to_peer, from_peer)


def _channel(stream: socket.socket, sending: bytes, receiving: bytes) -> NodeChannel:
    stream.settimeout(None)
    return NodeChannel(stream, sending, receiving)


def _session_keys(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the keys of what the listening end sends, and of what it receives."""
    return _mac(key, _LABEL, b"session, sent", nonces), _mac(key, _LABEL, b"session, received", nonces)


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


def _send(stream: socket.socket, message: Struct, deadline: float) -> None:
    payload = msgspec.msgpack.encode(message)
    _limit(stream, deadline)
    stream.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(stream: socket.socket, kind: type[_T], deadline: float) -> _T:
    head = _exactly(stream, _LENGTH.size, deadline)
    size = 0 if head is None else _LENGTH.unpack(head)[0]
    if size > MAX_GREETING_BYTES:
        raise ChannelError("it is not part of an Argosy engine")
    payload = None if head is None else _exactly(stream, size, deadline)
    if payload is None:
        raise ChannelError("it has closed the connection")
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError:
        raise ChannelError("it is not part of an Argosy engine") from None


def _limit(stream: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ChannelError("it did not answer in time")
    stream.settimeout(left)


def _exactly(stream: socket.socket, size: int, deadline: float | None = None) -> bytes | None:
    """Read so many bytes; None if the peer has closed before.

    Raises:
        ChannelError: the deadline has passed.
        OSError: the connection is lost.
    """
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            _limit(stream, deadline)
        try:
            part = stream.recv(min(size - len(content), 1 << 20))
        except TimeoutError:
            if deadline is None:  # the kernel's: the machine no longer answers
                raise
            raise ChannelError("it did not answer in time") from None
        if not part:
            return None
        content += part
    return bytes(content)


MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096
MAX_KEYS = 8
KEY_VARIABLE = "ARGOSY_NODE_KEY"


def read_keys(args: EngineArgs) -> tuple[bytes, ...]:
    """Return the keys of the engine's machines, the newest first: the lines of the variable, or the one of the file,
    whose bytes may be any.

    Raises:
        ConfigError: there is none, there are more than `MAX_KEYS`, one is too short or too long, or the file cannot be
            read.
    """
    if args.node_key_file is None:
        source = KEY_VARIABLE
        keys = [line.strip().encode() for line in os.environ.get(KEY_VARIABLE, "").strip().splitlines()]
    else:
        source = f"--node-key-file {args.node_key_file}"
        try:
            with Path(args.node_key_file).open("rb") as file:
                keys = [key] if (key := file.read(MAX_KEY_BYTES + 1).strip()) else []
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror}") from None
    if not keys:
        raise ConfigError(
            f"--nnodes {args.nnodes} needs a key by which the machines recognise each other: give all of them the same "
            f"--node-key-file or {KEY_VARIABLE}, such as 32 random bytes in hexadecimal digits"
        )
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{source}: it has {len(keys)} keys, one a line, and must have at most {MAX_KEYS}")
    for key in keys:
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"{source}: the key has {len(key)} bytes, and must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
            )
    return tuple(keys)


MAX_HELLO_BYTES = 1 << 16
MAX_PROGRESS_CHARS = 200

START = b"\x00"
"""From machine 0: `NodeStart`. Start the workers; messages for them follow."""
MESSAGE = b"\x01"
"""From machine 0: one of `worker_protocol`, for every worker."""
STOP = b"\x02"
"""From machine 0: why the engine has died, as text. Last message."""

PROGRESS = b"\x00"
"""To machine 0: what the machine is doing, as text."""
READY = b"\x01"
"""To machine 0: the model is on the machine; workers can start."""
ANSWER = b"\x02"
"""To machine 0: `RANK_BYTES` of the worker's rank, and a message of this worker."""
ENDED = b"\x03"
"""To machine 0: `WorkerExit`. Last message of a worker."""
RANK_BYTES = 2

Text = Annotated[str, Meta(max_length=4096)]


class NodeHello(Struct, frozen=True, kw_only=True):
    """What a machine says of itself. Version, device and flags have to be the same on all, because workers that differ
    would compute different things or wait for each other forever.
    """

    node_rank: Annotated[int, Meta(ge=0, le=1023)]
    host_name: Text
    version: Text
    """Argosy's."""
    torch: Text
    device: Text
    model_name: Text
    flags: Annotated[dict[Text, Text], Meta(max_length=256)]
    """Engine flags that are not at their defaults, as JSON; long ones as a digest."""


class Admission(Struct, frozen=True, array_like=True):
    """Answer to `NodeHello`."""

    refusal: str = ""
    """Why the machine may not join; empty: it may."""
    can_retry: bool = False
    """Whether that may change by itself."""


class NodeStart(Struct, frozen=True, array_like=True):
    """Where rank 0 serves torch's store."""

    host: Text
    port: Annotated[int, Meta(ge=1, le=65535)]


class WorkerExit(Struct, frozen=True, array_like=True):
    """The end of a worker's process."""

    rank: int
    how: str


_LONGEST_SHOWN = 80
_OF_ONE_MACHINE = frozenset(
    {
        "model",  # a path; the name is compared, and the weights once they are loaded
        "revision",
        "served_model_name",
        "download_dir",
        "device",  # what it stands for is compared
        "threads",
        "node_rank",
        "master_addr",
        "master_port",
        "node_key_file",
        "distributed_timeout_seconds",
    }
)
"""Flags that machines may give different values."""


def hello(args: EngineArgs) -> NodeHello:
    """Describe this machine.

    Args:
        args: before or after the model was fetched.
    """
    flags = msgspec.to_builtins(args)
    return NodeHello(
        node_rank=args.node_rank,
        host_name=socket.gethostname(),
        version=__version__,
        torch=importlib.metadata.version("torch"),
        device=(("cuda" if visible_gpus() else "cpu") if args.device == "auto" else args.device),
        model_name=args.canonical_name,
        flags={
            name: _short(msgspec.json.encode(value, order="sorted").decode())
            for name, value in flags.items()
            if name not in _OF_ONE_MACHINE
        },
    )


def _short(value: str) -> str:
    if len(value) <= _LONGEST_SHOWN:
        return value
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:16]}"


def mismatch(first: NodeHello, joiner: NodeHello) -> str | None:
    """Say what has to be the same on both machines and is not; None if nothing.

    Args:
        first: machine 0.
    """
    for what, ours, theirs, remedy in (
        ("Argosy", first.version, joiner.version, "install the same version everywhere"),
        ("torch", first.torch, joiner.torch, "install the same version everywhere"),
        (
            "the model",
            first.model_name,
            joiner.model_name,
            "give both the same model, or --served-model-name",
        ),
        ("the device", first.device, joiner.device, "give both the same --device"),
    ):
        if ours != theirs:
            return f"{what} is {theirs} on node {joiner.node_rank} and {ours} on node 0; {remedy}"
    for name in sorted(first.flags.keys() | joiner.flags.keys()):
        ours, theirs = (each.flags.get(name, "the default") for each in (first, joiner))
        if ours != theirs:
            return (
                f"--{name.replace('_', '-')} is {theirs} on node {joiner.node_rank} and {ours} on node 0; start every "
                "node with the same flags"
            )
    return None
