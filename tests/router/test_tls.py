"""TLS with clients and with replicas, on certificates that the tests issue."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from argosy.commands.admin import route as route_command
from argosy.errors import CommandError
from argosy_router.admin import server
from argosy_router.config import ConfigError, RouterConfig, ServerLimits, UpstreamLimits
from argosy_router.http import tls
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.upstream import ConnectFailed, ConnectionPool, fetch
from argosy_router.main import EXIT_USAGE, main

from .fake_engine import Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, Rig, StoppedClock, chat, read_all, rig
from .raw_requests import request_bytes, stop_reading


@dataclass(frozen=True)
class Authority:
    """One CA; all files of a test lie in its folder."""

    folder: Path
    name: str

    @property
    def ca(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def issue(self, name: str, *, into: str | None = None, san: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """Certificate and key, in files called `into`, else `name`."""
        key, request = self.folder / f"{into or name}.key", self.folder / f"{name}.csr"
        certificate = self.folder / f"{into or name}.pem"
        _openssl("req", "-new", *_NEW_KEY, "-keyout", key, "-subj", f"/CN={name}", "-out", request)
        extensions = self.folder / f"{name}.cnf"
        extensions.write_text(f"subjectAltName={san}\n")
        _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.folder / f"{self.name}.key",
                 "-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", certificate)  # fmt: skip
        return certificate, key


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def authority(tmp_path: Path) -> Callable[[str], Authority]:
    """Makes authorities by name."""

    def make(name: str) -> Authority:
        made = Authority(tmp_path, name)
        _openssl("req", "-x509", *_NEW_KEY, "-keyout", tmp_path / f"{name}.key", "-subj", f"/CN={name}",
                 "-days", "2", "-out", made.ca)  # fmt: skip
        return made

    return make


def trusting(authority: Authority, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """What a client of the router believes, and shows."""
    context = ssl.create_default_context(cafile=authority.ca)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


async def served_name(r: Rig, context: ssl.SSLContext, address: tuple[str, int] | None = None) -> str:
    """Common name on the certificate a new connection sees."""
    _, writer = await asyncio.open_connection(*(address or r.router.address), ssl=context)
    try:
        subject = dict(pair[0] for pair in writer.get_extra_info("peercert")["subject"])
        return str(subject["commonName"])
    finally:
        writer.transport.abort()


async def is_served(r: Rig, context: ssl.SSLContext) -> bool:
    """Whether a new connection's handshake ends before its deadline."""
    try:
        return await served_name(r, context) == "router"
    except OSError:
        return False


# clients


async def test_clients_speak_tls(authority: Callable[[str], Authority]) -> None:
    ca = authority("ca")
    certificate, key = ca.issue("router")
    async with rig([FakeEngine()], ssl_certfile=certificate, ssl_keyfile=key) as r:
        assert r.router.url.startswith("https://")
        async with httpx.AsyncClient(base_url=r.router.url, verify=trusting(ca), trust_env=False) as client:
            for stream in (False, True, False):
                answer = await client.post("/v1/chat/completions", json=chat(stream=stream))
                assert answer.status_code == 200
                assert answer.text.endswith("data: [DONE]\n\n" if stream else "}")
        with pytest.raises(httpx.ConnectError):  # the rig's own client believes no authority
            await r.chat()


