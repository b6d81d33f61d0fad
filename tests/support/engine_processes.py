"""What the processes of an engine under test import: the workers of tests/support, which need no model where it does
not matter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent


def python_path(*, is_bare: bool) -> str:
    """Return PYTHONPATH for a process that finds the worker classes of `probe_worker`.

    Args:
        is_bare: let `bare_worker` take the place of the real `Worker`.
    """
    folders = [*([SUPPORT / "bare_workers"] if is_bare else []), SUPPORT]
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def worker_path(*, is_bare: bool = False) -> Iterator[None]:
    """Give that path to the processes that are started until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(is_bare=is_bare))
        yield
