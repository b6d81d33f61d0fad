"""nginx in front of a router, with the settings that it has by default: upstream in HTTP/1.0, and answers buffered."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import json
import os
import pwd
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from processes import answers, free_port, wait_until

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, Rig, chat, is_settled, rig

EXECUTABLE = shutil.which("nginx", path=os.environ["PATH"] + os.pathsep + "/usr/sbin")

CONFIGURATION = """\
{user}
daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path body;
  proxy_temp_path proxy;
  fastcgi_temp_path unused;
  uwsgi_temp_path unused;
  scgi_temp_path unused;
  upstream kept {{
    server {router};
    keepalive 4;
  }}
  server {{
    listen 127.0.0.1:{port};
    location = /nginx {{ return 200; }}
    location / {{
      proxy_pass http://{router};
    }}
    location /kept/ {{
      proxy_pass http://kept/;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
    }}
  }}
}}
"""
"""The second location reuses connections to the router, which nginx does only when told so."""

PREFIXES = ("", "/kept")
EVENTS = 2000
ESTABLISHED = "01"
"""State of a socket, as the kernel writes it."""

pytestmark = pytest.mark.skipif(
    EXECUTABLE is None, reason="no nginx on this machine (Debian's package `nginx`)"
)


@dataclass
class Proxied:
    """A router behind nginx."""

    rig: Rig
    http: httpx.AsyncClient
    """Sends its requests to nginx."""
    port: int

    async def chat(self, prefix: str, **fields: Any) -> httpx.Response:
        return await self.http.post(f"{prefix}/v1/chat/completions", json=chat(**fields))


@contextlib.asynccontextmanager
async def proxied(engines: Sequence[FakeEngine], folder: Path) -> AsyncIterator[Proxied]:
    async with rig(engines) as r:
        host, port = r.router.address
        listening = free_port()
        # As root its worker would be another user, who may not enter the folder.
        name = pwd.getpwuid(os.geteuid()).pw_name
        user = f"user {name} {grp.getgrgid(os.getegid()).gr_name};" if os.geteuid() == 0 else ""
        settings = CONFIGURATION.format(user=user, router=f"{host}:{port}", port=listening)
        (folder / "nginx.conf").write_text(settings)
        assert EXECUTABLE is not None
        process = await asyncio.create_subprocess_exec(
            EXECUTABLE, "-e", "stderr", "-p", str(folder), "-c", "nginx.conf", stdin=asyncio.subprocess.DEVNULL
        )  # fmt: skip
        url = f"http://127.0.0.1:{listening}"
        try:
            await asyncio.to_thread(
                wait_until, lambda: process.returncode is not None or answers(f"{url}/nginx"), "nginx"
            )
            assert process.returncode is None, "nginx has ended"
            async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False) as http:
                yield Proxied(r, http, listening)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def recite(connection: Connection, request: Received) -> None:
    """Stream far more events than nginx has room for in memory."""
    if not request.json.get("stream"):
        connection.answer(200, json.dumps({"choices": [], "said": "hello"}).encode())
        return
    connection.begin_stream()
    for number in range(EVENTS):
        connection.chunk(event(f"{number} "))
        await connection.writer.drain()
    connection.chunk(DONE)
    connection.end_stream()


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_answers_and_streams_arrive_whole_and_in_order(prefix: str, tmp_path: Path) -> None:
    async with proxied([FakeEngine(script=recite)], tmp_path) as p:
        whole = await p.chat(prefix)
        assert (whole.status_code, whole.json()["said"]) == (200, "hello")
        streamed = await p.chat(prefix, stream=True)
        assert streamed.status_code == 200
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = streamed.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        texts = [json.loads(each.removeprefix("data: "))["choices"][0]["delta"]["content"] for each in events]
        assert texts == [f"{number} " for number in range(EVENTS)]


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_an_error_passes_with_its_body_and_headers(prefix: str, tmp_path: Path) -> None:
    async with proxied([], tmp_path) as p:
        direct, behind = await p.rig.chat(), await p.chat(prefix)
        assert (behind.status_code, behind.json()) == (503, direct.json())
        for name in ("content-type", "retry-after", "x-should-retry"):
            assert behind.headers[name] == direct.headers[name]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_the_engine(prefix: str, stream: bool, tmp_path: Path) -> None:
    working, aborted = asyncio.Event(), asyncio.Event()

    async def work(connection: Connection, _: Received) -> None:
        if stream:
            connection.begin_stream()
            connection.chunk(event("hel"))
        working.set()
        await connection.gone()
        aborted.set()

    async with proxied([FakeEngine(script=work)], tmp_path) as p:
        async with asyncio.timeout(DEADLINE_S):
            asking = asyncio.create_task(p.chat(prefix, stream=stream))
            await working.wait()
            asking.cancel()
            await aborted.wait()
        await p.rig.until(lambda: is_settled(p.rig))


async def test_connections_are_reused_on_both_sides(tmp_path: Path) -> None:
    """The same two sockets carry every request, errors and streams included."""
    async with proxied([FakeEngine()], tmp_path) as p:
        body = json.dumps(chat(stream=True)).encode()
        head = f"POST /kept/v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        requests = [
            b"GET /kept/v1/models HTTP/1.1\r\nhost: a\r\n\r\n",
            head.encode() + body,
            b"GET /kept/nothing HTTP/1.1\r\nhost: a\r\n\r\n",
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", p.port)
        used = []
        try:
            for request in requests * 2:
                writer.write(request)
                assert await read_response(reader)
                used.append(connected_ports(p.rig.router.address[1]))
        finally:
            writer.transport.abort()
        assert len(used[0]) == 1
        assert used == [used[0]] * len(used)


def connected_ports(server: int) -> list[int]:
    """The clients' ports of open connections to a port of this machine (Linux only)."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state == ESTABLISHED and int(remote.partition(":")[2], 16) == server:
            found.append(int(local.partition(":")[2], 16))
    return found


async def read_response(reader: asyncio.StreamReader) -> bytes:
    """Read one response and leave the connection at its end."""
    async with asyncio.timeout(DEADLINE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" not in head:
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return await reader.readexactly(length)
        data = b""
        while size := int(await reader.readline(), 16):
            data += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
        return data
