"""Node channels: peers without the key are refused, and messages cannot be changed, repeated or left out."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from argosy_engine.executor.node_channel import (
    PROTOCOL,
    ChannelError,
    NodeChannel,
    WrongKey,
    accept_peer,
    connect_to_peer,
)

KEY = b"k" * 32
NONCE = b"n" * 32


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection: the end that listened, and the end that has connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connected = socket.create_connection(server.getsockname(), timeout=60)
        accepted, _ = server.accept()
        with connected, accepted:
            yield accepted, connected


def joined(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> tuple[NodeChannel, NodeChannel]:
    accepting: Future[NodeChannel] = pool.submit(accept_peer, ends[0], (KEY,), 60.0)
    connected = connect_to_peer(ends[1], KEY, 60.0)
    return accepting.result(), connected


def test_messages_arrive_in_order_both_ways(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    first, second = joined(pool, ends)
    first.send(b"a", b"b")
    first.send(b"")
    second.send(b"c" * (1 << 20))
    first.finish()
    assert [second.receive(), second.receive(), second.receive()] == [b"ab", b"", None]
    second.close()
    assert [first.receive(), first.receive()] == [b"c" * (1 << 20), None]
    assert first.peer_host == second.own_host == "127.0.0.1"


def test_both_ends_notice_another_key(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    accepting = pool.submit(accept_peer, ends[0], (KEY,), 60.0)
    with pytest.raises(WrongKey):
        connect_to_peer(ends[1], b"x" * 32, 60.0)
    with pytest.raises(WrongKey):
        accepting.result()


def test_a_peer_without_the_key_cannot_pose_as_the_first_machine(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    """It sends what it has received as its own proof."""
    connecting = pool.submit(connect_to_peer, ends[1], KEY, 60.0)
    send(ends[0], [PROTOCOL, NONCE])
    _, mac = receive(ends[0])
    send(ends[0], [mac])
    with pytest.raises(WrongKey):
        connecting.result()


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        lambda frame: frame[:4] + bytes([frame[4] ^ 1]) + frame[5:],
        lambda frame: b"",
    ],
    ids=["content", "mac", "left out"],
)
def test_a_message_that_was_changed_or_left_out_ends_the_channel(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket], change: Callable[[bytes], bytes]
) -> None:
    first, second = joined(pool, ends)
    frames = [sent(first, ends[1], text) for text in (b"one", b"two")]
    ends[0].sendall(change(frames[0]) + frames[1])
    with pytest.raises(ChannelError, match="not authentic"):
        second.receive()


def test_a_message_that_is_repeated_ends_the_channel(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    first, second = joined(pool, ends)
    frame = sent(first, ends[1], b"one")
    ends[0].sendall(frame + frame)
    assert second.receive() == b"one"
    with pytest.raises(ChannelError, match="not authentic"):
        second.receive()


def test_a_message_of_the_other_direction_is_not_authentic(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    first, _ = joined(pool, ends)
    ends[1].sendall(sent(first, ends[1], b"one"))
    with pytest.raises(ChannelError, match="not authentic"):
        first.receive()


def test_a_message_that_is_too_long_is_not_read(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    first, second = joined(pool, ends)
    first.send(b"12345")
    with pytest.raises(ChannelError, match="5 bytes exceeds 4"):
        second.receive(4)


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 20),
        struct.pack("<I", 3) + b"\x92\x01\x02",
        struct.pack("<I", 4) + b"\x80\x04N.",  # a pickle
    ],
    ids=["http", "long", "short nonce", "pickle"],
)
def test_what_is_no_proof_is_refused(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket], content: bytes
) -> None:
    accepting = pool.submit(accept_peer, ends[0], (KEY,), 60.0)
    receive(ends[1])
    ends[1].sendall(content)
    ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelError):
        accepting.result()


def test_a_peer_that_says_nothing_is_given_up(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises(ChannelError, match="in time"):
        accept_peer(ends[0], (KEY,), 0.05)


def test_another_version_of_the_protocol_is_named(
    pool: ThreadPoolExecutor, ends: tuple[socket.socket, socket.socket]
) -> None:
    send(ends[0], [PROTOCOL + 1, NONCE])
    with pytest.raises(ChannelError, match="install the same version"):
        connect_to_peer(ends[1], KEY, 60.0)


def send(stream: socket.socket, message: list[object]) -> None:
    payload = msgspec.msgpack.encode(message)
    stream.sendall(struct.pack("<I", len(payload)) + payload)


def receive(stream: socket.socket) -> list[Any]:
    size = struct.unpack("<I", stream.recv(4, socket.MSG_WAITALL))[0]
    return list(msgspec.msgpack.decode(stream.recv(size, socket.MSG_WAITALL)))


def sent(channel: NodeChannel, peer: socket.socket, text: bytes) -> bytes:
    """Let a channel send a message, and take it from its way."""
    channel.send(text)
    return peer.recv(36 + len(text), socket.MSG_WAITALL)
