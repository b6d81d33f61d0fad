"""The server's TLS: its handshakes are bounded, and its certificate changes only as a whole."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from argosy_engine.api.http.http_server import CertificateFiles, HttpServer, ServerCertificate
from argosy_engine.errors import ConfigError
from argosy_http import bounded_protocol
from argosy_http.bounded_protocol import MAX_TURNED_AWAY, ConnectionLimit, HttpLimits
from argosy_protocol.program.listen import has_unsent
from loopback_certificate import issue_certificate

pytestmark = pytest.mark.timeout(60)

MAX_CONNECTIONS = 4
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    return [issue_certificate(tmp_path_factory.mktemp(name)) for name in ("old", "new")]


@pytest.fixture
def files(tmp_path: Path, issued: list[tuple[Path, Path]]) -> CertificateFiles:
    """The old certificate, in files of its own."""
    chain, key = (shutil.copy(file, tmp_path) for file in issued[0])
    return CertificateFiles(str(chain), str(key))


async def answer(scope: Any, receive: Any, send: Callable[..., Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@asynccontextmanager
async def serving(
    certificate: ServerCertificate, limits: HttpLimits, application: Any = answer
) -> AsyncIterator[int]:
    """Serve HTTPS, and yield the port. A connection on which nothing more is asked is idle at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    protocol = ConnectionLimit.for_server(max_connections=MAX_CONNECTIONS, limits=limits)
    config = uvicorn.Config(
        application, http=protocol, lifespan="off", log_config=None, interface="asgi3", timeout_keep_alive=0
    )
    server = HttpServer(config, certificate)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.stop(0)
        await task


async def ask(port: int, authority: Path) -> bytes:
    """Return the response of a server that has this certificate.

    Raises:
        OSError: it has another one.
    """
    context = ssl.create_default_context(cafile=str(authority))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(REQUEST)
    response = await reader.readuntil(b"https")
    writer.close()
    return response


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for tells nobody
        await asyncio.sleep(0)


def run(test: Callable[[], Any], is_uvloop: bool) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if is_uvloop else None) as runner:
        runner.run(test())


