"""SIGUSR1 to the API server: stacks of threads, places of tasks, ages of requests and readers; on standard error.

It is handed on to the core's process, which answers likewise (`core.diagnostics`): one signal to the server tells all.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal

from argosy_engine.api.app import Engine

logger = logging.getLogger("argosy.api")

MAX_TASKS = 64
"""Tasks listed; the rest is counted."""


def describe_on_signal(loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
    """From here on the signal logs the description, too; `core.diagnostics.dump_stacks_on_signal` came before."""

    def describe() -> None:
        try:
            state = f"state of the API: {engine.phase}" if engine.llm is None else engine.llm.describe()
            logger.warning("%s\n%s", state, describe_tasks(loop))
            if engine.llm is not None and not engine.llm.is_dead:
                os.kill(engine.llm.client.pid, signal.SIGUSR1)
        except Exception:
            logger.exception("the state could not be described")

    faulthandler.unregister(signal.SIGUSR1)
    loop.add_signal_handler(signal.SIGUSR1, describe)
    faulthandler.register(signal.SIGUSR1, chain=True)


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
