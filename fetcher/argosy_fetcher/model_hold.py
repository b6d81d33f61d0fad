"""Model hold: keeps a directory of the store from being removed while a program reads it.

Owns what happens where that is not possible: a directory that is of no store, or a file system without locks, is read
all the same.
"""

from __future__ import annotations

from pathlib import Path

from argosy_fetcher.errors import FetchError
from argosy_fetcher.file_lock import SharedLock
from argosy_fetcher.store import Store
from argosy_fetcher.store_layout import LAST_USE


def hold_model(path: Path) -> SharedLock | None:
    """Mark a model as used now, and as in use until the lock is closed or this process ends.

    Returns:
        None if nothing can be held.

    Raises:
        FetchError: the model is being removed.
    """
    if not (path / LAST_USE).is_file():
        return None
    try:
        return Store(path.parent.parent).hold(path)
    except FetchError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise
        return None  # for example on a network file system without locks
