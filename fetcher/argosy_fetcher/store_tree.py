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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from argosy_fetcher.disk import FreeSpace
from argosy_fetcher.store_index import (
    LAST_USE,
    LOCK,
    PARTIAL_PREFIX,
    TRASH_PREFIX,
    is_revision,
    is_source_directory,
)

MAX_ENTRIES: Final = 100_000
"""Files and directories of one namespace that are looked at in one round. A thousand models have fewer."""
MAX_MODELS: Final = 2000
"""Models of one namespace that are looked at in one round."""
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
    """Bytes on the disk, without files that a model of the same store has which was used later."""
    last_used_at: float
    """Seconds since the epoch; never in the future, whatever its file says."""

    def __str__(self) -> str:
        return "/".join(self.path)


@dataclass(slots=True)
class _Usage:
    num_bytes: int
    """Of files with one name."""
    shared: dict[int, int]
    """Bytes of files with several names, which other models may have as well, by inode."""
    changed_at: float


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
    """Remove what was not used for `max_age`; then, until all have at most `max_bytes` and the disk has `min_free`,
    what was used longest ago in the namespace that has most.

    Args:
        now: seconds since the epoch.

    Raises:
        OSError: the tree itself cannot be read.
    """
    time_now = now()
    with _opened(tree, None) as root:
        pruning = _Pruning(root, limits, time_now)
        pruning.by_age()
        pruning.by_size()
    return TreePruned(
        tuple(pruning.removed),
        tuple(pruning.in_use),
        tuple(pruning.failed),
        sum(pruning.num_bytes.values()),
    )


class _Pruning:
    """One round."""

    def __init__(self, root: int, limits: PruneLimits, now: float) -> None:
        self.removed: list[TreeModel] = []
        self.in_use: list[TreeModel] = []
        self.failed: list[tuple[TreeModel, str]] = []
        self.num_bytes: Counter[str] = Counter()
        """By namespace."""
        self._root = root
        self._limits = limits
        self._now = now
        models = sorted(
            _models(root, now, limits.min_age, self.num_bytes), key=lambda model: model.last_used_at
        )
        self._unused = [model for model in models if now - model.last_used_at >= limits.min_age]

    def by_age(self) -> None:
        max_age = self._limits.max_age
        if max_age is not None:
            old = [model for model in self._unused if self._now - model.last_used_at > max_age]
            self._unused = self._unused[len(old) :]
            for model in old:
                self._try(model)

    def by_size(self) -> None:
        """Remove from the namespace that has most. Times are what tenants say: the order must not let one of them keep
        all of its models at the cost of others."""
        unused: dict[str, deque[TreeModel]] = {}
        for model in self._unused:
            unused.setdefault(model.path[0], deque()).append(model)
        while unused and self._is_too_much():
            namespace = max(unused, key=lambda name: (self.num_bytes[name], -unused[name][0].last_used_at))
            self._try(unused[namespace].popleft())
            if not unused[namespace]:
                del unused[namespace]

    def _is_too_much(self) -> bool:
        max_bytes = self._limits.max_bytes
        is_above = max_bytes is not None and sum(self.num_bytes.values()) > max_bytes
        return is_above or _is_full(self._root, self._limits)

    def _try(self, model: TreeModel) -> None:
        try:
            is_removed = _remove(self._root, model, self._now)
        except FileNotFoundError:
            return  # its tenant was faster
        except OSError as error:
            self.failed.append((model, error.strerror or str(error)))
            return
        (self.removed if is_removed else self.in_use).append(model)
        self.num_bytes[model.path[0]] -= model.size if is_removed else 0


