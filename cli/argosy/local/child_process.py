"""A child process of the local fleet: its settings, its port and GPUs, its log, and asking it for its state.

Must not know whether the child is an engine or a router. Invariants: a log takes at most twice `LOG_LIMIT_BYTES`; when
`ended` is set, no process of the child's group is left; no GPU belongs to two replicas, and a replica sees only as many
as `spec.resources.gpu` requests, as in a cluster; a request to a child ends by its deadline, and never raises because
of the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import urlsplit

from argosy.local import end_with_parent

LOG_LIMIT_BYTES: Final = 10 * 1024 * 1024
"""Size at which a log is renamed to `NAME.log.1`, replacing the previous one."""
NOTE_PREFIX: Final = "-- "
"""Begins lines of a log that are ours, not the child's."""
_READ_BYTES: Final = 1 << 16


class LogFile:
    """An append-only file that is rotated once it is full."""

    def __init__(self, path: Path, limit: int = LOG_LIMIT_BYTES) -> None:
        self.path = path
        self._limit = limit
        self._file = _append_to(path)

    def write(self, data: bytes) -> None:
        if self._file.tell() + len(data) > self._limit and self._file.tell():
            self._file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = _append_to(self.path)
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _append_to(path: Path) -> BinaryIO:
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


class Process:
    """A running child."""

    def __init__(self, process: asyncio.subprocess.Process, log: LogFile) -> None:
        self._process = process
        self._log = log
        self.ended = asyncio.Event()
        self._reaper = asyncio.create_task(self._reap(), name=f"reap {process.pid}")

    @classmethod
    async def start(
        cls, command: Sequence[str], env: Mapping[str, str], log_path: Path, *, more_oom_score_adj: int = 0
    ) -> Process:
        """Start `command` in a process group of its own; its output is appended to `log_path`.

        Args:
            more_oom_score_adj: how far above this process's `oom_score_adj` that of the child begins.

        Raises:
            OSError: the system cannot start a process or open the log.
        """
        log = LogFile(log_path)
        wrapper = (sys.executable, "-I", "-S", end_with_parent.__file__)
        try:
            process = await asyncio.create_subprocess_exec(
                *(*wrapper, str(os.getpid()), str(more_oom_score_adj), *command),
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                # Not a session of its own: Linux gives each session (autogroup) an equal share of the CPUs, and with
                # many of them a router may wait for seconds beside engines that compute.
                process_group=0,
            )
        except BaseException:
            log.close()
            raise
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The process's exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.returncode

    @property
    def outcome(self) -> str:
        """Describe how the process ended, for messages."""
        code = self._process.returncode
        if code is None:
            return "running"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def note(self, text: str) -> None:
        """Add a line of the supervisor's to the log."""
        self._log.write(f"{NOTE_PREFIX}{text}\n".encode())

    def reset_oom_score_adj(self) -> None:
        """Give all processes of the child's group the `oom_score_adj` of this process."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                *_, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid:
                    own = Path("/proc/self/oom_score_adj").read_text()
                    (stat.parent / "oom_score_adj").write_text(own)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the child, which stops its own children in order, and SIGKILL to the whole group if the child
        has not ended after `grace_s`."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.ended.wait()
        except TimeoutError:
            self.kill()
            await self.ended.wait()

    async def end(self) -> None:
        """Send SIGKILL unless the child has ended, and wait until it has, even if the caller is cancelled."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(self.stop(0.0))

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _reap(self) -> None:
        output = self._process.stdout
        assert output is not None
        copying = asyncio.create_task(self._copy(output), name=f"log {self.pid}")
        try:
            await self._process.wait()
            self.kill()  # processes that the child left behind may keep its output open
            await copying
            self.note(self.outcome)
        finally:
            copying.cancel()
            self._log.close()
            self.ended.set()

    async def _copy(self, output: asyncio.StreamReader) -> None:
        while data := await output.read(_READ_BYTES):
            self._log.write(data)


def began_after(outcome: str) -> str:
    """Say why there is another process than the first one; empty if there was none before it (no outcome)."""
    return f"started again after this end: {outcome}" if outcome else ""


HOST: Final = "127.0.0.1"
"""Engines and router listen on loopback only, as the local fleet serves this machine."""
DEFAULT_PORT: Final = 8080

