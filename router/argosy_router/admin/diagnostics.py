"""SIGUSR1: what the router is doing, on standard error; nothing is interrupted.

Owns: the signal, and the thread that waits for it. Must not know: requests (it is given a description).
First come the stacks of all threads, from a thread of its own, so that an event loop that hangs is told, too. Then
follow, once the loop turns, its tasks and the requests under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

MAX_TASKS = 64
"""Tasks listed; the rest is counted."""


@contextlib.contextmanager
def signal_held() -> Iterator[None]:
    """Inside the block SIGUSR1 waits for `describe_on_signal`, where it would kill. Threads that are started inside
    never get it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_on_signal(loop: asyncio.AbstractEventLoop, describe: Callable[[], str]) -> None:
    """From here on, inside `signal_held`, the signal is answered.

    Args:
        describe: the state of the router; called in the loop, and what it raises is logged.
    """

    def tell() -> None:
        try:
            log.warning("%s\n%s", describe(), describe_tasks(loop))
        except Exception:
            log.exception("the state could not be described")

    threading.Thread(target=_wait, args=(loop, tell), daemon=True, name="diagnostics").start()


def _wait(loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
    while not loop.is_closed():
        signal.sigwait({signal.SIGUSR1})
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(2, b"argosy router, process %d: stacks of all threads\n" % os.getpid())
            faulthandler.dump_traceback(2, all_threads=True)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell)


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Where each task of the loop waits: name and innermost frame."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = [f"  tasks: {len(tasks)}"]
    for task in tasks[:MAX_TASKS]:
        frames = task.get_stack(limit=1)
        where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "?"
        lines.append(f"    {task.get_name()}: {where}")
    if len(tasks) > MAX_TASKS:
        lines.append(f"    and {len(tasks) - MAX_TASKS} more")
    return "\n".join(lines)
