"""SIGUSR1: the stacks of all threads and the ages of what they work on, on standard error.

The stacks come from the signal handler itself, in C, so they come from a process that hangs, too. The description is
made by a thread that waits for the signal: the main thread may be the one that hangs.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger("argosy.core")


def dump_stacks_on_signal() -> None:
    """From here on SIGUSR1 dumps stacks, where it used to kill. Call it first thing."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)


def describe_on_signal(describe: Callable[[], str]) -> None:
    """Logs a description, too. Called in the main thread.

    Args:
        describe: called in another thread; what it raises is logged.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, chain=True)
    threading.Thread(target=_describe, args=(read_end, describe), daemon=True, name="diagnostics").start()


def _describe(read_end: int, describe: Callable[[], str]) -> None:
    while os.read(read_end, 4096):
        try:
            logger.warning("%s", describe())
        except Exception:
            logger.exception("the state could not be described")
