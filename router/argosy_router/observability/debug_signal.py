"""Diagnostics on SIGUSR1: write what the router is doing to standard error, without interrupting anything.

Owns: the signal, and the thread that waits for it. Must not know: requests (a callback describes them).
A separate thread first writes the stacks of all threads, so that they appear even if the event loop hangs. Once the
loop turns, its tasks and the current requests follow.
"""

# Not compiled: runs on a signal.

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

from argosy_protocol.program.task_list import describe_tasks

log = logging.getLogger(__name__)


@contextlib.contextmanager
def signal_held() -> Iterator[None]:
    """Block SIGUSR1, whose default action would kill the process, until `describe_on_signal` waits for it. Threads
    that are started inside the block inherit the mask and never receive it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_on_signal(loop: asyncio.AbstractEventLoop, describe: Callable[[], str]) -> None:
    """Start answering the signal. Call it inside `signal_held`.

    Args:
        describe: returns the state of the router; called in the event loop, its exceptions are logged.
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
        with contextlib.suppress(OSError):  # the reader is gone
            os.write(2, b"argosy router, process %d: stacks of all threads\n" % os.getpid())
            faulthandler.dump_traceback(2, all_threads=True)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(tell)