_ARGOSY: Final = (
    sys.executable,
    "-P",
    "-m",
    "argosy",
)  # -P: never import from the directory we happen to be in


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings with which `argosy up` starts a supervisor."""

    port: int = DEFAULT_PORT
    """The router's port."""
    api_key: str = ""
    """Key that the router requires of clients; none by default, as it listens on loopback."""
    api_keys_file: str = ""
    """Absolute path of a file of client keys with their terms, which the router reads again when it changes."""
    engine: tuple[str, ...] = _ARGOSY
    """Command of an engine, to which `serve MODEL ...` is appended."""
    router: tuple[str, ...] = (*_ARGOSY, "router")
    """Command of the router, to which flags are appended."""
    batch: tuple[str, ...] = (*_ARGOSY, "batch")
    """Command of what keeps files, batches and responses, to which flags are appended."""
    first_backoff_s: float = 0.5
    """Delay before the first restart; it doubles with each further one. Short, as most crashes happen once."""
    most_backoff_s: float = 30.0
    """Cap of the delay: a crash loop costs little, and a removed cause is noticed soon."""
    most_backoff_unready_s: float = 300.0
    """The same for a replica that has never been ready, as in Kubernetes: each attempt loads a model, beside replicas
    that work and need the memory, and an edit of its manifest does not wait for the next one."""
    steady_s: float = 60.0
    """A replica that was ready for this long starts again with the first delay."""
    min_ready_s: float = 10.0
    """How long a new replica must have been ready before a rolling update counts it as available, like the pods'
    minReadySeconds: a replica that crashes on its first requests must not replace one that works."""
    health_period_s: float = 5.0
    health_failures: int = 6
    """Failed checks of /health in a row, half a minute's worth, after which a process is restarted because it hangs.
    Fewer would restart one that merely shares its cores with a build."""


def backoff_s(settings: Settings, failures: int, *, has_served: bool = True) -> float:
    """Delay before the next start, after this number of failures in a row (at least 1)."""
    most_s = settings.most_backoff_s if has_served else settings.most_backoff_unready_s
    return min(most_s, settings.first_backoff_s * 2.0 ** min(failures - 1, 32))


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for a child that lives within the block.

    A socket is bound to it that does not listen. Linux gives such a port to no socket that asks for any port, but lets
    a server listen there that asks for this one with SO_REUSEADDR, as engines and the router do.
    """
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((HOST, 0))
        port: int = reservation.getsockname()[1]
        yield port


def is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def local_gpus(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Indices of the GPUs; those listed in `CUDA_VISIBLE_DEVICES` if that is set."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(int(part) for part in visible.split(",") if part.strip().isdigit())
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted(int(name[1]) for name in names if name))


def choose_gpus(gpus: Collection[int], taken: Collection[int], count: int) -> tuple[int, ...] | None:
    """Choose `count` free GPUs; None if there are too few."""
    free = sorted(set(gpus) - set(taken))
    return tuple(free[:count]) if len(free) >= count else None


def gpu_env(gpus: Collection[int]) -> dict[str, str]:
    """Environment variables that make exactly these GPUs visible to a process."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until one of the events is set (True) or the timeout has passed (False)."""
    if any(event.is_set() for event in events):
        return True
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for waiter in waiters:
            waiter.cancel()


_LIMIT_BYTES: Final = 8 * 1024 * 1024


class Answer(NamedTuple):
    status: int
    body: bytes


NO_ANSWER: Final = Answer(0, b"")
"""Refused, reset, timed out, or not HTTP."""


async def get(url: str, *, timeout_s: float, bearer: str = "") -> Answer:
    """GET `http://HOST:PORT/PATH`."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    authorization = f"Authorization: Bearer {bearer}\r\n" if bearer else ""
    request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}Connection: close\r\n\r\n"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=_LIMIT_BYTES)
            try:
                writer.write(request.encode())
                head = await reader.readuntil(b"\r\n\r\n")
                return Answer(int(head.split(b" ", 2)[1]), await _body(reader, head))
            finally:
                writer.close()
    except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError, ValueError, IndexError):
        return NO_ANSWER


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    headers = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n")[1:])
    if b"chunked" in headers.get(b"transfer-encoding", b""):
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        return body
    if b"content-length" in headers:
        return await reader.readexactly(int(headers[b"content-length"]))
    return await reader.read(_LIMIT_BYTES)


ROUTER_API_KEY_ENV: Final = "ARGOSY_ROUTER_API_KEY"
"""Environment variable that passes the router's key to the supervisor; a flag would be visible to every user."""
