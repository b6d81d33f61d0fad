"""SIGUSR1 handler of the API server: logs where tasks wait, and the ages of requests and of telemetry readers.

It forwards the signal to the processes that it has started, which do the same (`osproc.debug_signal`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
from collections.abc import Callable

from argosy_engine.api.served_engine import Engine
from argosy_protocol.program.task_list import describe_tasks

logger = logging.getLogger("argosy.api")


def describe_server_on_signal(
    loop: asyncio.AbstractEventLoop, engine: Engine, pids: Callable[[], list[int]]
) -> None:
    """Log a description on SIGUSR1, besides the stacks (`osproc.debug_signal.dump_stacks_on_signal`).

    Args:
        pids: returns the processes to forward the signal to.
    """

    def describe() -> None:
        try:
            state = f"state of the API: {engine.phase}" if engine.llm is None else engine.llm.describe()
            logger.warning("argosy engine API, process %d: %s\n%s", os.getpid(), state, describe_tasks(loop))
            for pid in pids():
                os.kill(pid, signal.SIGUSR1)
        except Exception:
            logger.exception("the state could not be described")

    faulthandler.unregister(signal.SIGUSR1)
    loop.add_signal_handler(signal.SIGUSR1, describe)
    faulthandler.register(signal.SIGUSR1, chain=True)
