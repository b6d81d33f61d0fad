"""Plain operations: where layers must compute with operations of torch, rather than with our own kernels.

torch.compile cannot look into our kernels and generates its own, from what it traces. So while it traces, layers call
torch; the same code runs without a compiler when a compiled layer is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_are_wanted: ContextVar[bool] = ContextVar("plain operations are wanted", default=False)


def needs_plain_operations() -> bool:
    """Whether the caller is being traced, or runs within `plain_operations`."""
    return torch.compiler.is_compiling() or _are_wanted.get()


@contextmanager
def plain_operations() -> Iterator[None]:
    """Let layers compute with torch, as if they were being traced."""
    token = _are_wanted.set(True)
    try:
        yield
    finally:
        _are_wanted.reset(token)
