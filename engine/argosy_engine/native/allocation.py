"""Allocation of the CPU path's large, long-lived arrays: weights, KV cache, scratch space."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import torch


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed tensor in a memory mapping of its own, whose pages are committed when they are first written.

    The mapping is private and anonymous, because only then may the kernel back it with huge pages. Weights and the KV
    cache are read noticeably faster from these: hardware prefetchers stop at every boundary of a 4 KiB page.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
