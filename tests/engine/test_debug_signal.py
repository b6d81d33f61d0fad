"""SIGUSR1 makes a server describe its state without disturbing it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from argosy_engine import EngineArgs
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.executor.multiproc_executor import MultiprocExecutor
from argosy_engine.structured.compile_queue import BackendUnavailable
from argosy_engine.structured.grammar_server import GrammarClient, GrammarServerArgs
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from processes import Server, children, wait_until
from served_engine import AUTHORIZED, KEY

ENDLESS = GrammarSpec("regex", "(a|aa|aaa)*" * 2000)
"""Takes minutes to compile."""


def begin_stream(server: Server) -> socket.socket:
    """A client that has read the beginning of a long stream."""
    body = json.dumps(
        {"model": "tiny", "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    ).encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )
    assert client.recv(1024).startswith(b"HTTP/1.1 200")
    return client


def test_a_server_tells_stacks_and_ages_of_both_processes(tiny_server: Server) -> None:
    before = len(tiny_server.log.read_text())

    def log() -> str:
        return tiny_server.log.read_text()[before:]

    def is_idle() -> bool:
        url = f"{tiny_server.url}/load"
        return bool(httpx.get(url, headers=AUTHORIZED, timeout=60).json() == {"server_load": 0})

    wait_until(is_idle, "the end of earlier requests")
    (core,) = children(tiny_server.process.pid)
    with begin_stream(tiny_server):
        tiny_server.process.send_signal(signal.SIGUSR1)
        for about in (
            f"argosy engine API, process {tiny_server.process.pid}: state of the API: live=1",
            "silent=", "last took",
            "engine outputs:",  # its tasks
            f"argosy engine EngineCore, process {core}: state of the engine core\n",
            "loop: turned", "reader: unread=", "writer: unsent=", "step: began", "still=",
        ):  # fmt: skip
            wait_until(lambda about=about: about in log(), about)  # type: ignore[misc]
    assert log().count("most recent call first") >= 2, "stacks of both processes"
    os.kill(core, signal.SIGUSR1)
    wait_until(lambda: log().count("state of the engine core") == 2, "another description")
    begin_stream(tiny_server).close()


HANGS = """
import sys, time
from argosy_engine.osproc import describe_on_signal, dump_stacks_on_signal
dump_stacks_on_signal()
if sys.argv[1] == "describing":
    describe_on_signal("argosy test", lambda: "described")
import _thread
lock = _thread.allocate_lock()
lock.acquire()
def hangs_here():
    print("up", flush=True)
    lock.acquire()  # not even a signal's handler runs here, in Python
hangs_here()
"""


@contextlib.contextmanager
def signal_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("inherited", [contextlib.nullcontext, signal_blocked])
@pytest.mark.parametrize("state", ["starting", "describing"])
def test_a_hanging_main_thread_is_reported(
    state: str, inherited: Callable[[], contextlib.AbstractContextManager[None]], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with (
        inherited(),
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-P", "-c", HANGS, state], stdout=subprocess.PIPE, stderr=output
        ) as process,
    ):
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda: "hangs_here" in log.read_text(), "the stack")
            if state == "describing":
                named = f"argosy test, process {process.pid}: described"
                wait_until(lambda: named in log.read_text(), "the description")
            assert process.poll() is None
        finally:
            process.kill()


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@contextlib.contextmanager
def standard_error_in(log: Path) -> Iterator[None]:
    """Send standard error to a file to which several processes append: capfd's loses what they write as it is read."""
    before = os.dup(2)
    try:
        with log.open("ab") as output:
            os.dup2(output.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_workers_and_the_grammar_process_name_themselves(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def stacks_of(name: str, pid: int) -> None:
        polls = itertools.count()

        def has_told() -> bool:
            if next(polls) % 100 == 0:  # again every few seconds: a busy process may merge two signals
                os.kill(pid, signal.SIGUSR1)
            return f"{name}, process {pid}: " in log.read_text()

        try:
            wait_until(has_told, name)
        except AssertionError as error:
            status = Path(f"/proc/{pid}/status").read_text()
            raise AssertionError(f"{error}\n{status}\n{log.read_text()}") from error
        before, _, after = log.read_text().partition(f"{name}, process {pid}: ")
        assert "most recent call first" in before
        assert "its stacks are above" in after

    args = EngineArgs.of(model="builtin://tiny", device="cpu", dtype="float32", threads=1)
    executor = MultiprocExecutor(args, world_size=1)
    client = GrammarClient(GrammarServerArgs(str(resolve_model("builtin://tiny")), 1024, [2], 1))
    with standard_error_in(log), contextlib.ExitStack() as ends:
        ends.callback(executor.shutdown)
        ends.callback(client.close)
        before = {*children(os.getpid())}  # other tests' processes may not have ended yet
        executor.start()
        (worker,) = {*children(os.getpid())} - before
        stacks_of("argosy engine Worker", worker)
        client.warm_up()
        server = client.pid
        assert server is not None
        stacks_of("argosy engine grammar server", server)
        compilation = client.new_compilation()

        def compile_endlessly() -> None:
            with contextlib.suppress(BackendUnavailable):
                compilation.run(ENDLESS)

        thread = threading.Thread(target=compile_endlessly)
        thread.start()
        wait_until(lambda: any(num_threads(pid) > 1 for pid in children(server)), "a compilation")
        # Its native code has no time for Python, so its stack names it.
        os.kill(children(server)[0], signal.SIGUSR1)
        wait_until(
            lambda: "grammar_server.py" in (seen := log.read_text()) and " in _work" in seen, "its stack"
        )
        compilation.kill()
        thread.join()
        assert client.new_compilation().run(GrammarSpec("regex", "a")) is not None
    assert "rank 0 of 1" in log.read_text()
