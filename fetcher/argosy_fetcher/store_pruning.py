"""Store pruning: removal of models from a store.

Owns which models of one store go, removing them so that nobody finds half of one, and what interrupted removals have
left. Must not know sources or transfers. Invariant: a model that a process holds or fetches is not removed.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from argosy_fetcher import store_layout
from argosy_fetcher.disk import TEMPORARY_PREFIX
from argosy_fetcher.errors import FetchError, ModelInUse
from argosy_fetcher.file_lock import try_exclusive_lock
from argosy_fetcher.store_index import StoredModel, StoreIndex, names_in
from argosy_fetcher.store_usage import StoreUsage, unshared_bytes

_LEFTOVER_AGE: Final = 86400.0
"""Files of interrupted writes are deleted after a day, in case that locks have no effect on this file system."""


@dataclass(frozen=True, slots=True)
class Pruned:
    removed: tuple[StoredModel, ...]
    in_use: tuple[StoredModel, ...]
    """What should have been removed as well."""
    freed_bytes: int
    """Less than the sizes add up to if other models, or Hugging Face's cache, have the same files."""


class PrunableStore(StoreIndex):
    """A store from which models are removed."""

    def remove(self, model: StoredModel) -> None:
        """Remove a model, complete or not.

        Raises:
            ModelInUse: a process holds or fetches it.
            FetchError: it cannot be removed.
        """
        is_partial = model.path.name.startswith(store_layout.PARTIAL_PREFIX)
        lock = (model.path.parent / store_layout.LOCK) if is_partial else (model.path / store_layout.LAST_USE)
        use = "fetches" if is_partial else "uses"
        try:
            discard_unused(model.path, lock, f"{model.source} at {model.revision}:", use)
            self._sweep(model.path.parent)
        except OSError as error:
            raise FetchError(
                f"cannot remove {model.path}: {error.strerror or error}; check the directory's owner and permissions"
            ) from error

    def prune(self, max_bytes: int | None = None, max_age: float | None = None) -> Pruned:
        """Remove what was not used for `max_age` seconds, then what was used longest ago until the store has at most
        `max_bytes`. Interrupted fetches and damaged models count as models that were used when they last received
        something.

        Raises:
            FetchError: something cannot be removed.
        """
        models = sorted(
            (*self.list(), *self.list_partial(), *self.list_damaged()), key=lambda model: model.last_used_at
        )
        usage, now = StoreUsage(model.path for model in models), self._now()
        removed: list[StoredModel] = []
        in_use: list[StoredModel] = []
        freed_bytes = 0
        for model in models:
            is_old = max_age is not None and now - model.last_used_at > max_age
            is_too_much = max_bytes is not None and usage.total > max_bytes
            if not (is_old or is_too_much):
                continue
            unshared = unshared_bytes(model.path)
            try:
                self.remove(model)
            except ModelInUse:
                in_use.append(model)
            else:
                removed.append(model)
                freed_bytes += unshared
                usage.remove(model.path)
        for directory in self._source_directories():
            self._sweep(directory)
        return Pruned(tuple(removed), tuple(in_use), freed_bytes)

    def _sweep(self, directory: Path) -> None:
        """Delete what interrupted removals and writes have left, and a source's directory without a model."""
        names = names_in(directory)
        for name in names:
            if name.startswith(store_layout.TRASH_PREFIX):
                shutil.rmtree(directory / name, ignore_errors=True)
        has_leftovers = any(name.startswith(TEMPORARY_PREFIX) for name in names)
        if not has_leftovers and set(names_in(directory)) - {store_layout.LOCK, store_layout.REFS}:
            return
        with suppress(OSError), try_exclusive_lock(directory / store_layout.LOCK) as is_locked:
            if not is_locked:
                return
            for name in names_in(directory):
                path = directory / name
                is_old = self._now() - path.lstat().st_mtime > _LEFTOVER_AGE
                if name.startswith(TEMPORARY_PREFIX) and is_old:
                    path.unlink()
            if set(names_in(directory)) <= {store_layout.LOCK, store_layout.REFS}:
                (directory / store_layout.REFS).unlink(missing_ok=True)
                (directory / store_layout.LOCK).unlink()
                directory.rmdir()


def discard_unused(path: Path, lock: Path, what: str, use: str = "uses") -> None:
    """Delete a directory unless a process holds its lock. Without a lock file nothing can hold it.

    Raises:
        ModelInUse: a process does.
    """
    with try_exclusive_lock(lock) as is_locked:
        if not is_locked and lock.exists():
            raise ModelInUse(f"{what} a running process {use} it; stop that process first")
        discard(path)


def discard(path: Path) -> None:
    """Delete a directory so that no one finds half of it."""
    trash = path.with_name(f"{store_layout.TRASH_PREFIX}{secrets.token_hex(8)}")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)
