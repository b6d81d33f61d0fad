"""How commands and the supervisor of a local fleet meet: its state directory, and messages on the control socket.

The directory is `--state-dir`, else `$ARGOSY_STATE_DIR`, else `.argosy` in the current directory. Invariants:
everything in it is readable by its owner only; the process that holds the lock is the only supervisor.

A message is one JSON document per line. Invariant: every reply to a request describes the complete state, so a reader
may skip all but the last.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from argosy.errors import CommandError
from argosy_resource.types import InferenceService

STATE_DIR_ENV: Final = "ARGOSY_STATE_DIR"
_FLEET_KEY_BYTES: Final = 32
_FINGERPRINT_DIGITS: Final = 16


def choose_state_dir(option: str | None) -> StateDir:
    """Find the state directory as described above; it need not exist."""
    return StateDir(Path(option or os.environ.get(STATE_DIR_ENV) or ".argosy").absolute())


class StateDir:
    """Paths of one local fleet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "logs"
        self.fleet_file = root / "fleet.json"
        self.storage = root / "storage"
        """Files, batches and stored responses of clients."""
        self.control_socket = root / "control.sock"
        self._key_file = root / "fleet.key"
        self._lock_file = root / "lock"
        self._change_lock_file = root / "change.lock"

    def create(self) -> None:
        """Create the directory with mode 0700.

        Raises:
            CommandError: it cannot be created, or belongs to another user.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.root.stat().st_uid != os.geteuid():
                raise CommandError(f"{self.root} belongs to another user; choose another with --state-dir")
            self.root.chmod(0o700)
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CommandError(
                f"cannot use {self.root}: {error.strerror}; choose another with --state-dir"
            ) from error

    def fleet_key(self) -> bytes:
        """The key from which every service's internal key is derived; created on first use, with mode 0600."""
        try:
            return self._key_file.read_bytes()
        except FileNotFoundError:
            key = secrets.token_hex(_FLEET_KEY_BYTES).encode()
            self.write(self._key_file, key)
            return key

    def fingerprint(self, secret: str) -> str:
        """A keyed hash, by which the clients' key can be compared without being shown; empty for an empty secret."""
        if not secret:
            return ""
        return hmac.new(self.fleet_key(), secret.encode(), hashlib.sha256).hexdigest()[:_FINGERPRINT_DIGITS]

    def write(self, path: Path, data: bytes) -> None:
        """Replace a file atomically, with mode 0600: a reader sees the old content or the new."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)

    def log_file(self, name: str) -> Path:
        """Path of a process's log. `name` is a replica's name, `router` or `supervisor`."""
        return self.logs / f"{name}.log"

    def lock(self) -> int | None:
        """Take the supervisor's lock, held while the returned descriptor is open; None if another process holds it."""
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    @contextmanager
    def changing(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of commands that start or change the fleet, so that each finds what the one before has left.

        Args:
            on_wait: called before waiting for another command, which holds the lock until its supervisor answers.
        """
        descriptor = os.open(self._change_lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def listen(self) -> socket.socket:
        """Bind the control socket, replacing a dead supervisor's. Call it with the lock held."""
        self.control_socket.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._by_short_path(listener.bind)
        self.control_socket.chmod(0o600)
        listener.listen()
        return listener

    def connect(self) -> socket.socket | None:
        """Connect to the supervisor; None if none is running."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._by_short_path(connection.connect)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        return connection

    def _by_short_path(self, call: object) -> None:
        """Call with a short address of the control socket, through the directory's descriptor, because the address of a
        Unix socket is limited to 108 bytes."""
        assert callable(call)
        directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            call(f"/proc/self/fd/{directory}/{self.control_socket.name}")
        finally:
            os.close(directory)


def tail(path: Path, lines: int) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 400 * lines))
            data = file.read()
    except FileNotFoundError:
        return ""
    return b"\n".join(data.splitlines()[-lines:]).decode(errors="replace")


MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""A thousand services with long pod templates take less."""

Phase = Literal["Pending", "Starting", "Ready", "Routable", "Draining", "Stopping", "BackOff"]
"""`Starting`: the process runs, and the model loads. `Ready`: the engine reports that it is ready. `Routable`: the
router may send it requests. `Draining`: the router sends no new requests, and the running ones finish. `BackOff`: the
process died and waits for its restart."""


class Apply(Struct, frozen=True, kw_only=True, tag=True):
    """Make the fleet equal to `services`. Answered with a `FleetStatus` at once and after every change."""

    services: tuple[InferenceService, ...]
    stop_on_disconnect: bool = False
    """Whether to stop the fleet when this connection closes, for `argosy up` in the foreground."""


class Watch(Struct, frozen=True, kw_only=True, tag=True):
    """Watch the fleet. Answered with a `FleetStatus` at once and after every change."""


class Stop(Struct, frozen=True, kw_only=True, tag=True):
    """Stop the fleet; the connection closes when the supervisor exits."""

    grace_s: float = 10.0
    """How long running requests may take to finish."""


Request = Apply | Watch | Stop


class ReplicaStatus(Struct, frozen=True, kw_only=True, tag=True):
    """One replica's process, as `argosy ps` shows it."""

    name: str
    service: str
    revision: str
    is_current: bool
    """Whether the revision is the desired one."""
    phase: Phase
    reason: str = ""
    """Why it is not routable, or why it last stopped."""
    restarts: int = 0
    pid: int | None = None
    url: str = ""
    gpus: tuple[int, ...] = ()
    inflight: int = 0
    started: float = 0.0
    """Unix time of the process's start."""


class ServiceStatus(Struct, frozen=True, kw_only=True, tag=True):
    """One InferenceService, with its replicas."""

    key: str
    model: str
    desired: int
    revision: str
    replicas: tuple[ReplicaStatus, ...] = ()
    reason: str = ""
    """Why the service is not in its desired state; empty if it is."""

    @property
    def routable(self) -> int:
        return sum(replica.phase == "Routable" for replica in self.replicas)

    @property
    def is_settled(self) -> bool:
        """Whether exactly the desired number of replicas run, all of them routable and of the desired revision."""
        return len(self.replicas) == self.desired and all(
            replica.phase == "Routable" and replica.is_current for replica in self.replicas
        )


class RouterStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The router's process, as `argosy ps` shows it."""

    url: str
    is_ready: bool
    admin_url: str = ""
    """Empty while the process is not running."""
    reason: str = ""
    restarts: int = 0
    pid: int | None = None
    api_key_fingerprint: str | None = None
    """`StateDir.fingerprint` of the key that it requires of clients; empty if it requires none, None if the supervisor
    is of an earlier version, which does not say."""
    api_keys_file: str | None = None
    """Path of the file of client keys; empty if there is none, None if the supervisor is of an earlier version."""


class BatchStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The process of `argosy batch`, as `argosy ps` shows it."""

    url: str
    pid: int | None = None
    restarts: int = 0
    reason: str = ""


class FleetStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The whole fleet."""

    pid: int
    router: RouterStatus
    services: tuple[ServiceStatus, ...] = ()
    batch: BatchStatus | None = None
    """None if the supervisor is of an earlier version."""
    is_stopping: bool = False

    @property
    def is_settled(self) -> bool:
        return self.router.is_ready and all(service.is_settled for service in self.services)


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """The request was refused; nothing was changed."""

    message: str


Reply = FleetStatus | Refused

decode_request: Final = msgspec.json.Decoder(Request).decode
"""Raises msgspec.DecodeError if a line is no request (ValidationError included)."""
_decode_reply: Final = msgspec.json.Decoder(Reply).decode


def encode(message: Request | Reply) -> bytes:
    return msgspec.json.encode(message) + b"\n"


SUPERVISOR = (sys.executable, "-P", "-m", "argosy.local.supervisor")
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
        reply = _decode_reply(line)
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


def status_of(connection: socket.socket | None, timeout_s: float) -> FleetStatus | None:
    """Ask a supervisor for the fleet's state; None without one, or if it does not answer in time."""
    if connection is None:
        return None
    with closing(ControlClient(connection, Watch())) as client, suppress(TimeoutError):
        return client.next_status(timeout_s)
    return None


def current_status(state: StateDir, *, in_cluster: str = "") -> FleetStatus:
    """Ask the running supervisor for the fleet's state as it is now. `in_cluster`: as of `connect`.

    Raises:
        CommandError: none is running, it does not answer, or it is just ending.
    """
    with closing(ControlClient(connect(state, in_cluster=in_cluster), Watch())) as client:
        try:
            status = client.next_status(_ANSWER_S)
        except TimeoutError:
            raise CommandError(
                "the supervisor does not answer; `argosy logs supervisor` may show why"
            ) from None
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


ROUTER_LOG: Final = "router"

BATCH_LOG: Final = "batch"
