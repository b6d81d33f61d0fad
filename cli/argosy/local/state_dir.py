"""The state directory of a local fleet.

Owns: the paths inside it, its permissions, the fleet key, the locks that exclude a second supervisor and a second
change at once, and the control socket's address. Must not know: the messages on the socket.
Invariants: everything in the directory is readable by its owner only; the process that holds the lock is the only
supervisor.

The directory is `--state-dir`, else `$ARGOSY_STATE_DIR`, else `.argosy` in the current directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from argosy.errors import CommandError

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