async def test_plain_http_to_a_tls_port_closes_only_its_connection(
    authority: Callable[[str], Authority],
) -> None:
    ca = authority("ca")
    certificate, key = ca.issue("router")
    limits = ServerLimits(tls_handshake_timeout_s=0.1)
    async with rig([FakeEngine()], ssl_certfile=certificate, ssl_keyfile=key, server=limits) as r:
        for sent in (b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01", b""):
            reader, writer = await asyncio.open_connection(*r.router.address)
            writer.write(sent)  # the last two wait for the deadline
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
                assert not answer.startswith(b"HTTP/1.1")
            writer.transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            while not await is_served(r, trusting(ca)):  # one that is in time
                pass


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "half a hello"])
async def test_silent_handshakes_block_no_client(authority: Callable[[str], Authority], sent: bytes) -> None:
    ca = authority("ca")
    certificate, key = ca.issue("router")
    limits = ServerLimits(max_connections=16)
    async with (
        rig([FakeEngine()], ssl_certfile=certificate, ssl_keyfile=key, server=limits) as r,
        contextlib.AsyncExitStack() as stack,
    ):
        readers = []
        for reader, writer in await asyncio.gather(
            *[asyncio.open_connection(*r.router.address) for _ in range(40)]
        ):
            stack.callback(lambda writer=writer: writer.transport.abort())
            writer.write(sent)
            readers.append(reader)
        assert await served_name(r, trusting(ca)) == "router"
        for reader in readers[:20]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b"", "the oldest gave way"
        async with httpx.AsyncClient(base_url=r.router.url, verify=trusting(ca), trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            assert len(r.router.server.connections) <= 16
            await stack.aclose()
            for _ in range(20):  # those that gave way have left no seat taken
                assert await served_name(r, trusting(ca)) == "router"
            assert (await client.get("/health")).status_code == 200
        assert r.router.server.connection_limit.refused == 0


async def test_a_refusal_and_a_cut_arrive_over_tls(authority: Callable[[str], Authority]) -> None:
    gone = asyncio.Event()

    async def endless(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        await connection.gone()
        gone.set()

    ca = authority("ca")
    certificate, key = ca.issue("router")
    async with rig([FakeEngine(script=endless)], ssl_certfile=certificate, ssl_keyfile=key) as r:
        reader, writer = await asyncio.open_connection(*r.router.address, ssl=trusting(ca))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na")
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.transport.abort()
        reader, writer = await asyncio.open_connection(*r.router.address, ssl=trusting(ca))
        writer.write(request_bytes(stream=True))
        await reader.readuntil(b"hel")
        writer.transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()


def widen(writer: asyncio.StreamWriter) -> None:
    """Let the kernel take some 30 KB of what is not read: with less, each few KB wait for a delayed acknowledgement."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)


async def test_what_a_client_does_not_read_counts_though_tls_has_taken_it(
    authority: Callable[[str], Authority],
) -> None:
    """TLS encrypts all that it is given at once, and tells of nothing that its own connection holds: after its client
    had read some 50 KB, nothing counted."""
    ca, size = authority("ca"), 1_000_000
    certificate, key = ca.issue("router")

    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, b'{"x":"%b"}' % (b"x" * size))

    async with rig([FakeEngine(script=answer)], ssl_certfile=certificate, ssl_keyfile=key) as r:
        reader, writer = await asyncio.open_connection(*r.router.address, ssl=trusting(ca), limit=1024)
        memory = r.router.server.body_memory
        try:
            await r.until(lambda: len(r.router.server.connections) == 1)
            stop_reading(r, writer)
            writer.write(request_bytes())
            await r.until(lambda: memory.held > size * 3 // 4)
            widen(writer)
            writer.transport.resume_reading()  # of what is not read, the reader takes little
            async with asyncio.timeout(DEADLINE_S):
                await reader.readexactly(size // 2)
            assert memory.held > size * 3 // 4
            assert [connection.is_behind for connection in r.router.server.connections] == [True]
        finally:
            writer.transport.abort()
        await r.until(lambda: memory.held == 0)


async def test_a_client_that_reads_slowly_gets_all_of_its_last_answer(
    authority: Callable[[str], Authority],
) -> None:
    """TLS has taken what the client has not read; the end of TLS must not be the end of that."""
    ca, text = authority("ca"), b"x" * 40_000
    certificate, key = ca.issue("router")

    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, b'{"x":"%b"}' % text)

    fields = {"ssl_certfile": certificate, "ssl_keyfile": key, "server": ServerLimits(linger_s=0.001)}
    async with rig([FakeEngine(script=answer)], clock=StoppedClock(), **fields) as r:
        reader, writer = await asyncio.open_connection(*r.router.address, ssl=trusting(ca))
        try:
            await r.until(lambda: len(r.router.server.connections) == 1)
            (connection,) = r.router.server.connections
            stop_reading(r, writer)
            writer.write(request_bytes().replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            await r.until(connection.transport.is_closing)
            for _ in range(4):
                await r.pass_time(1.0)
            widen(writer)
            writer.transport.resume_reading()
            async with asyncio.timeout(DEADLINE_S):
                assert (await reader.read()).endswith(text + b'"}')
        finally:
            writer.transport.abort()


async def test_a_connection_ends_although_its_client_does_not_end_it(
    authority: Callable[[str], Authority],
) -> None:
    ca = authority("ca")
    certificate, key = ca.issue("router")

    def refused(address: tuple[str, int]) -> ssl.SSLSocket:
        plain = socket.create_connection(address, timeout=DEADLINE_S)
        secured = trusting(ca).wrap_socket(plain, server_hostname="127.0.0.1")
        secured.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert secured.recv(13) == b"HTTP/1.1 400 "
        return secured

    async with rig([FakeEngine()], clock=StoppedClock(), ssl_certfile=certificate, ssl_keyfile=key) as r:
        with await asyncio.to_thread(refused, r.router.address):
            async with asyncio.timeout(DEADLINE_S):
                while r.router.server.connections:
                    await r.pass_time(r.router.config.server.linger_s)


async def test_a_renewed_certificate_is_used_and_cuts_nothing(authority: Callable[[str], Authority]) -> None:
    ca = authority("ca")
    certificate, key = ca.issue("first", into="router")
    context = trusting(ca)
    async with (
        rig([FakeEngine()], ssl_certfile=certificate, ssl_keyfile=key) as r,
        httpx.AsyncClient(base_url=r.router.url, verify=context, trust_env=False) as client,
    ):
        assert (await client.get("/health")).status_code == 200
        (connection,) = r.router.server.connections
        assert await served_name(r, context) == "first"
        ca.issue("second", into="router")
        async with asyncio.timeout(DEADLINE_S):
            while await served_name(r, context) != "second":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        assert connection in r.router.server.connections


async def test_unusable_files_keep_the_last_certificate(authority: Callable[[str], Authority]) -> None:
    ca = authority("ca")
    certificate, key = ca.issue("router")
    files = tls.ServerTls(certificate, key)
    good = certificate.read_text()
    ca.issue("other")
    for broken in ("", "no certificate", (certificate.parent / "other.pem").read_text()):
        certificate.write_text(broken)
        with pytest.raises(OSError):
            files.reload()
    certificate.write_text(good)
    files.reload()


async def test_clients_may_have_to_show_a_certificate(authority: Callable[[str], Authority]) -> None:
    ca, clients, strangers = authority("ca"), authority("clients"), authority("strangers")
    certificate, key = ca.issue("router")
    known, unknown = clients.issue("known"), strangers.issue("unknown")
    fields = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": clients.ca}
    async with rig([FakeEngine()], **fields) as r:

        async def status(context: ssl.SSLContext) -> int:
            async with httpx.AsyncClient(base_url=r.router.url, verify=context, trust_env=False) as client:
                return (await client.get("/health")).status_code

        async def is_accepted(context: ssl.SSLContext) -> bool:
            try:
                return await status(context) == 200
            except httpx.TransportError:
                return False

        assert await status(trusting(ca, known)) == 200
        for shown in (None, unknown):
            with pytest.raises(httpx.TransportError):
                await status(trusting(ca, shown))
        clients.ca.write_bytes(strangers.ca.read_bytes())
        async with asyncio.timeout(DEADLINE_S):
            while not await is_accepted(trusting(ca, unknown)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(httpx.TransportError):
            await status(trusting(ca, known))


# the admin port


async def admin_name(r: Rig, context: ssl.SSLContext) -> str:
    """Common name on the certificate of the admin port."""
    url = httpx.URL(r.router.admin_url)
    return await served_name(r, context, (url.host, url.port or 0))


async def test_the_admin_port_speaks_tls_and_is_renewed(authority: Callable[[str], Authority]) -> None:
    ca = authority("ca")
    certificate, key = ca.issue("first", into="router")
    context = trusting(ca)
    async with (
        rig([FakeEngine()], ssl_certfile=certificate, ssl_keyfile=key, admin_port=0) as r,
        httpx.AsyncClient(base_url=r.router.admin_url, verify=context, trust_env=False) as client,
    ):
        assert r.router.admin_url.startswith("https://")
        for path in ("/ready", "/metrics", "/overview", "/"):
            assert (await client.get(path)).status_code == 200
        with pytest.raises(httpx.TransportError):
            await r.http.get(r.router.admin_url.replace("https", "http") + "/ready")
        assert await admin_name(r, context) == "first"
        ca.issue("second", into="router")
        async with asyncio.timeout(DEADLINE_S):
            while await admin_name(r, context) != "second":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await client.get("/ready")).status_code == 200


async def test_a_handshake_with_the_admin_port_has_a_deadline(
    authority: Callable[[str], Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the minute that asyncio gives by default."""
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.1)
    certificate, key = authority("ca").issue("router")
    async with rig([FakeEngine()], ssl_certfile=certificate, ssl_keyfile=key, admin_port=0) as r:
        url = httpx.URL(r.router.admin_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        assert await read_all(reader) == b""
        writer.close()


async def test_silent_handshakes_with_the_admin_port_block_no_probe(
    authority: Callable[[str], Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_HANDSHAKES", 8)
    ca = authority("ca")
    certificate, key = ca.issue("router")
    fields = {"ssl_certfile": certificate, "ssl_keyfile": key, "admin_port": 0}
    async with rig([FakeEngine()], **fields) as r, contextlib.AsyncExitStack() as stack:
        url = httpx.URL(r.router.admin_url)
        silent = await asyncio.gather(*[asyncio.open_connection(url.host, url.port) for _ in range(20)])
        for _, writer in silent:
            stack.callback(writer.transport.abort)
        async with httpx.AsyncClient(verify=trusting(ca), trust_env=False) as client:
            for reader, _ in silent[:12]:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b"", "the oldest gave way"
            assert (await client.get(f"{url}/ready")).status_code == 200
        handshakes = [each for each in asyncio.all_tasks() if "of uvicorn" in each.get_name()]
        assert len(handshakes) <= 8


async def test_probes_need_no_certificate_of_their_own(authority: Callable[[str], Authority]) -> None:
    ca, clients = authority("ca"), authority("clients")
    certificate, key = ca.issue("router")
    fields = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": clients.ca, "admin_port": 0}
    async with (
        rig([FakeEngine()], **fields) as r,
        httpx.AsyncClient(verify=trusting(ca), trust_env=False) as client,
    ):
        assert (await client.get(r.router.admin_url + "/ready")).status_code == 200
        with pytest.raises(httpx.TransportError):
            await client.get(r.router.url + "/ready")


async def test_argosy_route_asks_over_tls(
    authority: Callable[[str], Authority], capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = authority("ca").issue("router")
    async with rig([FakeEngine()], ssl_certfile=certificate, ssl_keyfile=key, admin_port=0) as r:
        arguments = ["tiny", "hi", "--admin-url", r.router.admin_url]
        with pytest.raises(CommandError, match="--insecure"):
            await asyncio.to_thread(route_command, arguments)
        assert await asyncio.to_thread(route_command, [*arguments, "--insecure"]) == 0
        assert capsys.readouterr().out.startswith("r0 ")


def test_configuration(
    authority: Callable[[str], Authority], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = authority("ca")
    certificate, _ = ca.issue("router")
    flags = ["--replica", "http://a:1", "--port", "0", "--admin-port", "-1"]
    encrypted = tmp_path / "encrypted.key"
    _openssl("ec", "-in", tmp_path / "router.key", "-aes128", "-passout", "pass:secret", "-out", encrypted)
    for broken, message in (
        (["--ssl-keyfile", "k"], "need --ssl-certfile"),
        (["--ssl-certfile", str(tmp_path / "absent")], "No such file"),
        (["--ssl-certfile", str(certificate), "--ssl-keyfile", str(tmp_path / "ca.key")], "mismatch"),
        (["--ssl-certfile", str(certificate), "--ssl-keyfile", str(encrypted)], "without a password"),
        (["--replica-ca-certs", str(tmp_path / "absent")], "No such file"),
        (["--replica-ca-certs", str(ca.ca), "--replica-insecure"], "exclude"),
    ):
        assert main([*flags, *broken]) == EXIT_USAGE
        assert message.lower() in capsys.readouterr().err.lower()
    with pytest.raises(ConfigError):
        RouterConfig(replicas=("http://a:1",), ssl_ca_certs=ca.ca).check()


# replicas


class TlsEngine(FakeEngine):
    """A replica that speaks TLS."""

    def __init__(self, certificate: tuple[Path, Path]) -> None:
        super().__init__()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(*certificate)

    async def start(self) -> None:
        self.epoch += 1
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self.context)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


async def test_replicas_speak_tls(authority: Callable[[str], Authority]) -> None:
    ca = authority("ca")
    async with rig([TlsEngine(ca.issue("engine"))], replica_ca_certs=ca.ca) as r:
        await r.until_state(0, "synced")
        for stream in (False, True):
            assert (await r.chat(stream=stream)).status_code == 200
        assert r.replica(0).pool.idle == 1, "connections are kept and used again"


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_a_replica_that_cannot_be_believed_gets_nothing(
    authority: Callable[[str], Authority], wrong: str
) -> None:
    ca, other = authority("ca"), authority("other")
    certificate = ca.issue("engine", san="IP:127.0.0.1" if wrong == "authority" else "DNS:elsewhere")
    believed = other.ca if wrong == "authority" else ca.ca
    async with rig([TlsEngine(certificate)], replica_ca_certs=believed, wait=False) as r:
        with pytest.raises(ConnectFailed, match="certificate verify failed"):
            await r.replica(0).pool.connect()
        assert (await r.chat()).status_code == 503
    async with rig([TlsEngine(certificate)], replica_insecure=True) as r:
        assert (await r.chat()).status_code == 200


async def test_a_replica_may_be_reached_by_address_and_known_by_name(
    authority: Callable[[str], Authority],
) -> None:
    ca = authority("ca")
    wheel = TimerWheel(asyncio.get_running_loop())
    async with TlsEngine(ca.issue("engine", san="DNS:engines.local")) as engine:
        pool = ConnectionPool(engine.url, UpstreamLimits(), wheel, tls.UpstreamTls(ca.ca), "engines.local")
        assert (await fetch(pool, "/health", "", 5.0)).status == 200
        assert pool.authority == f"engines.local:{engine.port}"
    wheel.close()
