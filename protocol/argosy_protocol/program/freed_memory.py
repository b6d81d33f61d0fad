"""Makes a server return freed memory to the system instead of keeping it for requests like the largest ones it has had.

Owns: settings of glibc's allocator, which apply to the whole process. Must not know what a server allocates. Invariant:
a setting that the environment makes (`MALLOC_ARENA_MAX`, ...) stays.

By default glibc takes blocks of up to 32 MiB from its heaps once blocks of such a size have been freed, has heaps of
its own for each thread, and returns only the end of a heap. After a minute of bodies of some MiB each, a process that
uses 26 MiB keeps 230. Here larger blocks have mappings of their own, which are returned when they are freed.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

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
