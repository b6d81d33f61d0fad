"""Garbage collector while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the garbage collector from running inside the block.

    The import of torch makes 180,000 objects, almost all of which stay. The collector would run 420 times meanwhile,
    for a tenth of the time that the import takes. Do not load weights inside.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
