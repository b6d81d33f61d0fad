"""Makes Triton's interpreter refuse an access outside the tensors of a launch.

It reads and writes whatever address a kernel computes, as a GPU does: a row too many is memory that nobody wrote, and
such a test passes on most days.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter


class OutOfBoundsError(Exception):
    """A kernel's access outside the tensors that it was launched with."""


class CheckedMemory:
    """The interpreter's memory operations, with the addresses checked first."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._starts = self._ends = np.empty(0, np.uint64)

    def cover(self, tensors: list[torch.Tensor]) -> None:
        """Allow the addresses of these tensors, and no others. Views count as what they show, not as their storage."""
        spans: list[list[int]] = []
        for start, end in sorted(_span(each) for each in tensors if each.numel()):
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([start, end])
        self._starts, self._ends = np.array(spans, np.uint64).reshape(-1, 2).T

    def load(self, addresses: NDArray[np.uint64], mask: Any, other: Any, dtype: Any) -> Any:
        self._check("load", addresses, mask, np.dtype(dtype).itemsize)
        return self._memory.load(addresses, mask, other, dtype)

    def store(self, addresses: NDArray[np.uint64], values: Any, mask: Any) -> Any:
        self._check("store", addresses, mask, values.itemsize)
        return self._memory.store(addresses, values, mask)

    def atomic_rmw(
        self, operation: Any, addresses: NDArray[np.uint64], values: Any, mask: Any, order: Any
    ) -> Any:
        self._check("atomic operation", addresses, mask, values.itemsize)
        return self._memory.atomic_rmw(operation, addresses, values, mask, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _check(self, action: str, addresses: NDArray[np.uint64], mask: Any, itemsize: int) -> None:
        if np.shape(mask) != addresses.shape:
            mask = np.broadcast_to(mask, addresses.shape)
        used = addresses[mask].astype(np.uint64, copy=False)
        if not used.size:
            return
        if not len(self._starts):
            raise OutOfBoundsError(f"a {action} without any tensor")
        span = np.maximum(np.searchsorted(self._starts, used, side="right") - 1, 0)
        outside = (used < self._starts[span]) | (used + np.uint64(itemsize) > self._ends[span])
        if outside.any():
            first = int(used[outside][0])
            nearest = int(self._starts[span[outside][0]])
            raise OutOfBoundsError(
                f"a {action} of {outside.sum()} elements outside the kernel's tensors,"
                f" the first {first - nearest} bytes from the start of a span"
                f" of {int(self._ends[span[outside][0]]) - nearest} bytes"
            )


def check_bounds() -> None:
    """Check every access of every launch, for this process."""
    memory = CheckedMemory(interpreter._interpreter)
    convert = interpreter.GridExecutor._init_args_hst

    def init_args_host(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = convert(self, args, kwargs)
        arguments = [*on_host[0], *on_host[1].values()]
        memory.cover([each for each in arguments if isinstance(each, torch.Tensor)])
        return on_host

    interpreter._interpreter = memory
    interpreter.GridExecutor._init_args_hst = init_args_host


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
