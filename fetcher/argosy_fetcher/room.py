"""Room: removes models from a store that nobody uses, so that another one fits on its disk.

Owns which ones, and when none. Must not know how much a fetch needs, or why. Invariants: a model that a process holds,
or that was used a moment ago, stays; if all the others together would not make enough room, none is removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from argosy_fetcher.disk import FreeSpace, format_bytes, free_bytes
from argosy_fetcher.errors import FetchError
from argosy_fetcher.progress_display import duration_text
from argosy_fetcher.store import Store

_MARGIN: Final = FreeSpace()


def make_room(
    store: Store,
    num_bytes: int,
    *,
    source: str,
    min_age: float,
    note: Callable[[str], None],
    min_free: FreeSpace = _MARGIN,
    now: Callable[[], float] = time.time,
    free: Callable[[], int | None] | None = None,
) -> None:
    """Remove what was used longest ago, until the store's disk has room for more bytes or nothing else may go.

    Args:
        source: what is about to be fetched; other revisions of it may share files with it, and stay.
        min_age: seconds for which a model must not have been used. An engine that is about to start holds its model
            a few seconds after it was fetched.
        note: is told of each model that is removed.
        min_free: what must be left of the disk then.
        now: seconds since the epoch.
        free: the disk's free bytes; None if they are not known.
    """
    free = free or (lambda: free_bytes(store.root))
    store.touch_held(now(), min_age)
    unused = [
        model
        for model in (*store.list(), *store.list_partial())
        if model.source != source and now() - model.last_used_at >= min_age
    ]
    found = free()
    wanted = num_bytes + min_free.of(os.statvfs(store.root))
    if found is None or found >= wanted or found + sum(model.size for model in unused) < wanted:
        return
    for model in sorted(unused, key=lambda model: model.last_used_at):
        try:
            store.remove(model)
        except FetchError:
            continue  # it is in use
        unused_for = duration_text(max(0.0, now() - model.last_used_at))
        note(f"removed {model.source} ({format_bytes(model.size)}, unused for {unused_for}) to make room")
        found = free()
        if found is None or found >= wanted:
            return
