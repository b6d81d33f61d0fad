"""The supervisor's process: lock, control socket, signals.

Owns: answering on the control socket, and the end of the process. Must not know: how the fleet is run.
Invariants: there is one supervisor per state directory; a client that does not read is disconnected and never delays
the fleet; the socket is removed before the process exits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from argosy.local.control_messages import (
    MAX_MESSAGE_BYTES,
    Apply,
    FleetStatus,
    Refused,
    Reply,
    Stop,
    decode_request,
    encode,
)
from argosy.local.settings import DEFAULT_PORT, Settings
from argosy.local.state_dir import StateDir
from argosy.local.supervisor import Supervisor

API_KEY_ENV: Final = "ARGOSY_ROUTER_API_KEY"
"""Environment variable that passes the router's key to the supervisor; a flag would be visible to every user."""

_UNREAD_LIMIT_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


class ControlServer:
    """Answers commands, and sends the fleet's status to watching clients."""

    def __init__(self, state: StateDir, settings: Settings) -> None:
        self._supervisor = Supervisor(state, settings, self._publish)
        self._state = state
        self._stop = asyncio.Event()
        self._grace_s = 0.0
        self._watchers: set[asyncio.StreamWriter] = set()
        self._last: FleetStatus | None = None

    async def run(self, notify: int | None) -> None:
        """Serve until a command or signal stops the fleet. The descriptor `notify` is closed once commands are
        answered."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        listener = self._state.listen()
        listener.setblocking(False)
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_MESSAGE_BYTES)
        if notify is not None:
            os.close(notify)
        try:
            await self._supervisor.run(self._stop, lambda: self._grace_s)
        finally:
            server.close()
            self._state.control_socket.unlink(missing_ok=True)
            self._state.fleet_file.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stops_fleet = False
        try:
            line = await reader.readline()
            try:
                request = decode_request(line)
            except msgspec.DecodeError as error:
                self._send(
                    writer, Refused(message=f"this supervisor does not understand the command: {error}")
                )
                return
            if isinstance(request, Stop):
                self._grace_s = request.grace_s
                self._stop.set()
            elif isinstance(request, Apply):
                if self._stop.is_set():
                    self._send(
                        writer, Refused(message="the fleet is stopping; try again when it has stopped")
                    )
                    return
                stops_fleet = request.stop_on_disconnect
                self._supervisor.apply(request.services)
            self._send(writer, self._supervisor.status())
            self._watchers.add(writer)
            await reader.read()  # until the client disconnects; it sends nothing more
        except (ConnectionError, ValueError):
            pass
        finally:
            self._watchers.discard(writer)
            if stops_fleet:
                self._stop.set()
            writer.close()

    def _publish(self, status: FleetStatus) -> None:
        if status == self._last:
            return
        self._last = status
        for writer in list(self._watchers):
            self._send(writer, status)

    def _send(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        if writer.transport.get_write_buffer_size() > _UNREAD_LIMIT_BYTES:
            self._watchers.discard(writer)
            writer.transport.abort()
        else:
            writer.write(encode(reply))


def serve(state: StateDir, settings: Settings, notify: int | None = None) -> int:
    """Run the supervisor in this process."""
    state.create()
    lock = state.lock()
    if lock is None:
        print(f"another supervisor owns {state.root}; try again", file=sys.stderr)
        return 1
    for old in state.logs.iterdir():
        if not old.name.startswith("supervisor."):
            old.unlink()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(ControlServer(state, settings).run(notify))
    return 0  # the lock is released by the process's end, so that no other supervisor starts before that


def main(argv: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Entry point of `python -m argosy.local.control_server`, which `argosy up` starts."""
    parser = argparse.ArgumentParser(prog="python -m argosy.local.control_server")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--api-keys-file", default="")
    parser.add_argument("--notify-fd", type=int)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = replace(
        settings or Settings(),
        port=options.port,
        api_key=os.environ.pop(API_KEY_ENV, ""),
        api_keys_file=options.api_keys_file,
    )
    return serve(StateDir(options.state_dir), settings, options.notify_fd)


if __name__ == "__main__":
    sys.exit(main())
