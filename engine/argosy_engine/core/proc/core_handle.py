"""CoreHandle: starts, connects, watches and ends the engine core's process on behalf of its client.

The ipc sockets are in a private directory, which is deleted as soon as all are connected. From then on a running
engine has no files, so it leaves none behind however it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.client_group import client_addresses
from argosy_engine.core.proc.load_watch import LoadWatch
from argosy_engine.distributed.lockstep import LockstepEnds
from argosy_engine.distributed.process_name import core_name
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.messages.core_messages import RequestType
from argosy_engine.messages.handshake import (
    Advanced,
    Failed,
    Handshake,
    HandshakeMessage,
    Hello,
    Loading,
    Ready,
)
from argosy_engine.messages.load_step import LoadStep
from argosy_engine.osproc.child_process import describe_exit, end_child, open_pidfd, parent_argument
from argosy_engine.osproc.file_descriptors import require_free
from argosy_engine.resolved_config import ResolvedConfig
from argosy_engine.sizing.rank_resources import rank_environment

LAST_MESSAGE_MS = 2000
"""How long to wait for the last message of a core that has ended by itself: it is sent, but may not be read yet."""


class CoreHandle:
    """A client's handle of the core's process.

    Args:
        args: arguments of the engine, sent in the handshake (`greeting`).
        rank: data-parallel rank of the core.
        lockstep: of cores that share experts; the process inherits its descriptors.
        num_clients: number of API processes that the core waits for.
        watch: of the loads of several cores; default: one of this core's own.

    Raises (from the constructor):
        ConfigError: this process has too few file descriptors left, there are fewer GPUs than workers, or the
            executor needs the core in this process.
    """

    def __init__(
        self,
        args: EngineArgs,
        rank: int = 0,
        lockstep: LockstepEnds | None = None,
        num_clients: int = 1,
        watch: LoadWatch | None = None,
    ) -> None:
        args.check_core_process()
        require_free()
        self._args = args
        self._rank = rank
        self._lockstep = lockstep
        self.name = core_name(args.parallel_config, rank)
        self._environment = rank_environment(args, rank)
        self._num_clients = num_clients
        self.watch = watch or LoadWatch(args.load_stall_timeout)
        self.directory = Path(tempfile.mkdtemp(prefix="argosy-"))  # mode 0700
        self.input_address, self.output_address = client_addresses(self.directory)
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd: int | None = None
        self.is_connected = False
        """Whether the sockets are connected, so that the core loads the model."""
        self.config: ResolvedConfig | None = None
        """Resolved configuration; set when the core is ready."""
        self.reason = ""
        """Why the core ended, once it has told."""

    def start(self) -> None:
        """Start the process. Both addresses must be bound."""
        safe_path = ["-P"] if sys.flags.safe_path else []
        self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [
                sys.executable,
                *safe_path,
                "-m",
                "argosy_engine.core.proc.core_process",
                self.name,
                str(self.directory),
                parent_argument(),
                str(self._num_clients),
            ],
            stdin=subprocess.PIPE,
            pass_fds=() if self._lockstep is None else self._lockstep.fds,
            env=self._environment,
        )
        self.pidfd = open_pidfd(self._process.pid)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    @property
    def last_message_ms(self) -> int:
        """How long to wait for a message once the process has ended, or is about to (its sockets are closed first): one
        that was killed has sent no reason."""
        code = self.poll()
        return LAST_MESSAGE_MS if code is None or code > 0 else 0

    def dead(self, doing: str = "") -> EngineDead:
        """Return the error to raise when the process has ended, with its own reason if it has told one."""
        return EngineDead(
            self.reason or f"{self.name} (process {self.pid}) ended{doing}: {describe_exit(self.poll())}"
        )

    def greeting(self, payload: bytes) -> list[bytes] | None:
        """Process the next message of the handshake; return the reply, if any. The handshake ends when `config` is set.

        Raises:
            ConfigError: the core rejects its arguments; the message is meant for the person who started it.
            EngineDead: the core could not start.
        """
        message = msgspec.msgpack.decode(payload, type=HandshakeMessage)
        match message:
            case Hello():
                self.watch.advanced(LoadStep("imports"))
                handshake = Handshake(self._args, self._rank, self._lockstep)
                return [RequestType.HANDSHAKE, msgspec.msgpack.encode(handshake)]
            case Loading():
                self.is_connected = True
                self.remove_files()
            case Advanced():
                self.watch.advanced(message.step)
            case Ready():
                self.config = message.config
            case Failed():
                raise ConfigError(message.message) if message.is_config_error else EngineDead(message.message)
            case _:
                raise EngineDead(f"the engine core answered with {type(message).__name__}")
        return None

    def remove_files(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def end(self) -> None:
        """End the core by closing its standard input, or kill it if it hangs. Blocks for ten seconds at most."""
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()  # the core exits on end of file
            end_child(self._process, self.name)
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.remove_files()