def _models(root: int, now: float, min_age: float, num_bytes: Counter[str]) -> Iterator[TreeModel]:
    """Yield the models of all stores, and add what each namespace has on the disk."""
    for namespace, in_namespace in _subdirectories(root, _is_tenant, iter(range(MAX_ENTRIES))):
        budget, num_left = iter(range(MAX_ENTRIES)), iter(range(MAX_MODELS))
        for scope, in_scope in _subdirectories(in_namespace, _is_tenant, budget):
            found = list(_in_scope((namespace, scope), in_scope, now, min_age, budget, num_left))
            counted: set[int] = set()
            for path, usage, used_at in sorted(found, key=lambda entry: -entry[2]):
                # A file that several models have counts for the one that will go last.
                size = usage.num_bytes + sum(
                    size for inode, size in usage.shared.items() if inode not in counted
                )
                counted.update(usage.shared)
                num_bytes[namespace] += size
                if not path[3].startswith(TRASH_PREFIX):
                    yield TreeModel(path, size, used_at)


def _in_scope(
    parents: tuple[str, str],
    in_scope: int,
    now: float,
    min_age: float,
    budget: Iterator[int],
    num_left: Iterator[int],
) -> Iterator[tuple[tuple[str, str, str, str], _Usage, float]]:
    """Yield path, room and last use of a store's models, and of what interrupted removals have left."""
    for source, in_source in _subdirectories(in_scope, is_source_directory, budget):
        for name, model in _subdirectories(in_source, _is_model, budget):
            if next(num_left, None) is None:
                return
            if name.startswith(TRASH_PREFIX):
                with suppress(OSError):
                    _delete(in_source, name)
                    continue
            usage = _measure(model, budget)
            used_at = _last_use(model) or usage.changed_at
            if now - used_at >= min_age:  # else it may be about to be held, for which it must be free
                _touch_if_held(model, now)
            yield (*parents, source, name), usage, min(used_at, now)


def _is_full(root: int, limits: PruneLimits) -> bool:
    disk = os.fstatvfs(root)
    return limits.min_free is not None and disk.f_bavail * disk.f_frsize < limits.min_free.of(disk)


def _is_tenant(name: str) -> bool:
    return _TENANT.fullmatch(name) is not None


def _is_model(name: str) -> bool:
    for prefix in (PARTIAL_PREFIX, TRASH_PREFIX):
        name = name.removeprefix(prefix)
    return is_revision(name)


def _measure(model: int, budget: Iterator[int]) -> _Usage:
    """Return a model's room on the disk, and the time of its last change."""
    usage = _Usage(0, {}, os.fstat(model).st_mtime)
    for status in _files(model, budget, _MAX_DEPTH):
        if status.st_nlink > 1:
            usage.shared[status.st_ino] = status.st_blocks * 512
        else:
            usage.num_bytes += status.st_blocks * 512
        usage.changed_at = max(usage.changed_at, status.st_mtime)
    return usage


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
        status = os.stat(LAST_USE, dir_fd=model, follow_symlinks=False)
    except OSError:
        return None
    return status.st_mtime if stat.S_ISREG(status.st_mode) else None


def _touch_if_held(model: int, now: float) -> None:
    """Note the use of a model that a process holds, because that process may see it read-only: its age counts from the
    last round in which somebody held it."""
    with suppress(OSError), _locked(LAST_USE, model) as is_free:
        if not is_free:
            os.utime(LAST_USE, (now, now), dir_fd=model, follow_symlinks=False)


def _remove(root: int, model: TreeModel, now: float) -> bool:
    """Remove a model; False if a process holds or fetches it, or has used it since it was looked at."""
    namespace, scope, source, name = model.path
    with ExitStack() as opened:
        in_namespace = opened.enter_context(_opened(namespace, root))
        in_scope = opened.enter_context(_opened(scope, in_namespace))
        in_source = opened.enter_context(_opened(source, in_scope))
        directory = opened.enter_context(_opened(name, in_source))
        is_partial = name.startswith(PARTIAL_PREFIX)
        if is_partial:
            is_free = opened.enter_context(_locked(LOCK, in_source))
        else:
            is_free = opened.enter_context(_locked(LAST_USE, directory))
        used_at = None if is_partial else _last_use(directory)
        if not is_free or (used_at is not None and min(used_at, now) > model.last_used_at):
            return False
        trash = f"{TRASH_PREFIX}{secrets.token_hex(8)}"
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
