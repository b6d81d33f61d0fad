"""What the processes of an engine under test import: the workers of tests/support, which need no model where it does
not matter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent


@contextmanager
def worker_path(*, is_bare: bool = False) -> Iterator[None]:
    """Let the processes that are started until the block ends find the worker classes of `probe_worker`.

    Args:
        is_bare: let `bare_worker` take the place of the real `Worker`.
    """
    folders = [*([SUPPORT / "bare_workers"] if is_bare else []), SUPPORT]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)), prepend=os.pathsep)
        yield
