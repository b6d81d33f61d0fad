"""Model hold: keeps a directory of the store from being removed while a program reads it, and its last use up to date.

Owns what happens where that is not possible: a directory that is of no store, or a file system without locks, is read
all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from argosy_fetcher.errors import FetchError, ModelRemoved
from argosy_fetcher.file_lock import SharedLock
from argosy_fetcher.store import Store
from argosy_fetcher.store_layout import LAST_USE

TOUCH_INTERVAL_S: Final = 3600.0
"""How wrong the last use of a killed process's model may be. `argosy models prune` counts in hours and days."""


class ModelHold:
    """A model in use, until it is closed or this process ends. A thread notes the use from time to time."""

    def __init__(self, store: Store, path: Path, lock: SharedLock, touch_interval_s: float) -> None:
        self._store = store
        self._path = path
        self._lock = lock
        self._closed = threading.Event()
        threading.Thread(
            target=self._keep_touching, args=(touch_interval_s,), name="model in use", daemon=True
        ).start()

    def close(self) -> None:
        """Note the use for the last time, and let go."""
        if not self._closed.is_set():
            self._closed.set()
            self._store.touch(self._path)
            self._lock.close()

    def __enter__(self) -> ModelHold:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _keep_touching(self, interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            self._store.touch(self._path)


def hold_model(
    path: Path,
    *,
    touch_interval_s: float = TOUCH_INTERVAL_S,
    now: Callable[[], float] = time.time,
) -> ModelHold | None:
    """Mark a model as used now, and as in use until the result is closed or this process ends.

    Args:
        now: seconds since the epoch.

    Returns:
        None if nothing can be held.

    Raises:
        ModelRemoved: the directory does not exist any more.
    """
    if not (path / LAST_USE).is_file():
        if path.is_dir():
            return None
        raise ModelRemoved(f"the model in {path} was removed; start again to fetch it")
    store = Store(path.parent.parent, now=now)
    try:
        lock = store.hold(path)
    except ModelRemoved:
        raise
    except FetchError:
        return None  # for example on a network file system without locks
    return ModelHold(store, path, lock, touch_interval_s)
