"""SIGUSR1 handler: writes the stacks of all threads and a description of the process's state to standard error.

The signal handler itself, in C, writes the stacks, so a process that hangs writes them too. A separate thread writes
the description, because the main thread may be the one that hangs. A process that may have no other thread writes its
name at least.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger("argosy.core")


def dump_stacks_on_signal(program: str = "") -> None:
    """Dump stacks on SIGUSR1, which kills the process by default. Call it as early as possible, in the main thread.

    The signal is unblocked, because a process inherits what the thread that started it has blocked.

    Args:
        program: name to write after the stacks, for a process that does not call `describe_on_signal`. It is written
            once the main thread runs Python code.
    """

    def name(*_: object) -> None:
        os.write(2, f"{program}, process {os.getpid()}: its stacks are above\n".encode())

    signal.signal(signal.SIGUSR1, name if program else signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, chain=bool(program))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def describe_on_signal(program: str, describe: Callable[[], str]) -> None:
    """Log a description on SIGUSR1, besides the stacks. Call it in the main thread.

    Args:
        program: name of the program and its role; begins the description, together with the process id.
        describe: called in another thread; exceptions are logged.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, chain=True)
    threading.Thread(
        target=_describe, args=(read_end, program, describe), daemon=True, name="diagnostics"
    ).start()


def _describe(read_end: int, program: str, describe: Callable[[], str]) -> None:
    while os.read(read_end, 4096):
        try:
            logger.warning("%s, process %d: %s", program, os.getpid(), describe())
        except Exception:
            logger.exception("the state could not be described")
