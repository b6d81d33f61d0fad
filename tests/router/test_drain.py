"""Draining and stopping a router: running requests end, new ones are refused."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from argosy_protocol.fleet import FleetDocument, encode_fleet
from processes import free_port

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, raw, rig, service, until
from .raw_requests import request_bytes


async def test_drain_finishes_running_requests_and_accepts_no_new_ones() -> None:
    go_on = asyncio.Event()

    async def stream(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("a"))
        await go_on.wait()
        connection.chunk(event("b") + DONE)
        connection.end_stream()

    async with (
        rig([FakeEngine(script=stream)]) as r,
        raw(r.router) as (idle, _),
        raw(r.router) as (reader, writer),
    ):
        writer.write(request_bytes(stream=True))
        await reader.readuntil(b"\n\n")
        address = r.router.address
        drain = asyncio.create_task(r.router.drain())
        assert await idle.read() == b"", "idle connections are closed"
        assert not r.router.application.is_ready
        with pytest.raises(OSError):
            await asyncio.open_connection(*address)
        go_on.set()
        rest = await reader.read()
        assert rest.endswith(b"0\r\n\r\n"), "the connection closes after the answer"
        await drain
        assert r.router.requests.inflight == 0


async def test_a_request_being_received_is_answered_before_the_end() -> None:
    async with rig([FakeEngine()]) as r, raw(r.router) as (reader, writer):
        whole = request_bytes()
        writer.write(whole[:-5])
        await r.until(lambda: r.router.server.busy == 1)
        drain = asyncio.create_task(r.router.drain())
        await r.until(lambda: not r.router.application.is_ready)
        writer.write(whole[-5:])
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in answer
        await drain


async def test_while_load_balancers_notice_connections_are_used_once() -> None:
    async with rig([FakeEngine()], drain_settle_s=60.0) as r, raw(r.router) as (reader, writer):
        drain = asyncio.create_task(r.router.drain())
        await r.until(lambda: not r.router.application.is_ready)
        writer.write(request_bytes())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in answer
        async with raw(r.router) as (late, late_out):
            late_out.write(request_bytes())
            assert (await late.read()).startswith(b"HTTP/1.1 200 "), "new connections are still accepted"
        r.router.hurry.set()
        await drain


async def test_drain_has_an_end() -> None:
    aborted = asyncio.Event()

    async def endless(connection: Connection, _: Received) -> None:
        await connection.gone()
        aborted.set()

    async with (
        rig([FakeEngine(script=endless)], shutdown_timeout_s=0.05) as r,
        raw(r.router) as (reader, writer),
    ):
        writer.write(request_bytes())
        await r.until(lambda: bool(r.engines[0].requests))
        await r.router.drain()
        await r.router.stop()
        assert await reader.read() == b""
        await asyncio.wait_for(aborted.wait(), DEADLINE_S)
        assert r.router.requests.inflight == 0


async def test_a_process_drains_on_sigterm(tmp_path: Path) -> None:
    says = {name: asyncio.Queue[bytes]() for name in ("answer", "stream 1", "stream 2", "stream 3")}

    async def slow(connection: Connection, request: Received) -> None:
        said = says[request.json["messages"][0]["content"]]
        if not request.json["stream"]:
            connection.answer(200, await said.get())
            return
        connection.begin_stream()
        while (data := await said.get()) != DONE:
            connection.chunk(data)
        connection.chunk(DONE)
        connection.end_stream()

    async with FakeEngine(script=slow) as engine:
        path = tmp_path / "fleet.json"
        path.write_bytes(encode_fleet(FleetDocument(services=(service([engine]),))))
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'ulimit -Sn 64 && ulimit -Hn 4096 && exec "$@"', "sh"),
            sys.executable,
            *(
                "-m",
                "argosy_router.main",
                "--fleet-file",
                str(path),
                "--port",
                str(port),
                "--admin-port",
                "0",
            ),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await until(lambda: bool(engine.telemetry))
            clients = {name: await asyncio.open_connection("127.0.0.1", port) for name in says}
            for name, (reader, writer) in clients.items():
                writer.write(request_bytes(content=name, stream=name != "answer"))
                if name != "answer":
                    says[name].put_nowait(event("first"))
                    await reader.readuntil(event("first"))
            await until(lambda: len(engine.requests) == len(says))
            soft, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft == 4096, "a router needs more files than the usual soft limit"
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            async with asyncio.timeout(DEADLINE_S):
                while b"draining 4 requests" not in (line := await process.stderr.readline()):
                    assert line, "ended without draining"
            for name, (reader, writer) in clients.items():
                for number in range(0 if name == "answer" else 50):  # the last one goes on alone
                    says[name].put_nowait(event(f"{number}"))
                    await reader.readuntil(event(f"{number}"))
                last = b'{"late":true}' if name == "answer" else DONE
                says[name].put_nowait(last)
                rest = await reader.read()
                assert rest.endswith(last if name == "answer" else last + b"\r\n0\r\n\r\n"), name
                writer.close()
            log = await process.stderr.read()
            assert await process.wait() == 0
            assert log.count(b"status=200") == log.count(b"replica=r0") == 4
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
