"""Client side of the control socket, and start of a supervisor.

Owns: the connection. Must not know: how a status is shown.
Invariant: a supervisor that was started here outlives the command, unless the command's request says otherwise.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from argosy.errors import CommandError
from argosy.local.child_process import tail
from argosy.local.control_messages import FleetStatus, Refused, Request, Watch, decode_reply, encode
from argosy.local.state_dir import StateDir

SUPERVISOR = (sys.executable, "-P", "-m", "argosy.local.control_server")
"""Command of a supervisor; tests replace it by one with other engines."""
SUPERVISOR_LOG: Final = "supervisor"
_ANSWER_S: Final = 10.0


class ControlClient:
    """One request to the supervisor, and its replies."""

    def __init__(self, connection: socket.socket, request: Request) -> None:
        self._connection = connection
        self._buffer = b""
        connection.sendall(encode(request))

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def next_status(self, timeout_s: float | None = None) -> FleetStatus | None:
        """Wait for the next reply; None once the supervisor has closed the connection, as it does when it exits.

        Raises:
            TimeoutError: no reply arrived in time.
            CommandError: the supervisor refused the request.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._connection.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            try:
                data = self._connection.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = decode_reply(line)
        if isinstance(reply, Refused):
            raise CommandError(reply.message)
        return reply


def connect(state: StateDir, *, in_cluster: str = "") -> socket.socket:
    """Connect to the running supervisor. `in_cluster`: how a cluster is asked the same.

    Raises:
        CommandError: none is running.
    """
    connection = state.connect()
    if connection is None:
        raise CommandError(
            f"no fleet is running in {state.root}; start one with `argosy up -f FILE`, or name its --state-dir"
            + (f". {in_cluster}" if in_cluster else "")
        )
    return connection


def current_status(state: StateDir, *, in_cluster: str = "") -> FleetStatus:
    """Ask the running supervisor for the fleet's state as it is now. `in_cluster`: as of `connect`.

    Raises:
        CommandError: none is running, it does not answer, or it is just ending.
    """
    client = ControlClient(connect(state, in_cluster=in_cluster), Watch())
    try:
        status = client.next_status(_ANSWER_S)
    except TimeoutError:
        raise CommandError("the supervisor does not answer; `argosy logs supervisor` may show why") from None
    finally:
        client.close()
    if status is None:
        raise CommandError("the fleet is just ending; try again")
    return status


def start_supervisor(state: StateDir, arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Start a supervisor in a session of its own, and wait until it answers commands.

    Raises:
        CommandError: it did not start; the details are the tail of its log.
    """
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    log_path = state.log_file(SUPERVISOR_LOG)
    to_log = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    command = (*SUPERVISOR, "--state-dir", str(state.root), "--notify-fd", str(write_end), *arguments)
    with open(read_end, "rb") as notified:
        pid = os.posix_spawn(  # not subprocess, which expects every child to be waited for
            command[0],
            command,
            {**os.environ, **env},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log_path), to_log, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        os.close(write_end)
        notified.read()  # ends when the supervisor listens or has exited
    connection = state.connect()
    if connection is None:
        os.waitpid(pid, 0)
        raise CommandError("the supervisor did not start", details=tail(log_path, 20))
    connection.close()