@pytest.mark.parametrize("is_uvloop", [True, False])
def test_unfinished_handshakes_leave_room_for_others(
    files: CertificateFiles, issued: list[tuple[Path, Path]], is_uvloop: bool
) -> None:
    """The oldest ones are closed, long before their deadline."""
    limit = MAX_CONNECTIONS + MAX_TURNED_AWAY

    async def test() -> None:
        async with serving(ServerCertificate(files), HttpLimits(header_timeout_s=3600)) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * limit)]
            assert (await ask(port, issued[0][0])).startswith(b"HTTP/1.1 200")
            for reader, writer in silent[: 2 * limit]:
                with pytest.raises(OSError):  # noqa: PT012 - reset, or at its end
                    if not await reader.read(1):
                        raise ConnectionResetError
                writer.close()
            open_ones = [reader for reader, _ in silent[-limit // 2 :]]
            assert not [reader for reader in open_ones if reader.at_eof() or reader.exception()]
            for _, writer in silent:
                writer.close()

    run(test, is_uvloop)


def connect(port: int, authority: Path, kernel_bytes: int | None = None) -> ssl.SSLSocket:
    """Connect.

    Args:
        kernel_bytes: what the client's kernel takes of an answer that is not read, roughly; None: as usual.
    """
    context = ssl.create_default_context(cafile=str(authority))
    plain = socket.socket()
    plain.settimeout(60)
    if kernel_bytes is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_bytes)
    plain.connect(("127.0.0.1", port))
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


def connect_and_keep_silent(port: int, authority: Path, request: bytes = b"") -> socket.socket:
    """Return the transport of a connection whose TLS the client never ends; a request is answered first."""
    with connect(port, authority) as secured:
        secured.sendall(request)
        if request:
            assert secured.recv(9) == b"HTTP/1.1 "
        return socket.socket(fileno=os.dup(secured.fileno()))


def is_closed_by_server(transport: socket.socket) -> bool:
    transport.settimeout(20)  # less than the half minute that a server waits for the client's part of the end
    try:
        while transport.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_excess_connections_are_closed_whose_clients_do_not_end_them(
    files: CertificateFiles, issued: list[tuple[Path, Path]]
) -> None:
    limits = HttpLimits(header_timeout_s=3600, linger_s=3600)

    async def test() -> None:
        async with serving(ServerCertificate(files), limits) as port:
            count = MAX_CONNECTIONS + MAX_TURNED_AWAY
            silent = [
                await asyncio.to_thread(connect_and_keep_silent, port, issued[0][0]) for _ in range(count + 3)
            ]
            for transport in silent[count:]:
                assert await asyncio.to_thread(is_closed_by_server, transport)
            for transport in silent:
                transport.close()

    run(test, is_uvloop=True)


@pytest.mark.parametrize("is_uvloop", [True, False])
@pytest.mark.parametrize(
    "request_bytes",
    [
        REQUEST.replace(b"host: x", b"connection: close\r\nhost: x"),
        b"GET / HTTP/1.1\r\n\r\n",
        REQUEST,
    ],
    ids=["answered", "refused", "idle"],
)
def test_connections_end_although_their_clients_do_not_end_them(
    files: CertificateFiles, issued: list[tuple[Path, Path]], request_bytes: bytes, is_uvloop: bool
) -> None:
    async def test() -> None:
        limits = HttpLimits(header_timeout_s=3600, linger_s=0.01)
        async with serving(ServerCertificate(files), limits) as port:
            transport = await asyncio.to_thread(connect_and_keep_silent, port, issued[0][0], request_bytes)
            assert await asyncio.to_thread(is_closed_by_server, transport)
            transport.close()

    run(test, is_uvloop)


@pytest.mark.parametrize("is_uvloop", [True, False])
def test_a_client_that_reads_slowly_gets_all_of_its_last_answer(
    files: CertificateFiles, issued: list[tuple[Path, Path]], is_uvloop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for one that has all of it and does not end its side."""
    size, looks, may_read = 16 << 20, 0, threading.Event()

    def counted(transport: asyncio.BaseTransport) -> bool:
        nonlocal looks
        looks += 1
        if looks == 4:
            may_read.set()
        return has_unsent(transport)

    async def large(scope: Any, receive: Any, send: Callable[..., Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": bytes(size)})

    def read_late(port: int) -> int:
        with connect(port, issued[0][0], 16384) as secured:
            secured.sendall(REQUEST)
            assert may_read.wait(60)
            secured.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            received = 0
            while chunk := secured.recv(1 << 20):
                received += len(chunk)
            return received

    async def test() -> None:
        limits = HttpLimits(header_timeout_s=3600, linger_s=0.01)
        async with serving(ServerCertificate(files), limits, large) as port:
            assert await asyncio.to_thread(read_late, port) > size

    monkeypatch.setattr(bounded_protocol, "has_unsent", counted)
    run(test, is_uvloop)


def test_a_refusal_arrives_while_the_client_continues_to_send(
    files: CertificateFiles, issued: list[tuple[Path, Path]]
) -> None:
    """On the loop of production: asyncio's breaks a connection on which something comes after its end."""

    def send_all_then_read(port: int) -> bytes:
        with connect(port, issued[0][0]) as secured:
            secured.sendall(b"GET / HTTP/1.1\r\nx: " + b"x" * 8_000_000)
            return secured.recv(65536)

    async def test() -> None:
        limits = HttpLimits(header_timeout_s=3600, linger_s=60.0)  # a busy machine sends slowly
        async with serving(ServerCertificate(files), limits) as port:
            answered = await asyncio.to_thread(send_all_then_read, port)
            assert answered.startswith(b"HTTP/1.1 431 ")

    run(test, is_uvloop=True)


@pytest.mark.parametrize("is_uvloop", [True, False])
def test_a_handshake_has_a_deadline(files: CertificateFiles, is_uvloop: bool) -> None:
    async def test() -> None:
        async with serving(ServerCertificate(files), HttpLimits(header_timeout_s=0.05)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises(OSError):  # noqa: PT012
                if not await reader.read(1):
                    raise ConnectionResetError
            writer.close()

    run(test, is_uvloop)


async def test_a_certificate_is_renewed_when_both_of_its_files_are_written(
    files: CertificateFiles, issued: list[tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    certificate = ServerCertificate(files)
    (old, _), (new, new_key) = issued
    async with serving(certificate, HttpLimits()) as port:
        refreshing = asyncio.create_task(certificate.refresh(0.01))
        assert await ask(port, old)
        first = certificate.context
        shutil.copy(new, files.chain)
        await until(lambda: "cannot be used yet" in caplog.text)
        assert await ask(port, old)
        shutil.copy(new_key, files.key)
        await until(lambda: certificate.context is not first)
        assert await ask(port, new)
        with pytest.raises(ssl.SSLError):
            await ask(port, old)
        refreshing.cancel()


def test_files_that_do_not_match_are_refused_at_the_start(
    files: CertificateFiles, issued: list[tuple[Path, Path]]
) -> None:
    shutil.copy(issued[1][1], files.key)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ServerCertificate(files)
