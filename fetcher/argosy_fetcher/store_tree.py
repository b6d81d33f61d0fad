"""Store tree: prunes the stores of many tenants, TREE/NAMESPACE/SCOPE, as one pool.

Owns which models of all stores are removed, and removing them safely. Must not know who the tenants are. A tenant may
have put anything into its store, and may change it at any moment. Invariants: no link is followed, because every step
goes by a descriptor of its directory; nothing that tenants wrote is read, only names and file attributes; work and
memory are bounded per tenant; a fault of one tenant's store leaves the others their turn.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from argosy_fetcher import store_layout
from argosy_fetcher.disk import FreeSpace

MAX_ENTRIES: Final = 100_000
"""Files and directories of one store that are looked at in one round. A thousand models have fewer."""
MAX_DELETIONS: Final = 1_000_000
"""Files and directories of one model that are deleted in one round; the next round goes on."""
_MAX_DEPTH: Final = 3
"""Levels of folders that a model has at most."""
_BATCH: Final = 1000
_TENANT: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,254}")
"""Names of namespaces and Secrets."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class PruneLimits:
    max_bytes: int | None
    """Of all stores together; None for no limit."""
    max_age: float | None
    """Seconds after its last use at which a model goes; None for no limit."""
    min_age: float
    """Seconds after its last use in which a model stays. An engine that is about to start holds its model a few
    seconds after it was fetched."""
    min_free: FreeSpace | None = None
    """Of the tree's disk, whoever fills it; None for no limit."""


@dataclass(frozen=True, slots=True)
class TreeModel:
    """A model of one store, complete or not."""

    path: tuple[str, str, str, str]
    """Namespace, scope, the source's directory, and the model's in it."""
    size: int
    """Bytes on the disk; of a file that other models have as well, this model's share."""
    last_used_at: float
    """Seconds since the epoch; never in the future, whatever its file says."""

    def __str__(self) -> str:
        return "/".join(self.path)


@dataclass(frozen=True, slots=True)
class TreePruned:
    """What one round has done."""

    removed: tuple[TreeModel, ...]
    in_use: tuple[TreeModel, ...]
    """What should have been removed as well."""
    failed: tuple[tuple[TreeModel, str], ...]
    """What could not be removed, and why."""
    kept_bytes: int


def prune_tree(tree: Path, limits: PruneLimits, *, now: Callable[[], float] = time.time) -> TreePruned:
    """Remove what was not used for `max_age`, then what was used longest ago until all have at most `max_bytes`.

    Args:
        now: seconds since the epoch.

    Raises:
        OSError: the tree itself cannot be read.
    """
    time_now = now()
    with _opened(tree, None) as root:
        models = sorted(_models(root, time_now, limits.min_age), key=lambda model: model.last_used_at)
        total = sum(model.size for model in models)
        removed: list[TreeModel] = []
        in_use: list[TreeModel] = []
        failed: list[tuple[TreeModel, str]] = []
        for model in models:
            unused_for = time_now - model.last_used_at
            is_old = limits.max_age is not None and unused_for > limits.max_age
            is_too_much = (limits.max_bytes is not None and total > limits.max_bytes) or _is_full(
                root, limits
            )
            if unused_for < limits.min_age or not (is_old or is_too_much):
                continue
            try:
                is_removed = _remove(root, model, time_now)
            except FileNotFoundError:
                continue  # its tenant was faster
            except OSError as error:
                failed.append((model, error.strerror or str(error)))
                continue
            (removed if is_removed else in_use).append(model)
            total -= model.size if is_removed else 0
    return TreePruned(tuple(removed), tuple(in_use), tuple(failed), total)


def _models(root: int, now: float, min_age: float) -> Iterator[TreeModel]:
    for namespace, in_namespace in _subdirectories(root, _is_tenant, iter(range(MAX_ENTRIES))):
        for scope, in_scope in _subdirectories(in_namespace, _is_tenant, iter(range(MAX_ENTRIES))):
            budget = iter(range(MAX_ENTRIES))
            for source, in_source in _subdirectories(in_scope, store_layout.is_source_directory, budget):
                for name, model in _subdirectories(in_source, _is_model, budget):
                    if name.startswith(store_layout.TRASH_PREFIX):
                        with suppress(OSError):
                            _delete(in_source, name)  # what an interrupted removal has left
                        continue
                    size, changed_at = _measure(model, budget)
                    used_at = _last_use(model) or changed_at
                    if (
                        now - used_at >= min_age
                    ):  # else it may be held at this moment, for which it must be free
                        _touch_if_held(model, now)
                    yield TreeModel((namespace, scope, source, name), size, min(used_at, now))


def _is_full(root: int, limits: PruneLimits) -> bool:
    disk = os.fstatvfs(root)
    return limits.min_free is not None and disk.f_bavail * disk.f_frsize < limits.min_free.of(disk)


