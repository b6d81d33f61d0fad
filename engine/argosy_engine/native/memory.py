"""Large, long-lived arrays of the CPU path: weights, KV cache, scratch space."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import torch


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor in memory of its own, whose pages are committed when they are first written.

    Private and anonymous, because only then the kernel may back it with huge pages, which weights and the KV cache are
    read noticeably faster from: a walk through ordinary pages stops the prefetchers every 4 KiB.
    """
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
