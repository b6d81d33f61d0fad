"""How a client reaches the engine core's process: as the one that starts and ends it, or as one of more API processes.

The ipc sockets are in a private directory, which is deleted as soon as all are connected. From then on a running
engine has no files, so it leaves none behind however it ends.

CoreHandle    starts, connects, watches and ends the process on behalf of its client
AttachedCore  the process as an API process sees it that has not started it
ClientGroup   what the clients of several API processes share, and where each binds its sockets
LoadWatch     when a load counts as stalled
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds
from argosy_engine.distributed.parallel_config import core_name
from argosy_engine.errors import ConfigError, EngineDead, LoadStalled
from argosy_engine.messages import (
    Advanced,
    Attached,
    Failed,
    Handshake,
    HandshakeMessage,
    Hello,
    Loading,
    LoadStep,
    OnLoadStep,
    Ready,
    RequestType,
    ignore_step,
)
from argosy_engine.osproc import (
    SharedCounters,
    describe_exit,
    end_child,
    open_pidfd,
    parent_argument,
    require_free_descriptors,
    wait_readable,
)
from argosy_engine.resolved_config import ResolvedConfig
from argosy_engine.sizing.resources import rank_environment


def _tell_nobody(rank: int, directory: Path) -> None:
    pass


@dataclass(frozen=True)
class ClientGroup:
    """What the clients of several API processes share, as one of these sees it."""

    size: int = 1
    """Number of API processes."""
    index: int = 0
    """This one."""
    counters: SharedCounters | None = None
    """Numbers of requests that the processes tell each other; None if there is only one process. Columns:
    `num_columns`."""
    on_core_started: Callable[[int, Path], None] = _tell_nobody
    """Called in the first process with the rank of a core and the directory for the other clients' sockets, which it
    waits for."""
    on_load_step: OnLoadStep = ignore_step
    """Called in the first process while the cores load."""


ALONE = ClientGroup()
"""The only API process of an engine."""


def num_balancer_columns(data_parallel_size: int) -> int:
    """Return how many columns `RankBalancer` has, which come first."""
    return 2 * data_parallel_size


def num_columns(data_parallel_size: int) -> int:
    """Return how many columns there are: the balancer's, and those of the limits on queues, in total and by rank."""
    return num_balancer_columns(data_parallel_size) + 2 * (1 + data_parallel_size)


def client_addresses(directory: Path, index: int = 0) -> tuple[str, str]:
    """Return the addresses of a client's input and output socket."""
    number = str(index or "")
    return f"ipc://{directory}/input{number}", f"ipc://{directory}/output{number}"


STACKS_S = 0.5
"""Time in which processes that hang write their stacks, before they are ended."""
_SHOWN_PHASE = 64


class LoadWatch:
    """When a load counts as stalled.

    It is watched from outside of the processes that load, because a thread that hangs in a read of a lost volume may
    hold the interpreter's lock, and its process may not even be able to end. The cores of all data-parallel ranks share
    one watch, because they may wait for each other. Invariant: a load that advances is never called stalled, however
    long it takes.

    Args:
        timeout_s: how long a load may be without progress; 0: for ever.
        on_step: told of all progress.
        clock: seconds that never go back.
    """

    def __init__(
        self, timeout_s: float, on_step: OnLoadStep = ignore_step, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._on_step = on_step
        self._clock = clock
        self._advanced_at = clock()
        self._last = LoadStep("start of the process")

    def advanced(self, step: LoadStep) -> None:
        """Note that the load of any core has advanced."""
        self._advanced_at, self._last = self._clock(), step
        self._on_step(step)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the load counts as stalled if it does not advance, at least 0; None: it never does."""
        if not self._timeout_s:
            return None
        return max(self._advanced_at + self._timeout_s - self._clock(), 0.0)

    @property
    def is_stalled(self) -> bool:
        return self.remaining_s == 0.0

    def stalled(self) -> LoadStalled:
        """Return the error to raise once the load is stalled."""
        return LoadStalled(
            f"the load of the model has stalled: no progress for {self._timeout_s:g} s "
            f"({str(self._last)[:_SHOWN_PHASE]}); the stacks of the engine's processes are above. Look at the volume "
            "or device that it waits for; --load-stall-timeout allows more time, or with 0 any"
        )


def dump_stacks(pids: Iterable[int]) -> None:
    """Have engine cores and their workers write their stacks, which takes up to `STACKS_S`."""
    for pid in pids:
        for each in (pid, *_children(pid)):
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGUSR1)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has ended, or the system does not tell
        return []


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
        require_free_descriptors()
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


class AttachedCore:
    """The core's process as an API process sees it that has not started it.

    It has the interface of `CoreHandle` as far as `AsyncMPClient` needs it. Such a client cannot tell why a core has
    ended unless the core says so: that is known to the process that started it, which ends all API processes then.

    Args:
        directory: of the core's sockets; the process that started the core deletes it.
        index: this client's number, from 1.
    """

    last_message_ms = 0
    watch = None
    """The process that started the core watches its load, and ends this one."""

    def __init__(self, directory: Path, index: int) -> None:
        self.directory = directory
        self.input_address, self.output_address = client_addresses(directory, index)
        self.config: ResolvedConfig | None = None
        self.reason = ""
        self.pid = 0
        """0 before the core has said it."""
        self.pidfd: int | None = None
        self._index = index

    def poll(self) -> int | None:
        """Return None while the core lives, else 0: its exit code is not known here."""
        if self.pidfd is not None:
            return 0 if wait_readable([self.pidfd], 0) else None
        if self.pid:
            try:
                os.kill(self.pid, 0)
            except OSError:
                return 0
        return None

    def dead(self, doing: str = "") -> EngineDead:
        return EngineDead(self.reason or f"the engine core (process {self.pid}) ended{doing}")

    def greeting(self, payload: bytes) -> list[bytes] | None:
        """Process the next message of the handshake; return the reply, if any (`CoreHandle.greeting`)."""
        message = msgspec.msgpack.decode(payload, type=HandshakeMessage)
        match message:
            case Hello():
                self.pid = message.pid
                self.pidfd = open_pidfd(message.pid)
                return [RequestType.HANDSHAKE, msgspec.msgpack.encode(Attached(self._index))]
            case Ready():
                self.config = message.config
            case Failed():
                raise ConfigError(message.message) if message.is_config_error else EngineDead(message.message)
            case Loading() | Advanced():
                pass
            case _:
                raise EngineDead(f"the engine core answered with {type(message).__name__}")
        return None

    def end(self) -> None:
        """Forget the core, which goes on."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
