"""NodeChannel: messages between the machines of an engine, over one TCP connection for each machine but the first.

A listening port that moves work is worth attacking (CVE-2025-32444, CVE-2025-30165), so both ends first prove that they
have the engine's key: each sends 32 random bytes and the HMAC-SHA256 of both under the key. Nothing else is read from a
peer that has not proved it. From these bytes come two session keys, one for each direction; every later message carries
a MAC over its number and its content, so that none can be changed, repeated or left out. Content is typed msgpack and
never pickle. It is not encrypted: neither are the tensors that workers exchange.

Owns: bytes, authentication, the detection of a machine that no longer answers. Must not know: what messages mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from argosy_engine.executor.broadcast import MAX_MESSAGE_BYTES

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
