"""List the tasks of an event loop, for the state that engines and routers print on SIGUSR1."""

from __future__ import annotations

import asyncio

MAX_TASKS = 64
"""Number of tasks listed; the others are only counted."""


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """List the loop's tasks: name, and innermost frame where each waits."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = [f"  tasks: {len(tasks)}"]
    for task in tasks[:MAX_TASKS]:
        frames = task.get_stack(limit=1)
        where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "?"
        lines.append(f"    {task.get_name()}: {where}")
    if len(tasks) > MAX_TASKS:
        lines.append(f"    and {len(tasks) - MAX_TASKS} more")
    return "\n".join(lines)
