"""HostCopies: results of a step on their way to the host, all of them in one asynchronous copy to pinned memory.

Pinned buffers are allocated ahead and reused, because allocating one may wait for the device. There are as many as
steps in flight; larger ones replace them when log probabilities are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from argosy_engine.worker.device_runtime import DeviceEvent, DeviceRuntime

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
