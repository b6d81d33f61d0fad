"""Another user: runs a block without root's right to read every file."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run the block as a user who is not root; without root, as this one."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """A folder that every user can reach, as pytest's temporary folders cannot."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)
