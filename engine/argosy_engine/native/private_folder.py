"""Private folders under the user's cache directory, for code that is executed when it is read.

    $XDG_CACHE_HOME/argosy/NAME        (default: ~/.cache/argosy/NAME)

Invariant: nobody but the current user, and root, can write a returned folder, or put another one in its place. So both
folders belong to the user, neither is a link, and of the directory above them nobody else is the owner, nor may others
rename what is in it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NoPrivateFolder(Exception):
    """There is no such folder and it cannot be made, or others could write it; the message says why."""


def private_folder(name: str) -> Path:
    """Return `$XDG_CACHE_HOME/argosy/NAME` without links, created if missing.

    Raises:
        NoPrivateFolder: it cannot be created or written, or others could write it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    path = base / "argosy" / name
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        base = base.resolve()
        _check_base(base)
        for folder in (base / "argosy", base / "argosy" / name):
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_folder(folder, is_last=folder.name == name)
    except OSError as error:
        raise NoPrivateFolder(f"{path} cannot be created ({error.strerror}); set XDG_CACHE_HOME") from None
    path = base / "argosy" / name
    if not os.access(path, os.W_OK):
        raise NoPrivateFolder(f"{path} cannot be written; set XDG_CACHE_HOME")
    return path


def _check_base(base: Path) -> None:
    status = base.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise NoPrivateFolder(f"{base} belongs to somebody else; set XDG_CACHE_HOME")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise NoPrivateFolder(
            f"everybody may rename what is in {base}; set XDG_CACHE_HOME, or `chmod +t` the directory"
        )


def _check_folder(folder: Path, *, is_last: bool) -> None:
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise NoPrivateFolder(f"{folder} is a link; remove it, or set XDG_CACHE_HOME")
    is_own = status.st_uid == os.geteuid()
    if is_own and not is_last and status.st_mode & _WRITABLE_BY_OTHERS:
        # The user's umask was lenient. What is in the folder is checked in its turn.
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_WRITABLE_BY_OTHERS)
        status = folder.lstat()
    if not is_own or status.st_mode & _WRITABLE_BY_OTHERS:
        raise NoPrivateFolder(f"{folder} belongs to, or may be written by, somebody else; set XDG_CACHE_HOME")
