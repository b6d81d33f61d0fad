"""PrivateRay: a Ray of an engine's own on this machine, kept by a process, `python -m ... CPUS GPUS`.

It listens on 127.0.0.1 only, on ports that the system chooses, and asks for a random token, because whoever reaches
Ray's ports runs code. The keeper ends when its standard input closes, so also if the engine is killed, and when Ray's
central process or this node's ends. It closes its standard output, kills what Ray has started and removes Ray's
directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.osproc import describe_exit, end_child, open_pidfd, wait_readable
from argosy_protocol.program.process import configure_logging

logger = logging.getLogger("argosy.executor")

LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""What lets Ray take the loopback address for a node's; otherwise it replaces it by one that others can reach."""
OBJECT_STORE_BYTES = 128 << 20
"""In /dev/shm, taken when it is used: by messages above 100 kB. Ray puts what exceeds it into its directory."""
START_ATTEMPTS = 2
START_PATIENCE_S = 90.0
"""For one attempt. By itself Ray gives up a start after 30 s, which a busy machine may need."""
SYSTEM_CONFIG: dict[str, Any] = {
    "memory_monitor_refresh_ms": 0,  # it would kill a worker of a model that fills the memory
    "prestart_worker_first_driver": False,  # they would be idle: a worker's process is its own
    "worker_register_timeout_seconds": 600,  # on a busy machine
    "health_check_failure_threshold": 100,  # likewise; a raylet that ends takes the engine with it
    "task_events_report_interval_ms": 0,  # nobody reads events of tasks, which an engine would wait to send at its end
    "gcs_rpc_server_reconnect_timeout_s": 3600,  # then Ray ends the program of an engine that is not closed yet
}

SHORT_DIRECTORY = "/tmp"  # noqa: S108 (a directory of mode 0700 is made in it)
"""Where Ray's directory is if the path of TMPDIR is too long."""
MAX_DIRECTORY_BYTES = 24
"""Of a path that leaves room for those of Ray's sockets below it, which the system limits to 107 bytes."""

_PR_SET_CHILD_SUBREAPER = 36


class PrivateRay:
    """Starts the keeper, and Ray by it.

    Args:
        num_cpus, num_gpus: what this Ray may give to workers.

    Raises (from the constructor):
        ConfigError: Ray does not start.
    """

    def __init__(self, num_cpus: int, num_gpus: int) -> None:
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """What a process needs to connect."""
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        safe_path = ["-P"] if sys.flags.safe_path else []
        self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [sys.executable, *safe_path, "-m", __name__, str(num_cpus), str(num_gpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, **self.environment, **LOOPBACK_ONLY, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().decode().strip()
        """Host and port to connect to."""
        if not self.address:
            self.stop()
            code = self._process.returncode
            raise ConfigError(
                f"Ray did not start on this machine ({describe_exit(code)}); the lines above say why. Start one by "
                "`ray start --head` and set RAY_ADDRESS, or use --distributed-executor-backend mp"
            )

    def has_ended(self) -> bool:
        """Whether Ray has been stopped, or has ended by itself, or is about to."""
        assert self._process.stdout is not None
        return self._process.stdout.closed or bool(wait_readable([self._process.stdout.fileno()], 0.0))

    def stop(self) -> None:
        """End Ray and remove its files. May be called twice."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        end_child(self._process, "the process that keeps Ray", timeout_s=30.0)
        self._process.stdout.close()


def main() -> None:
    configure_logging("WARNING")
    # Ctrl-C goes to the whole process group, but the core decides when Ray ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The processes that Ray's own have started become children of this one, which can end them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    answers = os.dup(1)
    os.dup2(2, 1)  # for what Ray prints
    num_cpus, num_gpus = (int(argument) for argument in sys.argv[1:])
    directory = _make_directory()
    try:
        node = _start(directory, num_cpus, num_gpus)
        with contextlib.suppress(BrokenPipeError):  # the engine has ended; so does its end of standard input
            os.write(answers, f"{node.gcs_address}\n".encode())
        _await_end(node)
    finally:
        os.close(answers)
        _kill_children()
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # nothing is left to be done by Ray's exit handlers


def _make_directory() -> Path:
    """Make a directory of mode 0700, for Ray's sockets and other files.

    Raises:
        EngineDead: there is no place for it.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_DIRECTORY_BYTES:
        parent = SHORT_DIRECTORY
    try:
        return Path(tempfile.mkdtemp(prefix="argosy-", dir=parent))
    except OSError as error:
        raise EngineDead(
            f"Ray needs a directory whose path is short, for its sockets: {error}; set TMPDIR to one that can be "
            f"written, with a path of at most {MAX_DIRECTORY_BYTES} characters"
        ) from None


def _await_end(node: Any) -> None:
    """Wait until the engine closes standard input, or a process ends without which Ray does nothing."""
    needed = {
        open_pidfd(info.process.pid): (name, info.process)
        for name in ("gcs_server", "raylet")
        for info in node.all_processes[name]
    }
    fds = [fd for fd in needed if fd is not None]
    for fd in wait_readable([sys.stdin.fileno(), *fds], None):
        if fd in needed:
            name, process = needed[fd]
            how = describe_exit(process.poll())
            logger.error("%s (process %d) of the private Ray ended: %s", name, process.pid, how)


def _start(directory: Path, num_cpus: int, num_gpus: int) -> Any:
    """Start Ray and return its `Node`.

    Raises:
        EngineDead: Ray does not start.
    """
    # `ray.init` and `ray start` would start a monitor for autoscaling, and the former connects this process as well.
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    services.get_node = partial(_await_node, services.get_node)
    services.start_api_server = start_no_api_server
    reasons: list[str] = []
    for attempt in range(START_ATTEMPTS):
        params = RayParams(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            node_ip_address=LOOPBACK,
            temp_dir=str(directory / str(attempt)),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            no_monitor=True,
            min_worker_port=0,
            max_worker_port=0,
            _system_config=dict(SYSTEM_CONFIG),
        )
        try:
            return Node(params, head=True, shutdown_at_exit=False, spawn_reaper=True)
        except Exception as error:  # Ray raises plain ones
            reasons.append(f"{type(error).__name__}: {error}")
            _kill_children()
    raise EngineDead("Ray does not start: " + "; ".join(dict.fromkeys(reasons)))


def start_no_api_server(*_: Any, **__: Any) -> tuple[str, None]:
    """Stand in for a process that only reports usage where there is no dashboard, which is switched off."""
    return "", None


def _await_node(get_node: Callable[[str, str], Any], gcs_address: str, node_id: str) -> Any:
    """Wait until Ray's node is known, which it is once its raylet has started.

    Raises:
        RuntimeError: it was not within the time of one attempt.
    """
    deadline = time.monotonic() + START_PATIENCE_S
    while True:
        try:
            return get_node(gcs_address, node_id)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _kill_children() -> None:
    """Kill all descendants: those that lose their parent become children of this process. Returns when they ended."""
    while True:
        for tasks in Path("/proc/self/task").iterdir():
            for child in (tasks / "children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
