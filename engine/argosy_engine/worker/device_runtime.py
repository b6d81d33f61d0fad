"""Copies between a device and pinned host memory that do not wait: `HostCopies` from it, `StagingBuffer` to it.

`DeviceRuntime` is the only code of the worker that uses streams and events, so that tests can put another in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class PinnedMemory(NamedTuple):
    """Page-locked host memory, uint8 [num_bytes], as a tensor and as an array."""

    tensor: torch.Tensor
    array: NDArray[np.uint8]


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the device has reached this point. Work launched later is not waited for."""
        ...


class DeviceRuntime(Protocol):
    """Asynchronous copies of one device."""

    def pinned(self, num_bytes: int) -> PinnedMemory:
        """Allocate page-locked host memory. It may wait for the device: allocate rarely."""
        ...

    def copy_to_device(self, source: torch.Tensor, target: torch.Tensor) -> DeviceEvent:
        """Start a copy from pinned memory, in the order of the device's work.

        `source` must not change until the event.
        """
        ...

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> DeviceEvent:
        """Start a copy of a finished result to pinned memory, beside the device's later work.

        The copy starts when what was launched before has ended. `source` must be kept until the event.
        """
        ...


class CudaRuntime:
    """Copies on a CUDA device: to it on the current stream, from it on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device)

    def pinned(self, num_bytes: int) -> PinnedMemory:
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return PinnedMemory(memory, memory.numpy())

    def copy_to_device(self, source: torch.Tensor, target: torch.Tensor) -> DeviceEvent:
        target.copy_(source, non_blocking=True)
        return _recorded()

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> DeviceEvent:
        self._copies.wait_event(_recorded())
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            return _recorded()


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


_SMALLEST_BYTES = 1 << 14
"""Enough for the tokens of 2,048 requests."""
_STEPS_IN_FLIGHT = 2


class HostCopy:
    """Tensors on the host, or on their way to it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> Sequence[torch.Tensor]:
        """Return the tensors on the host when they have arrived. Work that was launched later is not waited for."""
        return self._tensors

    def release(self) -> None:
        """Give the memory of the tensors on the host back. Another thread than the one that starts copies may do so."""


class HostCopies:
    """Starts copies from one device.

    All results of a step are in one asynchronous copy to pinned memory. Pinned buffers are allocated ahead and reused,
    because allocating one may wait for the device. There are as many as steps in flight; larger ones replace them when
    log probabilities are asked for.

    Args:
        runtime: its pinned memory and streams.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._free = [runtime.pinned(_SMALLEST_BYTES).tensor for _ in range(_STEPS_IN_FLIGHT)]

    def start(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Start copying tensors of one device."""
        parts = [tensors[index].contiguous().view(torch.uint8).flatten() for index in _order(tensors)]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        buffer = self._take(len(packed))
        event = self._runtime.copy_to_host(packed, buffer[: len(packed)])
        return _PinnedCopy(tensors, packed, buffer, event, self._free)

    def _take(self, num_bytes: int) -> torch.Tensor:
        for index, buffer in enumerate(self._free):
            if len(buffer) >= num_bytes:
                return self._free.pop(index)
        if self._free:
            self._free.pop(0)  # replaced by the larger one
        return self._runtime.pinned(max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())).tensor


class _PinnedCopy(HostCopy):
    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        packed: torch.Tensor,
        buffer: torch.Tensor,
        event: DeviceEvent,
        free: list[torch.Tensor],
    ) -> None:
        super().__init__(tensors)
        self._packed: torch.Tensor | None = packed  # kept until the copy has ended
        self._buffer = buffer
        self._event = event
        self._free = free

    def wait(self) -> Sequence[torch.Tensor]:
        self._event.synchronize()
        self._packed = None
        arrived = list(self._tensors)
        start = 0
        for index in _order(self._tensors):
            tensor = self._tensors[index]
            part = self._buffer[start : start + tensor.nbytes]
            arrived[index] = part.view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
        return arrived

    def release(self) -> None:
        self._free.append(self._buffer)


def _order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the order in which tensors are packed: by size of their elements, so that all are aligned."""
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)


_ALIGNMENT = 16
"""Bytes. Kernels load 16 bytes at a time, and Triton specialises on it."""
_TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class StagingBuffer:
    """Packs arrays and copies them to the device.

    Everything that a step sends to the device is in one pinned buffer and copied at once. The device's buffer has one
    address for good, and the parts of a step lie in the order in which they were put, so their addresses follow from
    their sizes. The device's work is in order: a copy overwrites the buffer after the last step's kernels have read it.
    The host writes the next step's parts while the last copy may still be under way, hence two pinned buffers, each
    guarded by the event of its last copy.

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
