"""Runs independent steps of one reconcile at the same time, so that it takes as long as its slowest request and not as
all of them in a row.

Must not know what a step does. Invariants: every step ends before the caller goes on, whether it succeeded or not, so
that no write of a reconcile is under way when the next one observes; a reconcile has at most AT_ONCE requests open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

AT_ONCE: Final = 8
"""Requests of one reconcile. With the workers' number (8) it bounds the requests of the process well below the
client's 100 connections, for which a request would have to wait within its deadline."""


async def run_together(steps: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all steps; return their results in the steps' order.

    Raises:
        Exception: what the first step, in the steps' order, that failed has raised, once all have ended.
    """
    pending = list(steps)
    if len(pending) == 1:
        return [await pending[0]()]
    slots = asyncio.Semaphore(AT_ONCE)

    async def run(step: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await step()

    outcomes = await asyncio.gather(*map(run, pending), return_exceptions=True)
    results = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results
