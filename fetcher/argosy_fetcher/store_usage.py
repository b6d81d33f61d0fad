"""Store usage: what models take on the disk.

Revisions of a model share files by hard links, and Hugging Face's own cache shares files with the store, so that sizes
do not add up to what a disk holds. Must not know locks or which models are removed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_PART_SUFFIX: Final = ".part"
"""Of files that are being written: they have their final size, and holes where nothing has arrived yet."""
_OWN_PREFIX: Final = ".argosy-"


class _Inode(NamedTuple):
    device: int
    number: int


class StoreUsage:
    """Bytes of models, with each file counted once, however many models link to it."""

    def __init__(self, models: Iterable[Path]) -> None:
        self._files = {path: _files_of(path) for path in models}
        self._num_users = Counter(inode for files in self._files.values() for inode in files)
        self.total = sum(
            {inode: size for files in self._files.values() for inode, size in files.items()}.values()
        )

    def remove(self, model: Path) -> None:
        """Take a model out of the total."""
        for inode, size in self._files.pop(model, {}).items():
            self._num_users[inode] -= 1
            if not self._num_users[inode]:
                self.total -= size


def unshared_bytes(model: Path) -> int:
    """Return the bytes that the removal of a directory frees: those of files without a link elsewhere."""
    files = list(files_below(model))
    num_links = Counter(_inode(found) for _, found in files)
    unshared = {
        _inode(found): stored_bytes(path, found)
        for path, found in files
        if num_links[_inode(found)] == found.st_nlink
    }
    return sum(unshared.values())


def stored_bytes(path: Path, found: os.stat_result) -> int:
    """Return the bytes of a file, or of what has arrived of it."""
    return found.st_blocks * 512 if path.name.endswith(_PART_SUFFIX) else found.st_size


def files_below(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a directory's files, at any depth, but the store's own, and those that vanish or cannot be read."""
    try:
        entries = list(os.scandir(path))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(Path(entry.path))
            continue
        if not entry.name.startswith(_OWN_PREFIX):
            with suppress(OSError):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _files_of(model: Path) -> dict[_Inode, int]:
    return {_inode(found): stored_bytes(path, found) for path, found in files_below(model)}


def _inode(found: os.stat_result) -> _Inode:
    return _Inode(found.st_dev, found.st_ino)
