"""What every program sets of its own process: its log's format, and how it keeps memory.

Log records are one line each, with tracebacks bounded in frames and bytes: the bounds keep an error that a client can
provoke, a thousand frames deep, from filling a disk.

Freed memory returns to the system (`return_freed_memory`). By default glibc takes blocks of up to 32 MiB from its heaps
once blocks of such a size have been freed, has heaps of its own for each thread, and returns only the end of a heap:
after a minute of bodies of some MiB each, a process that uses 26 MiB keeps 230. Here larger blocks have mappings of
their own, which are returned when they are freed. A setting that the environment makes (`MALLOC_ARENA_MAX`, ...) stays.

Collections stay short (`ShortCollections`). A full one looks at every object: a router of 4,000 replicas stood still
for 190 ms, though nothing was garbage. After one that took long, what it found alive is frozen, and the next ones look
only at what has come since. What belongs to a cycle and dies after that is not found, so after some such collections
everything is looked at again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar

from argosy_protocol.errors import Unavailable
from argosy_protocol.json_limits import Steps

T = TypeVar("T")

MAX_FRAMES = 24
"""Innermost frames shown per exception; most of the outer ones belong to the server's own machinery."""
MAX_TRACEBACK_BYTES = 8 * 1024
"""Limit of a whole traceback, including the exceptions that caused it."""
MAX_RECORD_BYTES = 32 * 1024
"""Limit of a whole record."""

_FORMAT = "%(asctime)s %(levelname)s {}%(name)s %(message)s"
_ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class BoundedFormatter(logging.Formatter):
    """Formats records; text beyond the bounds is left out in the middle.

    Args:
        process: name of this process, for programs that have several; it precedes the logger's.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__(_FORMAT.format(f"[{process}] " if process else ""))

    def format(self, record: logging.LogRecord) -> str:
        return _shortened(super().format(record), MAX_RECORD_BYTES)

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 - logging's name
        kind, error, frames = ei
        if kind is None or error is None:
            return ""
        lines = traceback.format_exception(kind, error, frames, limit=-MAX_FRAMES)
        return _shortened("".join(lines).rstrip("\n"), MAX_TRACEBACK_BYTES)


def format_frames(frames: TracebackType | None) -> str:
    """Format a traceback without the exception's message, which may quote a prompt, within the same bounds."""
    return _shortened("".join(traceback.format_tb(frames, limit=-MAX_FRAMES)), MAX_TRACEBACK_BYTES)


def configure_logging(level: str, handler: logging.Handler | None = None, process: str = "") -> None:
    """Send every logger's records to `handler` (standard error by default) in this format (`BoundedFormatter`)."""
    handler = handler or logging.StreamHandler()
    handler.setFormatter(BoundedFormatter(process))
    logging.basicConfig(level=level, handlers=[handler])


def _shortened(text: str, limit: int) -> str:
    """Leave out the middle of a text that has more characters than `limit`."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters left out ...\n{text[-limit // 2 :]}"


_SETTINGS: Final = (
    ("MALLOC_ARENA_MAX", -8, 2),  # number of heaps
    ("MALLOC_MMAP_THRESHOLD_", -3, 256 << 10),  # bytes, from which on a block has a mapping of its own
    ("MALLOC_TRIM_THRESHOLD_", -1, 1 << 20),  # bytes that may be free at the end of a heap
)
"""Environment variable, number of the parameter (mallopt(3)) and value. Each of the last two by itself also ends the
adjustment of both to what is freed."""


def return_freed_memory() -> None:
    """Apply the settings, before other threads have started; does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for variable, parameter, value in _SETTINGS:
        if variable not in os.environ:
            mallopt(parameter, value)


LONG_S: Final = 0.01
FREEZES_UNTIL_ALL: Final = 100
"""Long collections until one looks at everything again."""


class ShortCollections:
    """Follows the collector of this process within a `with` block. What is frozen at its end stays so: a program that
    ends need not look at it."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """
        Args:
            clock: seconds that a collection costs.
        """
        self._clock = clock
        self._began = 0.0
        self._freezes = 0

    def __enter__(self) -> None:
        gc.callbacks.append(self._note)

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = self._clock()
        elif self._clock() - self._began >= LONG_S:
            self._freezes += 1
            if self._freezes > FREEZES_UNTIL_ALL:
                self._freezes = 0
                gc.unfreeze()
            else:
                gc.freeze()


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


async def in_turns(steps: Steps[T]) -> T:
    """Do steps so that other work of the event loop has its turn between them; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


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


class OwnerSlots:
    """Counts the slots that are taken, and by whom."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def num_of(self, owner: str) -> int:
        """Return how many slots an owner has."""
        return self._taken[owner]

    def take(self, owner: str) -> bool:
        """Take a slot; return whether there was one for this owner. Whoever took one releases it once."""
        if self._taken[owner] >= self._size - self.num_taken:
            return False
        self._taken[owner] += 1
        self.num_taken += 1
        return True

    def refusal(self, owner: str, verb: str, things: str) -> Unavailable:
        """Return the error for an owner who got no slot, such as "the router `receives` 64 `files` already"."""
        return Unavailable(
            f"the router {verb} {self.num_taken} {things} already, {self.num_of(owner)} of them with this key; retry "
            "later",
            retry_after_s=1.0,
        )

    def release(self, owner: str) -> None:
        self.num_taken -= 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]


class _Line:
    """The requests of one owner."""

    def __init__(self, size: int) -> None:
        self.places = asyncio.Semaphore(size)
        self.num_requests = 0


class OwnerTurns:
    """Places for work that takes much memory or time. An owner has one or a few at a time, and those that wait get
    theirs in the order in which they came: one with a thousand requests delays another one by those few."""

    def __init__(self, size: int, of_owner: int = 1) -> None:
        """`of_owner`: places that an owner may have at a time."""
        self._of_owner = of_owner
        self._places = asyncio.Semaphore(size)
        self._lines: dict[object, _Line] = {}
        """Of owners that have a place or wait for one."""

    @property
    def num_owners(self) -> int:
        """Owners that have a place or wait for one."""
        return len(self._lines)

    @contextlib.asynccontextmanager
    async def turn(self, owner: object) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside the block."""
        line = self._lines.setdefault(owner, _Line(self._of_owner))
        line.num_requests += 1
        try:
            async with line.places, self._places:
                yield
        finally:
            line.num_requests -= 1
            if not line.num_requests:
                del self._lines[owner]
