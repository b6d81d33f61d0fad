"""Runs servers under test as real processes: starts them, waits until they are ready, and stops them by process id."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LOWEST_PORT = 10_000
"""Of those that tests' servers get; well-known services of a machine listen on lower ones."""


def free_port() -> int:
    """Reserve a TCP port for a server that a test starts, until this process ends.

    It lies below the range from which the kernel takes ports for sockets that name none (Linux only), so that no other
    test's socket gets it before the server binds it, and no other process gets it here: this one keeps the UDP port of
    the same number. Where the kernel takes all of them, it is one of those.

    Raises:
        OSError: every port is taken.
    """
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(LOWEST_PORT, above)
    for wanted in random.SystemRandom().sample(ports, len(ports)) or [0]:
        with (
            socket.socket() as probe,
            socket.socket(type=socket.SOCK_DGRAM) as reservation,
            suppress(OSError),
        ):
            probe.bind(("", wanted))
            port = int(probe.getsockname()[1])
            reservation.bind(("127.0.0.1", port))
            reservation.detach()  # stays bound
            return port
    raise OSError(f"no free port from {LOWEST_PORT} to {above - 1}")


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float = 60.0, *, interval_s: float = 0.02
) -> None:
    """Poll a condition that no event signals; fail with `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out waiting for {what}")
        time.sleep(interval_s)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    found = []
    for child in children(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            found += [child, *descendants(child)]
    return found


def workers(core: int) -> list[int]:
    """Return the pids of an engine core's workers.

    They are found by their command: another child, which is being started, has its parent's for a moment.
    """
    return [pid for pid in children(core) if b"executor.worker_process" in _command(pid)]


def has_grammar_server(core: int) -> bool:
    return any(b"grammar_server" in _command(pid) for pid in children(core))


def _command(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    """Whether a process is running. Zombies count as dead: the process that inherits them will reap them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def held_files(pid: int) -> set[str]:
    """Return the paths of all files that a process maps or holds open and that still have a name (Linux only)."""
    paths = [line.split(maxsplit=5)[5:] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            paths.append([os.readlink(descriptor)])
    return {path for (path,) in filter(None, paths) if path[0] == "/" and not path.endswith(" (deleted)")}


def cpu_share(pids: Sequence[int], seconds: float) -> float:
    """Measure for `seconds` how many cores these processes keep busy together (Linux only)."""
    started, before = time.monotonic(), sum(map(_cpu_seconds, pids))
    time.sleep(seconds)  # idle on purpose: the measurement is of idle processes
    return (sum(map(_cpu_seconds, pids)) - before) / (time.monotonic() - started)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class Server:
    """A running server process."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Signal the process, wait until it ends, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)


def with_descriptors(count: int, command: Sequence[str]) -> list[str]:
    """Wrap a command to run with a soft and hard limit of `count` file descriptors."""
    return ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(count), *command]


@contextmanager
def running(
    arguments: Sequence[str],
    log: Path,
    *,
    port: int,
    ready_path: str = "/ready",
    env: dict[str, str] | None = None,
    descriptors: int | None = None,
    is_ready: Callable[[], bool] | None = None,
) -> Iterator[Server]:
    """Run `python -m ...` with the given arguments until the block ends, after waiting for a 200 from `ready_path`.

    Args:
        is_ready: asked instead, for servers that do not speak HTTP on `port`.
        descriptors: limit on open files (`ulimit -n`).
    """
    command = [sys.executable, "-m", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command if descriptors is None else with_descriptors(descriptors, command),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )
    server = Server(process, port, log)

    def is_up() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"exited with {process.returncode}:\n{log.read_text()[-4000:]}")
        return answers(server.url + ready_path) if is_ready is None else is_ready()

    try:
        # Each look costs the server and this process 2 ms, which the load of a model would have to share.
        wait_until(is_up, f"{arguments} to be ready", 120.0, interval_s=0.1)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
