"""Wait for the first of several events."""

from __future__ import annotations

import asyncio


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until one of the events is set (True) or the timeout has passed (False)."""
    if any(event.is_set() for event in events):
        return True
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for waiter in waiters:
            waiter.cancel()
