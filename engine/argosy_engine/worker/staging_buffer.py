"""StagingBuffer: everything that a step sends to the device, packed into one pinned buffer and copied at once.

The device's buffer has one address for good, and the parts of a step lie in the order in which they were put, so their
addresses follow from their sizes. The device's work is in order: a copy overwrites the buffer after the last step's
kernels have read it. The host writes the next step's parts while the last copy may still be under way, hence two pinned
buffers, each guarded by the event of its last copy.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.worker.device_runtime import DeviceEvent, DeviceRuntime

_ALIGNMENT = 16
"""Bytes. Kernels load 16 bytes at a time, and Triton specialises on it."""
_TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class StagingBuffer:
    """Packs arrays and copies them to the device.

    Args:
        num_bytes: capacity; see `padded_bytes`.
        head: bytes at the start of the device's buffer that belong to the owner and are never copied over.
    """

    def __init__(self, num_bytes: int, device: torch.device, runtime: DeviceRuntime, head: int = 0) -> None:
        self._runtime = runtime
        self._head = padded_bytes(head)
        device_bytes = torch.zeros(self._head + padded_bytes(num_bytes), dtype=torch.uint8, device=device)
        self._device_bytes = device_bytes
        self._typed = {dtype: device_bytes.view(dtype) for dtype in _TORCH_DTYPES.values()}
        self._pinned = [runtime.pinned(padded_bytes(num_bytes)) for _ in range(2)]
        self._copied: list[DeviceEvent | None] = [None, None]
        self._turn = 0
        self._end = 0

    def device_view(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the device's whole buffer, the head included, as a vector."""
        return self._typed[dtype]

    def begin(self) -> None:
        """Start a new step's parts. Waits for the copy before the last, which has nearly always ended."""
        self._turn = 1 - self._turn
        self._end = 0
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()

    def put(self, values: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        """Pack a vector and return its place on the device, which holds it after `send`."""
        start, nbytes, dtype = self._end, values.nbytes, values.dtype
        end = start + nbytes
        self._pinned[self._turn].array[start:end].view(dtype)[:] = values
        self._end = padded_bytes(end)
        first = self.device_index(start, dtype.itemsize)
        return self._typed[_TORCH_DTYPES[dtype]][first : first + len(values)]

    def device_index(self, start: int, itemsize: int) -> int:
        """Return the index, in `device_view` of a dtype of this size, of what is packed from byte `start` on."""
        return (self._head + start) // itemsize

    @property
    def end(self) -> int:
        """Bytes packed so far: where the next part begins."""
        return self._end

    def send(self) -> None:
        """Start the one copy of this step."""
        if self._end:
            target = self._device_bytes[self._head : self._head + self._end]
            self._copied[self._turn] = self._runtime.copy_to_device(
                self._pinned[self._turn].tensor[: self._end], target
            )


def padded_bytes(num_bytes: int) -> int:
    """Round up to the alignment of a part."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
