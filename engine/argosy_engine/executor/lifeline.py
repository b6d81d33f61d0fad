"""Processes that end with the process that started them, however that one ends.

Two ropes, because each has a hole: a pipe from the parent reports its end as end-of-file, but a stopped child
(SIGSTOP) never reads it; PR_SET_PDEATHSIG kills even a stopped child, but follows the *thread* that forked it, so it is
asked for only when that is the parent's main thread.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def parent_argument() -> str:
    """To pass to a child: our pid if the child may tie its life to the calling thread, else 0."""
    return str(os.getpid() if threading.current_thread() is threading.main_thread() else 0)


def die_with_parent(parent: int) -> None:
    """From here on the kernel kills this process when its parent dies; `parent` as made by `parent_argument`."""
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def describe_exit(code: int | None) -> str:
    """`exit code 1`, or `killed by SIGKILL`."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where there is no pidfd."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def wait_readable(fds: list[int], timeout_s: float | None) -> list[int]:
    """The descriptors that have data or ended; none after the timeout."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000)]