def _is_tenant(name: str) -> bool:
    return _TENANT.fullmatch(name) is not None


def _is_model(name: str) -> bool:
    for prefix in (store_layout.PARTIAL_PREFIX, store_layout.TRASH_PREFIX):
        name = name.removeprefix(prefix)
    return store_layout.is_revision(name)


def _measure(model: int, budget: Iterator[int]) -> tuple[int, float]:
    """Return a model's bytes on the disk, and the time of its last change."""
    size, changed_at = 0, os.fstat(model).st_mtime
    for status in _files(model, budget, _MAX_DEPTH):
        size += status.st_blocks * 512 // max(status.st_nlink, 1)
        changed_at = max(changed_at, status.st_mtime)
    return size, changed_at


def _files(directory: int, budget: Iterator[int], depth: int) -> Iterator[os.stat_result]:
    for name in _names(directory, budget):
        with suppress(OSError):  # unreadable, or gone
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                yield status
            elif depth > 0:
                with _opened(name, directory) as folder:
                    yield from _files(folder, budget, depth - 1)


def _last_use(model: int) -> float | None:
    """Return when a model was used last; None if it does not say so."""
    try:
        status = os.stat(store_layout.LAST_USE, dir_fd=model, follow_symlinks=False)
    except OSError:
        return None
    return status.st_mtime if stat.S_ISREG(status.st_mode) else None


def _touch_if_held(model: int, now: float) -> None:
    """Note the use of a model that a process holds, because that process may see it read-only: its age counts from the
    last round in which somebody held it."""
    with suppress(OSError), _locked(store_layout.LAST_USE, model) as is_free:
        if not is_free:
            os.utime(store_layout.LAST_USE, (now, now), dir_fd=model, follow_symlinks=False)


def _remove(root: int, model: TreeModel, now: float) -> bool:
    """Remove a model; False if a process holds or fetches it, or has used it since it was looked at."""
    namespace, scope, source, name = model.path
    with ExitStack() as opened:
        in_namespace = opened.enter_context(_opened(namespace, root))
        in_scope = opened.enter_context(_opened(scope, in_namespace))
        in_source = opened.enter_context(_opened(source, in_scope))
        directory = opened.enter_context(_opened(name, in_source))
        is_partial = name.startswith(store_layout.PARTIAL_PREFIX)
        if is_partial:
            is_free = opened.enter_context(_locked(store_layout.LOCK, in_source))
        else:
            is_free = opened.enter_context(_locked(store_layout.LAST_USE, directory))
        used_at = None if is_partial else _last_use(directory)
        if not is_free or (used_at is not None and min(used_at, now) > model.last_used_at):
            return False
        trash = f"{store_layout.TRASH_PREFIX}{secrets.token_hex(8)}"
        os.rename(name, trash, src_dir_fd=in_source, dst_dir_fd=in_source)
        _delete(in_source, trash)
    return True


def _delete(parent: int, name: str) -> None:
    """Delete a directory of any depth without recursion: what is in its folders is moved up, a level at a time."""
    budget = iter(range(MAX_DELETIONS))
    with _opened(name, parent) as top:
        while names := list(islice(_names(top, budget), _BATCH)):
            for entry in names:
                _delete_entry(top, entry, budget)
        if next(budget, None) is None:
            raise OSError(errno.E2BIG, "more files than are deleted in one round")
    os.rmdir(name, dir_fd=parent)


def _delete_entry(top: int, name: str, budget: Iterator[int]) -> None:
    status = os.stat(name, dir_fd=top, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=top)
        return
    with _opened(name, top) as folder:
        for entry in _names(folder, budget):
            status = os.stat(entry, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                os.rename(entry, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(entry, dir_fd=folder)
    with suppress(OSError):  # not empty: its tenant adds to it, or the budget is spent
        os.rmdir(name, dir_fd=top)


def _subdirectories(
    parent: int, accepts: Callable[[str], bool], budget: Iterator[int]
) -> Iterator[tuple[str, int]]:
    """Yield names and descriptors, which are open until the next one."""
    with suppress(OSError):
        for name in sorted(name for name in _names(parent, budget) if accepts(name)):
            with suppress(OSError), _opened(name, parent) as directory:
                yield name, directory


def _names(directory: int, budget: Iterator[int]) -> Iterator[str]:
    """Yield names of a directory's entries, as many as the budget has left."""
    with os.scandir(directory) as entries:
        for entry, _ in zip(entries, budget, strict=False):
            yield entry.name


@contextmanager
def _opened(path: Path | str, parent: int | None) -> Iterator[int]:
    """Open a directory, which must not be a link."""
    descriptor = os.open(path, _DIRECTORY, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(name: str, directory: int) -> Iterator[bool]:
    """Lock a file; False if another process has locked it. Without a file, nothing is held."""
    try:
        descriptor = os.open(name, _LOCK_FILE, dir_fd=directory)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)
