"""CoreHandle: the engine core's process as its client sees it: started, connected, watched, ended.

The two ipc sockets live in a private directory only until both ends are connected; from then on nothing of a running
engine is in the file system, so no way of dying can leave anything there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from argosy_engine.config import EngineArgs, ResolvedConfig
from argosy_engine.core.descriptors import require_free
from argosy_engine.core.messages import (
    Failed,
    Handshake,
    HandshakeMessage,
    Hello,
    Loading,
    Ready,
    RequestType,
)
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.executor.lifeline import describe_exit, open_pidfd, parent_argument

START_TIMEOUT_S = 1800.0
"""Loading a large model from a slow disk takes its time; a core that dies is noticed at once, not by this."""

_EXIT_TIMEOUT_S = 5.0
"""From the end of its standard input to the end of the core."""


class CoreHandle:
    """
    Args:
        args: what the core runs; sent by `greeting`, once it says hello.

    Raises (from the constructor):
        ConfigError: this process has too few file descriptors left.
    """

    def __init__(self, args: EngineArgs) -> None:
        require_free()
        self._args = args
        self._directory = Path(tempfile.mkdtemp(prefix="argosy-"))  # mode 0700
        self.input_address = f"ipc://{self._directory}/input"
        self.output_address = f"ipc://{self._directory}/output"
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd: int | None = None
        self.config: ResolvedConfig | None = None
        """Set when the core is ready."""

    def start(self) -> None:
        """Starts the process; both addresses must be bound."""
        safe_path = ["-P"] if sys.flags.safe_path else []
        self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [
                sys.executable,
                *safe_path,
                "-m",
                "argosy_engine.core.process",
                str(self._directory),
                parent_argument(),
            ],
            stdin=subprocess.PIPE,
        )
        self.pidfd = open_pidfd(self._process.pid)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def dead(self, doing: str = "") -> EngineDead:
        """The error to raise once the process has ended."""
        return EngineDead(f"the engine core process ended{doing} ({describe_exit(self.poll())})")

    def greeting(self, payload: bytes) -> list[bytes] | None:
        """Takes the next message of the handshake; what to send back, if anything. Done when `config` is set.

        Raises:
            ConfigError: the core refuses its arguments; the message is for the person who started it.
            EngineDead: the core could not start.
        """
        message = msgspec.msgpack.decode(payload, type=HandshakeMessage)
        match message:
            case Hello():
                return [RequestType.HANDSHAKE, msgspec.msgpack.encode(Handshake(self._args))]
            case Loading():
                self.remove_files()
            case Ready():
                self.config = message.config
            case Failed():
                raise ConfigError(message.message) if message.is_config_error else EngineDead(message.message)
            case _:
                raise EngineDead(f"the engine core answered with {type(message).__name__}")
        return None

    def remove_files(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def end(self) -> None:
        """Ends the core: at once if it is idle or working, by force if it hangs. Blocks for seconds at most."""
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()  # the core exits on end of file
            try:
                self._process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.remove_files()
