"""Parts of a program that are begun anew when they fail, so that one fault does not end the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

RESTART_S = 1.0
"""Pause before a part that failed is begun anew."""


async def begun_anew(
    name: str, work: Callable[[], Coroutine[Any, Any, None]], on_failure: Callable[[], None]
) -> None:
    """Do work until it ends by itself, and begin it anew each time that it fails.

    Args:
        name: of the part, for the log.
        on_failure: called for each failure.
    """
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s failed; it is begun anew", name)
            on_failure()
            await asyncio.sleep(RESTART_S)
