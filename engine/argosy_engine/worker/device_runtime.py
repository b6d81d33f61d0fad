"""DeviceRuntime: copies between a device and pinned host memory that do not wait, and events that say when they end.

The only code of the worker that uses streams and events, so that tests can put another runtime in its place.
"""

from __future__ import annotations

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
