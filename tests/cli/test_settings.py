"""Back-off and reserved ports."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import sys
from pathlib import Path

from argosy.local.child_process import HOST, Settings, backoff_s, is_port_free, reserved_port
from argosy.local.control import StateDir
from argosy.local.processes import Replica, RouterProcess
from argosy_resource.validation import load_manifests

MANIFEST = """
apiVersion: inference.argosy.dev/v1alpha1
kind: InferenceService
metadata: {name: tiny}
spec: {model: {source: "builtin://tiny"}}
"""


def test_back_off_doubles_up_to_its_cap() -> None:
    settings = Settings(first_backoff_s=0.5, most_backoff_s=30.0)
    delays = [backoff_s(settings, failures) for failures in (1, 2, 3, 7, 8, 10_000)]
    assert delays == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0]


def test_a_replica_that_was_never_ready_is_started_ever_more_rarely() -> None:
    settings = Settings(first_backoff_s=0.5, most_backoff_s=30.0, most_backoff_unready_s=300.0)
    delays = [backoff_s(settings, failures, has_served=False) for failures in (1, 2, 7, 8, 10, 11, 10_000)]
    assert delays == [0.5, 1.0, 32.0, 64.0, 256.0, 300.0, 300.0]


IP_LOCAL_PORT_RANGE = 51
"""Linux's option (6.3 and later) for the ports that a socket gets that asks for any; Python names it since 3.14."""


def test_a_reserved_port_is_given_to_no_socket_but_to_a_server_that_asks_for_it() -> None:
    with reserved_port() as port, reserved_port() as other:
        assert port != other
        assert not is_given(port), "in the whole range, or in one of this port alone"
        for _ in range(2):  # a server that is started again has connections in TIME_WAIT
            with (
                socket.create_server((HOST, port)) as server,  # with SO_REUSEADDR
                socket.create_connection((HOST, port)) as client,
            ):
                accepted, _ = server.accept()
                accepted.close()
                assert client.recv(1) == b""
        assert is_port_free(port)
        assert not is_given(port)
    with socket.socket() as plain:
        plain.bind((HOST, other))  # its reservation has ended


def is_given(port: int) -> bool:
    """Whether the kernel gives a port to a socket that asks for any port, whatever its options."""
    given = []
    for options in ((), ((socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),)):
        with socket.socket() as asking:
            with contextlib.suppress(OSError):
                asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
            for option in options:
                asking.setsockopt(*option)
            try:
                asking.bind((HOST, 0))
            except OSError as error:
                assert error.errno == errno.EADDRINUSE  # noqa: PT017
            else:
                given.append(asking.getsockname()[1])
    return port in given


PLAIN_BIND = """
import socket, sys
flag = "--admin-port" if "--admin-port" in sys.argv else "--port"
try:
    socket.socket().bind(("127.0.0.1", int(sys.argv[sys.argv.index(flag) + 1])))
except OSError:
    sys.exit(2)
"""
"""A program that exits with 2 if the port that it is given is reserved."""


async def test_the_ports_of_engines_and_router_are_reserved_before_they_listen(tmp_path: Path) -> None:
    command = sys.executable, "-c", PLAIN_BIND
    settings = Settings(engine=command, router=command)
    state = StateDir(tmp_path / "state")
    state.create()
    changed = asyncio.Event()
    (service,) = load_manifests(MANIFEST)
    replica = Replica(
        "tiny-0", service, "1", settings=settings, state=state,
        internal_key="", threads=1, gpus=(), changed=changed.set,
    )  # fmt: skip
    router = RouterProcess(settings, state, "http://127.0.0.1:1", changed.set)
    running = [asyncio.create_task(each.run()) for each in (replica, router)]
    async with asyncio.timeout(60.0):
        while replica.phase != "BackOff" or router.reason == "starting":
            await changed.wait()
            changed.clear()
        ends = replica.last_exit, router.reason
        replica.retire()
        router.stop(0.0)
        await asyncio.gather(*running)
    assert ends == ("exited with code 2 while starting", "exited with code 2")
