"""Child processes: end with the process that started them, however it ends, and describe how they exited.

Two mechanisms are combined, because each has a gap. A pipe or socket from the parent reports its end as end of file,
but a stopped child (SIGSTOP) never reads it. PR_SET_PDEATHSIG kills even a stopped child, but is tied to the *thread*
that forked it, so it is requested only if that is the parent's main thread or a `SpawnerThread`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger("argosy.core")

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1

EXIT_TIMEOUT_S = 5.0
"""How long a child may take to exit after its pipe or socket is closed, before it is killed."""
KILL_TIMEOUT_S = 5.0
"""How long a killed child may take to end. It may hang in an uninterruptible system call, of a device's driver or of a
network file system, and must not hold up its parent then."""


class SpawnerThread(threading.Thread):
    """Thread that starts children on behalf of threads that may end before them. The kernel kills them when it ends.

    It starts with the first call. Only one thread at a time may use it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def call(self, start: Callable[[], T]) -> T:
        """Run a function in the thread and return its result, or raise its exception.

        Raises:
            RuntimeError: the system has no more threads.
        """
        if not self.is_alive():
            self.start()
        result: Future[T] = Future()

        def answer() -> None:
            try:
                result.set_result(start())
            except BaseException as error:
                result.set_exception(error)

        self._calls.put(answer)
        return result.result()

    def close(self) -> None:
        """End the thread. Its children must have ended; others are killed."""
        self._calls.put(None)

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it refers to the result, which its owner may want to release


def parent_argument() -> str:
    """Return the argument for a child's `die_with_parent`: our pid, or 0 if the calling thread may end before us."""
    thread = threading.current_thread()
    is_permanent = thread is threading.main_thread() or isinstance(thread, SpawnerThread)
    return str(os.getpid() if is_permanent else 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Does nothing if `parent` is 0.

    Args:
        parent: value of `parent_argument` in the parent.
    """
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def end_child(process: subprocess.Popen[bytes], name: str, timeout_s: float = EXIT_TIMEOUT_S) -> bool:
    """Wait for a child that was told to exit, and kill it if it does not. Blocks for a bounded time.

    Args:
        name: what the log calls the child.
        timeout_s: how long it may take to exit.

    Returns whether it has ended. If not, the kernel ends it once its system call returns.
    """
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        logger.warning("%s, process %d, has not exited within %g s: killing it", name, process.pid, timeout_s)
    process.kill()
    try:
        process.wait(KILL_TIMEOUT_S)
        return True
    except subprocess.TimeoutExpired:
        logger.error(
            "%s, process %d, has not ended %g s after SIGKILL: giving it up",
            name,
            process.pid,
            KILL_TIMEOUT_S,
        )
        return False


def describe_exit(code: int | None) -> str:
    """Describe an exit code of `subprocess`: `exit code 1`, or `killed by SIGTERM`."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:  # the system's answer to a lack of memory
        return "killed by SIGKILL, maybe for lack of memory"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor that becomes readable when the process ends; None if the system has no pidfds."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def wait_readable(fds: list[int], timeout_s: float | None) -> list[int]:
    """Wait until some descriptors have data or are closed, and return them; empty after the timeout."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)]
