"""An event loop whose clock jumps to the next timer when nothing else is to be done: timeouts cost no waiting."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits, and no timer is set")
            self.now += max(0.0, timeout)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Run an asynchronous test in virtual time. It must not use sockets."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(test(*args, **kwargs))

    return run_test
