"""Start, configuration, drain and stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from argosy_protocol.fleet import FleetDocument, encode_fleet
from argosy_router.auth.key_file import ApiKeys
from argosy_router.config import ConfigError
from argosy_router.main import EXIT_ADDRESS, EXIT_USAGE, build_parser, config_of, main

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import chat, raw, rig, service, until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


def request_bytes(**fields: object) -> bytes:
    body = json.dumps(chat(**fields)).encode()  # type: ignore[arg-type]
    return HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)


# configuration


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ([], {}, "exactly one of"),
        (["--replica", "http://a:1", "--kubernetes"], {}, "exactly one of"),
        (["--replica", "http://a:1", "--replica-dns", "http://a:1"], {}, "exactly one of"),
        (["--replica", "http://a:1", "--host", "0.0.0.0"], {}, "without API keys"),
        (["--kubernetes"], {}, "ARGOSY_FLEET_KEY"),
        (["--replica", "http://a:1", "--max-inflight-bytes", "1000"], {}, "--max-inflight-bytes"),
        (["--fleet-file", "f"], {"ARGOSY_FLEET_KEY": "short"}, "16 bytes"),
    ],
)
def test_unsafe_or_contradictory_configuration_is_refused(
    flags: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(build_parser().parse_args(flags), environment)


def test_flags_win_over_the_environment() -> None:
    environment = {"ARGOSY_ROUTER_API_KEY": "env", "ARGOSY_REPLICA_KEY": "env"}
    replica = ["--replica", "http://a:1", "--host", "0.0.0.0"]
    assert config_of(build_parser().parse_args(replica), environment).api_keys == ("env",)
    flags = [*replica, "--api-key", "a", "--api-key", "b", "--replica-key", "c"]
    config = config_of(build_parser().parse_args(flags), environment)
    assert (config.api_keys, config.replica_key) == (("a", "b"), "c")


def test_a_file_gives_flags_below_the_environment_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(
        "replica: [http://a:1, http://b:1]\nqueue-timeout: 5\napi-key: [file]\nmax_inflight_bytes: 64M\n"
        "access-log: false\nidle-timeout: 7\n"
    )
    flags = ["--config", str(path), "--idle-timeout", "8"]
    config = config_of(build_parser().parse_args(flags), {"ARGOSY_ROUTER_API_KEY": "env"})
    assert (config.replicas, config.access_log) == (("http://a:1", "http://b:1"), False)
    assert (config.flow_control.queue_timeout_s, config.server.max_inflight_bytes) == (5.0, 64 << 20)
    assert (config.api_keys, config.client.idle_timeout_s) == (("env",), 8.0)


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "0.0.0.0", "--replica", "http://a:1"]) == EXIT_USAGE
    assert "--api-key" in capsys.readouterr().err
    assert main(["--replica", "ftp://a:1"]) == EXIT_USAGE
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--replica", "http://127.0.0.1:1", "--port", port, "--admin-port", "-1"]) == EXIT_ADDRESS


@pytest.mark.parametrize(
    ("flag", "others"),
    [("--port", ("--admin-port", "-1")), ("--admin-port", ("--port", "0"))],
)
def test_a_taken_port_ends_the_router_with_the_port_and_the_remedy(
    flag: str, others: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--replica", "http://127.0.0.1:1", flag, port, *others]) == EXIT_ADDRESS
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"argosy router: cannot listen on 127.0.0.1:{port}: the port is taken; ")
    assert line.endswith(f"choose another port with {flag}")


async def test_key_files_are_reread_and_never_open_the_router(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# clients\nfirst\n\n")
    keys = ApiKeys((), path, poll_s=0.005)
    watch = asyncio.create_task(keys.watch())
    assert keys.table.account_of(b"Bearer first")
    path.write_text("second\n")
    await until(lambda: keys.table.account_of(b"Bearer second") is not None)
    assert not keys.table.account_of(b"Bearer first")
    path.unlink()
    await until(lambda: keys.table.account_of(b"Bearer second") is None)
    assert not keys.table.is_open, "no keys must not mean that no key is needed"
    assert keys.table.account_of(b"Bearer ") is None
    watch.cancel()


async def test_a_key_file_without_keys_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0
    real_open = Path.open

    def counted(path: Path, *arguments: Any, **named: Any) -> Any:
        nonlocal opened
        opened += 1
        return real_open(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", counted)
    path = tmp_path / "keys"
    keys = ApiKeys((), path, poll_s=0.001)
    watch = asyncio.create_task(keys.watch())
    await until(lambda: opened > 3)
    assert ["No such file" in message for message in caplog.messages] == [True]
    os.close(os.open(path, os.O_CREAT))
    seen = opened
    await until(lambda: opened > seen + 3)
    assert ["is empty" in message for message in caplog.messages] == [False, True]
    watch.cancel()


def test_every_flag_has_a_help_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = build_parser().format_help().partition("options:")[2]
    bare = re.compile(r"^  (--\S+(?: [A-Z]+)?)\n(?!   )", re.MULTILINE)
    assert bare.findall(listed) == []


# draining


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
        await asyncio.wait_for(aborted.wait(), 5)
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
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
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
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await until(lambda: bool(engine.telemetry), 60.0)
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
            async with asyncio.timeout(20):
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
